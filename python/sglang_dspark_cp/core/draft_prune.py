"""The draft of a prefill worker: only what turns captured hidden states into draft KV.

On PD prefill the draft never drafts. Of its S stages it needs

    mtp.0.main_proj, mtp.0.main_norm          hidden states [T, A * H] -> context [T, H]
    mtp.s.attn.wkv, mtp.s.attn.kv_norm        context [T, H] -> KV row [T, 512] of stage s
    the rope table                            a buffer, computed, not loaded

and nothing of the experts, the query and output paths, the Markov head and the confidence head.
Names are those of the official checkpoint layout.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from ..errors import DraftLoadError, PrunedDraftError

_NEEDED = re.compile(r"mtp\.\d+\.(main_proj|main_norm|attn\.wkv|attn\.kv_norm)\.[a-z_]+")

Remap = Callable[[str], str | None]
"""Checkpoint name -> parameter name of the draft, None for a tensor that is not the draft's."""


def is_needed(name: str) -> bool:
    """Whether a checkpoint tensor is one that the context-only draft holds."""
    return _NEEDED.fullmatch(name) is not None


def needed_files(weight_map: Mapping[str, str]) -> set[str]:
    """Files of a checkpoint index (tensor name -> file name) that hold a needed tensor."""
    return {file for name, file in weight_map.items() if is_needed(name)}


class DraftLoad:
    """One pass of weights into the context-only draft: lets the needed ones through and keeps count.

    Args:
        parameters: the draft's parameters by name.
        remap: how the engine maps checkpoint names to parameter names.
        check_shapes: refuse a tensor of another shape than its parameter. For the first load only: afterwards
            quantisation may have changed the layout of parameters.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], remap: Remap, *, check_shapes: bool) -> None:
        self._parameters = parameters
        self._remap = remap
        self._check_shapes = check_shapes
        self.loaded: set[str] = set()
        self.skipped = 0

    def needed(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The needed ones of `weights`.

        Raises:
            DraftLoadError: a needed tensor has not the shape of its parameter.
        """
        for name, tensor in weights:
            if not is_needed(name):
                self.skipped += 1
                continue
            target = self._remap(name)
            parameter = self._parameters.get(target or "")
            if parameter is not None and target is not None:
                if self._check_shapes and tensor.numel() != parameter.numel():
                    raise DraftLoadError(
                        f"tensor {name} of the draft has shape {tuple(tensor.shape)}, allowed is"
                        f" {tuple(parameter.shape)} for this config.json; use a checkpoint whose files belong together"
                    )
                self.loaded.add(target)
            yield name, tensor

    def require_complete(self) -> None:
        """Check that every parameter of the draft came.

        Raises:
            DraftLoadError: naming the tensors that did not.
        """
        missing = sorted(checkpoint_name(name) for name in self._parameters.keys() - self.loaded)
        if missing:
            raise DraftLoadError(
                f"the checkpoint lacks {len(missing)} tensor(s) that draft KV is made with: {', '.join(missing)};"
                " use a DeepSeek-V4 checkpoint with its DSpark draft (mtp.*), or take --speculative-algorithm away"
            )


def checkpoint_name(parameter: str) -> str:
    """Checkpoint name of a parameter of the context-only draft, for messages."""
    name = parameter.replace("stages.", "mtp.", 1).replace(".self_attn.", ".attn.")
    return name.removesuffix(".weight_scale_inv") + ".scale" if name.endswith(".weight_scale_inv") else name


class DecodeOnly(torch.nn.Module):
    """Stands where the draft has a part that only drafting uses; holds nothing and says so when it is used."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, *args: object, **kwargs: object) -> object:
        """Refuse.

        Raises:
            PrunedDraftError: always.
        """
        raise PrunedDraftError(refusal(self.what))


def refusal(what: str) -> str:
    """Text for an attempt to draft."""
    return (
        f"{what} of the DSpark draft was asked for on a prefill worker, which holds only what makes draft KV; drafting"
        " runs on decode workers. SGLANG_DSPARK_CP_DRAFT=full keeps the whole draft on prefill too."
    )


def parameter_bytes(module: torch.nn.Module) -> int:
    """Bytes of a module's parameters; shared storage counts once."""
    seen: dict[int, int] = {}
    for parameter in module.parameters():
        seen[parameter.data_ptr() or id(parameter)] = parameter.numel() * parameter.element_size()
    return sum(seen.values())
