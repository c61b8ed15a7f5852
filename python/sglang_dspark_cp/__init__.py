"""DSpark speculative decoding behind context-parallel DeepSeek-V4 prefill, as a plugin for stock SGLang.

Importing this package pulls in neither torch nor sglang; `plugin.register` is what SGLang's plugin loader calls.
"""

__version__ = "0.1.0"
