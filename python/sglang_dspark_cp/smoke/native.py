"""Shared libraries that the Mooncake wheel needs on a machine without GPU and RDMA.

The CUDA 13 wheel of Mooncake is linked against `libcuda.so.1`. Without a driver, a library of that name whose
functions all answer CUDA_ERROR_NO_DEVICE (100) is enough: the TCP transport never touches a GPU. This is a stand-in
for missing hardware; where a driver is installed it is not used.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

from ..errors import DsparkCpError

SYSTEM_LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libmlx5.so.1": "ibverbs-providers",
    "libnl-3.so.200": "libnl-3-200",
    "libnl-route-3.so.200": "libnl-route-3-200",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}
"""Library -> Debian / Ubuntu package."""

_DRIVER_CALLS = (
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetPCIBusId",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuInit",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemGetAddressRange_v2",
    "cuMemGetAllocationGranularity",
    "cuMemGetHandleForAddressRange",
    "cuMemImportFromShareableHandle",
    "cuMemMap",
    "cuMemRelease",
    "cuMemRetainAllocationHandle",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuPointerGetAttribute",
    "cuPointerSetAttribute",
)


class MissingNativeLibrary(DsparkCpError):
    """A shared library or the C compiler is not installed; the text holds the command that installs it."""


def _loadable(name: str) -> bool:
    try:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


def missing_packages() -> list[str]:
    """Debian / Ubuntu packages whose library cannot be loaded here."""
    return [package for library, package in SYSTEM_LIBRARIES.items() if not _loadable(library)]


def prepare(folder: Path | None = None) -> Path | None:
    """Make `mooncake.engine` importable: check the system libraries, build the driver stand-in where needed.

    Args:
        folder: where the stand-in is built (default: a folder in the system's temporary directory).

    Returns:
        The stand-in, to be loaded with `load` in every process before Mooncake; None where a driver is installed.

    Raises:
        MissingNativeLibrary: with the exact command that installs what is missing.
    """
    packages = missing_packages()
    if packages:
        raise MissingNativeLibrary(
            f"Mooncake needs shared libraries of {', '.join(packages)}, which are not installed. Install them with:"
            f" apt-get update && apt-get install -y {' '.join(packages)}"
        )
    if _loadable("libcuda.so.1"):
        return None
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise MissingNativeLibrary(
            "there is no NVIDIA driver here, and no C compiler to build a stand-in for libcuda.so.1. Install one with:"
            " apt-get update && apt-get install -y gcc libc6-dev"
        )
    target = (folder or Path(tempfile.mkdtemp(prefix="dspark-cp-"))) / "libcuda.so.1"
    source = target.with_name("cuda_no_device.c")
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in _DRIVER_CALLS))
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return target


def load(stand_in: Path | None) -> None:
    """Load the stand-in into this process, so that later look-ups of `libcuda.so.1` find it."""
    if stand_in is not None:
        ctypes.CDLL(str(stand_in), mode=ctypes.RTLD_GLOBAL)
