"""Unpack two large wheels without the parts that no run here uses. usage: unzip_parts.py WHEELS SITE MOONCAKE"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

UNUSED_KERNELS = ("sgl_kernel/flash_ops.abi3.so", "sgl_kernel/sm100/", "sgl_kernel/infllm_ops")
"""FA3, Blackwell, InfLLM."""
MOONCAKE_LIBRARIES = ("engine.so", "libasio.so", "libetcd_wrapper.so")


def main(wheels: Path, site: Path, mooncake: Path) -> None:
    """Unpack the kernel wheel into `site` and the Mooncake wheel into `mooncake`."""
    with zipfile.ZipFile(next(wheels.glob("sglang_kernel-*.whl"))) as archive:
        archive.extractall(site, [name for name in archive.namelist() if not name.startswith(UNUSED_KERNELS)])
    with zipfile.ZipFile(next(wheels.glob("mooncake_transfer_engine*.whl"))) as archive:
        for name in archive.namelist():
            path = Path(name)
            bundled = path.parent.name.endswith(".libs")
            if path.suffix == ".py" or path.name in MOONCAKE_LIBRARIES or ".dist-info/" in name or bundled:
                archive.extract(name, mooncake)


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:4]))
