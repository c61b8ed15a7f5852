"""Large synthetic checkpoints that are quick to write: one random tensor per shape, streamed into shard files."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sglang_dspark_cp.core.draft_prune import is_needed
from sglang_dspark_cp.smoke.checkpoint import Geometry, _RandomBuilder, _write_tokenizer, model_config

INDEX = "model.safetensors.index.json"
DTYPES = {torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64"}
"""Names of dtypes in a safetensors header."""


@dataclass
class CloneBuilder(_RandomBuilder):
    """Linear layers of one shape share one random tensor: the values do not matter here, making them takes time."""

    made: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def random_linear(self, name: str, n: int, k: int, gain: float = 1.0) -> None:
        """As in the parent, made once per shape."""
        if (n, k) not in self.made:
            super().random_linear(name, n, k, gain)
            self.made[n, k] = (self.tensors[f"{name}.weight"], self.tensors[f"{name}.scale"])
        self.tensors[f"{name}.weight"], self.tensors[f"{name}.scale"] = self.made[n, k]


@dataclass(frozen=True)
class Written:
    """What a checkpoint holds.

    Attributes:
        bytes, files, tensors: of the whole checkpoint.
        draft_bytes, draft_files: of tensors `mtp.*` and of the files that they are in.
        needed_bytes, needed_files: of the tensors that the context-only draft needs and of their files.
    """

    bytes: int
    files: int
    tensors: int
    draft_bytes: int
    draft_files: int
    needed_bytes: int
    needed_files: int


def size_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor."""
    return tensor.numel() * tensor.element_size()


def pack(tensors: dict[str, torch.Tensor], shard_bytes: int) -> list[list[str]]:
    """Names by shard, in the order of the checkpoint: a shard is full when the next tensor would not fit."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, tensor in tensors.items():
        if shards[-1] and used + size_of(tensor) > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size_of(tensor)
    return shards


def write_shard(
    path: Path, names: Sequence[str], tensors: dict[str, torch.Tensor], advance: Callable[[int], None], flush: bool
) -> None:
    """One safetensors file: length of the header, header, data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + size_of(tensor)
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            out.write(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
            advance(size_of(tensors[name]))
        if flush:
            out.flush()
            os.fdatasync(out.fileno())


def write_large(
    folder: Path,
    geometry: Geometry,
    *,
    shard_bytes: int = 500_000_000,
    threads: int = 4,
    flush: bool = False,
    start: Callable[[int], None] = lambda total: None,
    advance: Callable[[int], None] = lambda done: None,
) -> Written:
    """Write an fp8 checkpoint in the official layout.

    Args:
        folder: made if missing.
        geometry: its sizes.
        shard_bytes: a file holds at most as much, unless one tensor is larger.
        threads: files that are written at a time.
        flush: to storage, so that the page cache can be dropped.
        start, advance: told the bytes of all tensors, and bytes that were written, for a progress bar.
    """
    geometry.validate("random", "fp8")
    tensors = CloneBuilder(geometry, "fp8", 0).build()
    shards = pack(tensors, shard_bytes)
    total = sum(size_of(tensor) for tensor in tensors.values())
    start(total)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda path, names: write_shard(path, names, tensors, advance, flush), paths, shards))
    weight_map = {name: path.name for path, names in zip(paths, shards, strict=True) for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(model_config(geometry, "fp8"), indent=1))
    _write_tokenizer(folder, geometry.vocab)

    def measure(names: Iterable[str]) -> tuple[int, int]:
        chosen = list(names)
        return sum(size_of(tensors[name]) for name in chosen), len({weight_map[name] for name in chosen})

    draft = measure(name for name in tensors if name.startswith("mtp."))
    needed = measure(filter(is_needed, tensors))
    return Written(total, len(paths), len(tensors), *draft, *needed)


# ------------------------------------------------------------------------------------------------------- page cache


def drop_cache(files: Iterable[Path]) -> None:
    """Ask the kernel to forget the cached pages of files that are on storage. It may keep some: see `cached_share`."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def fill_cache(files: Iterable[Path]) -> None:
    """Read files once, so that their pages are in the cache as far as they fit."""
    space = memoryview(bytearray(16 * 2**20))
    for file in files:
        with file.open("rb", buffering=0) as source:
            while source.readinto(space):
                pass


def cached_share(files: Iterable[Path]) -> float | None:
    """Share of the files' pages that are in the page cache now; None where the kernel does not tell."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    cached = pages = 0
    for file in files:
        size = file.stat().st_size
        count = math.ceil(size / mmap.PAGESIZE)
        states = (ctypes.c_ubyte * count)()
        with file.open("rb") as source:
            address = library.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, source.fileno(), 0)
            if address in (None, ctypes.c_void_p(-1).value):
                return None
            answer = library.mincore(address, size, states)
            library.munmap(address, size)
        if answer:
            return None
        cached += int((torch.frombuffer(states, dtype=torch.uint8) & 1).sum())
        pages += count
    return cached / pages if pages else None
