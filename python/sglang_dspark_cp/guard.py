"""What stands in an SGLang that was not reviewed or was changed: nothing, until the feature is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .adapters import REVIEWED
from .errors import ActivationError
from .hooks.check import Source, parameters, sglang_root
from .hooks.install import install
from .hooks.spec import Hook, ReliesOn, Tier

TARGET = "sglang.srt.arg_groups.speculative_hook._handle_dspark"


def install_guard(reason: str) -> None:
    """Refuse to start, with `reason`, where DSPARK meets CP on PD prefill; leave everything else to stock.

    Raises:
        ActivationError: the place to stand does not exist in this SGLang.
    """

    def refuse(original: Callable[..., Any], server_args: Any) -> Any:
        # An unknown release may lack these arguments; what it has not, nobody can ask for.
        asked = getattr(server_args, "disaggregation_mode", None) == "prefill" and (
            getattr(server_args, "enable_prefill_cp", False) or getattr(server_args, "attn_cp_size", 1) > 1
        )
        if asked:
            raise ActivationError(
                f"{reason} DSPARK on PD prefill with context parallelism is refused rather than run unchecked."
                f" Reviewed releases: {', '.join(REVIEWED)}. Install one of them, or set SGLANG_DSPARK_CP=0 to get"
                " what stock SGLang does."
            )
        return original(server_args)

    definition = Source(sglang_root()).find(TARGET)
    if definition is None or parameters(definition) != ("server_args",):
        raise ActivationError(
            f"{reason} {TARGET} is not there either, so the feature cannot even be refused when it is asked for."
            " Uninstall sglang-dspark-cp or set SGLANG_DSPARK_CP=0."
        )
    install(
        [
            Hook(
                id="guard",
                target=TARGET,
                handler=refuse,
                parameters=("server_args",),
                digest="",
                tier=Tier.EAGER,
                relies_on=ReliesOn.SIGNATURE,
                process="launcher and every scheduler, while arguments resolve",
                why="an SGLang that was not reviewed must not be patched",
                upstream="none, because it guards against the unknown",
                remove_when="never",
            )
        ]
    )
