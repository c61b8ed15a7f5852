"""Entry point of SGLang's plugin loader (group `sglang.srt.plugins`): config -> adapter -> check -> install."""

from __future__ import annotations

from . import adapters, config
from .errors import ActivationError, ConfigError
from .guard import install_guard
from .hooks.check import problems, sglang_release, sglang_root
from .hooks.install import install


def register() -> None:
    """Install the eager hooks, all or none.

    In an SGLang release that was not reviewed, or one whose hooked definitions differ from the reviewed ones, only a
    guard is installed that refuses the feature by name; everything else stays stock.

    Raises:
        ActivationError: a variable of this package holds a bad value, or hooks cannot be applied.
    """
    try:
        settings = config.from_environment()
    except ConfigError as error:
        raise ActivationError(str(error)) from error
    if not settings.enabled:
        return
    release = sglang_release()
    adapter = adapters.find(release)
    if adapter is None:
        install_guard(adapters.refusal(release))
        return
    found = problems((*adapter.EAGER_HOOKS, *adapter.WORKER_HOOKS), sglang_root())
    if found:
        lines = "\n".join(f"  {problem}" for problem in found)
        install_guard(f"SGLang {release} is not the code that was reviewed for that release:\n{lines}\n")
        return
    if settings.dump_dir is not None:
        _require_debug_hooks(release)
    from .adapters import runtime

    runtime.start(settings)
    install(adapter.EAGER_HOOKS)


def _require_debug_hooks(release: str) -> None:
    found = problems(adapters.debug_hooks(release), sglang_root())
    if found:
        lines = "\n".join(f"  {problem}" for problem in found)
        raise ActivationError(
            f"{config.DUMP_DIR} is set, but the debug hooks do not fit this SGLang:\n{lines}\nUnset it to serve."
        )
