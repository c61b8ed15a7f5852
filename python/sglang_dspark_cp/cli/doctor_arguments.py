"""Checks of the launch arguments: what SGLang makes of them, what the plugin will do, what it costs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from .. import config
from ..config import DraftParts
from ..core import costs
from ..core.costs import Chunk, Rates
from ..errors import ConfigError
from .doctor_check import Check, Machine, failed, not_checked, passed, warning
from .doctor_draft import shape_of
from .doctor_resolve import Answer

ARGUMENTS, WORK = "Arguments", "Prefill"
ROLES = ("prefill", "decode")
CP_FLAGS = "--enable-prefill-cp --cp-strategy interleave"
V4 = "DeepseekV4ForCausalLM"
V4_PAGE = 256
"""Page that SGLang sets for DeepSeek-V4."""
TYPICAL_CHUNK = 8192

_VIOLATION = re.compile(
    r"found (?P<found>.+?); allowed(?: is|:) (?P<allowed>.+?)[;,] because (?P<why>.+?); fix: (?P<fix>.+)"
)


def role_of(asked: str | None, answer: Answer, launch: Sequence[str] = ()) -> str | None:
    """The role that was asked for, else that of the arguments, as SGLang read them or, if it did not, as they stand."""
    flag = "--disaggregation-mode"
    spelt = [word for pair in pairwise(launch) for word in pair[1:] if pair[0] == flag]
    spelt += [word.partition("=")[2] for word in launch if word.startswith(f"{flag}=")]
    mode = answer.raw.get("disaggregation_mode", spelt[-1] if spelt else None)
    return asked or (mode if mode in ROLES else None)


def argument_checks(asked: str | None, answer: Answer) -> list[Check]:
    """Role, resolution, and whether DSPARK and CP are what they should be."""
    found = _role(asked, answer)
    if answer.resolved is None:
        return [*found, *_refusals(answer)]
    how = "by SGLang's own code"
    if answer.pretended:
        how += ", as if 8 H200 were here (torch sees no GPU)"
    if answer.stand_in:
        found.append(
            warning(
                ARGUMENTS,
                "resolution",
                f"accepted {how}, with a small DeepSeek-V4 in place of {answer.raw['model_path']}",
                "config.json of the model on this machine",
                "nothing is downloaded here, and the model's config.json decides too",
                "--model-path with the folder of the downloaded checkpoint",
            )
        )
    else:
        found.append(passed(ARGUMENTS, "resolution", f"accepted {how}"))
    role = role_of(asked, answer)
    return [*found, *(_decode(answer.resolved) if role == "decode" else _prefill(answer))]


def _role(asked: str | None, answer: Answer) -> list[Check]:
    mode = answer.raw.get("disaggregation_mode")
    if mode is None:
        return []
    if mode not in ROLES or (asked is not None and asked != mode):
        given = f"--disaggregation-mode {mode}" if mode in ROLES else "no --disaggregation-mode"
        return [
            failed(
                ARGUMENTS,
                "role",
                given if asked is None else f"--role {asked} with {given}",
                asked or "prefill or decode",
                "the plugin is for servers that prefill and decode apart",
                f"--disaggregation-mode {asked or 'prefill (or decode)'}",
            )
        ]
    return [passed(ARGUMENTS, "role", mode)]


def _refusals(answer: Answer) -> list[Check]:
    """One check for each thing that SGLang or the plugin refuses."""
    if answer.error.startswith("TopologyError"):
        each = [match.groupdict() for match in map(_VIOLATION.search, answer.error.splitlines()) if match]
        if each:
            return [failed(ARGUMENTS, "topology", **violation) for violation in each]
    if answer.broke:
        return [
            failed(
                ARGUMENTS,
                "resolution",
                answer.error + (f" ({answer.where})" if answer.where else ""),
                "an answer",
                "SGLang must be able to read its arguments before it can start",
                "see the log below; python -m sglang.launch_server --help shows the same, --timeout gives more time",
                answer.traceback,
            )
        ]
    return [
        failed(
            ARGUMENTS,
            "resolution",
            answer.error,
            "arguments that SGLang accepts",
            f"launch_server stops with this text{f', raised in {answer.where}' if answer.where else ''}",
            "change what the text names",
        )
    ]


def _prefill(answer: Answer) -> list[Check]:
    resolved = answer.facts
    cp, dspark = int(resolved["attn_cp_size"]), resolved["speculative_algorithm"] == "DSPARK"
    sizes = f"tp {resolved['tp_size']}, attention CP {cp}, dp {resolved['dp_size']}, pp {resolved['pp_size']}"
    if answer.architecture != V4:
        return [
            warning(
                ARGUMENTS,
                "plugin",
                f"architecture {answer.architecture}",
                V4,
                "the plugin leaves other models to stock SGLang",
                "--model-path with a DeepSeek-V4 checkpoint",
            )
        ]
    if not dspark:
        return [
            warning(
                ARGUMENTS,
                "speculation",
                f"speculation {resolved['speculative_algorithm']} on prefill",
                "DSPARK on both sides or on none",
                "a decode worker with DSPARK waits for draft KV that is not made here; the plugin does nothing",
                "--speculative-algorithm DSPARK, or leave it out on decode too",
            )
        ]
    if cp <= 1:
        return [
            warning(
                ARGUMENTS,
                "plugin",
                f"DSPARK without context parallelism ({sizes})",
                "CP on prefill",
                "the plugin does nothing here, SGLang is stock",
                CP_FLAGS,
            )
        ]
    return [passed(ARGUMENTS, "plugin", f"DSPARK on CP prefill: {sizes}; hooks {', '.join(answer.hooks)}")]


def _decode(resolved: Mapping[str, Any]) -> list[Check]:
    tp, dp = int(resolved["tp_size"]), int(resolved["dp_size"])
    attention = tp // dp if resolved["enable_dp_attention"] else tp
    found = [
        passed(ARGUMENTS, "plugin", "does nothing on decode: SGLang is stock"),
        passed(ARGUMENTS, "sizes", f"tp {tp}, dp {dp}, attention TP {attention}"),
    ]
    if resolved["speculative_algorithm"] == "DSPARK":
        return [*found, passed(ARGUMENTS, "speculation", "DSPARK")]
    return [
        *found,
        warning(
            ARGUMENTS,
            "speculation",
            f"speculation {resolved['speculative_algorithm']} on decode",
            "DSPARK on both sides or on none",
            "prefill makes and sends draft KV that nobody reads, and nothing is drafted",
            "--speculative-algorithm DSPARK, or leave it out on prefill too",
        ),
    ]


# --------------------------------------------------------------------------------------------------- the prefill worker


def work_checks(role: str | None, answer: Answer, machine: Machine) -> list[Check]:
    """Chunks, pages, gather mode, bytes per forward, memory of the draft; nothing on decode."""
    if role == "decode" or not answer.facts:
        return []
    resolved = answer.resolved
    cp = int(answer.facts["tp_size"]) if resolved is None else int(resolved["attn_cp_size"])
    found = [*_chunk(answer.facts, cp), *_page(answer.facts)]
    if resolved is None:
        return [*found, not_checked(WORK, "gather", "the arguments are refused", "the gather mode follows from them")]
    if resolved["speculative_algorithm"] != "DSPARK" or cp <= 1 or answer.architecture != V4:
        return found
    return [*found, *_gather(answer), *_costs(answer, machine)]


def _chunk(facts: Mapping[str, Any], cp: int) -> list[Check]:
    chunk, page = facts["chunked_prefill_size"], int(facts["page_size"] or V4_PAGE)
    if chunk is None:
        return [not_checked(WORK, "chunk", "--chunked-prefill-size is not given", "SGLang refused before it chose one")]
    chunk = int(chunk)
    if chunk <= 0:
        return [passed(WORK, "chunk", "chunked prefill is off: a prompt is one forward")]
    if chunk % page:
        return [
            failed(
                WORK,
                "chunk",
                f"--chunked-prefill-size {chunk}",
                f"a multiple of the page, {page} tokens",
                "SGLang refuses other sizes"
                + (f", and forwards with fewer than {cp} tokens run without CP" if chunk < cp else ""),
                f"--chunked-prefill-size {-(-chunk // page) * page}",
            )
        ]
    why = f"forwards with fewer than {cp} tokens, such as the rest of a prompt, run without CP"
    return [passed(WORK, "chunk", f"{chunk} tokens, {chunk // page} pages", why if cp > 1 else "")]


def _page(facts: Mapping[str, Any]) -> list[Check]:
    page = facts["page_size"]
    if page is None or int(page) == V4_PAGE:
        return [] if page is None else [passed(WORK, "page", f"{page} tokens")]
    return [
        warning(
            WORK,
            "page",
            f"{page} tokens",
            f"{V4_PAGE}",
            "SGLang sets it for DeepSeek-V4, and nothing else was tried",
            "leave out --page-size",
        )
    ]


def _gather(answer: Answer) -> list[Check]:
    if answer.mode_error:
        match = _VIOLATION.search(answer.mode_error)
        parts = match.groupdict() if match else {"found": answer.mode_error, "allowed": "", "why": "", "fix": ""}
        return [failed(WORK, "gather", **parts)]
    if answer.mode is None:
        return [not_checked(WORK, "gather", "no reviewed SGLang", "the mode is chosen by its adapter")]
    cache = "radix cache off" if answer.facts["disable_radix_cache"] else "radix cache on"
    return [passed(WORK, "gather", f"{answer.mode} ({answer.mode_why}), {cache}")]


def _costs(answer: Answer, machine: Machine) -> list[Check]:
    if answer.model_folder is None:
        why = "config.json of the model is not on this machine; sglang-dspark-cp plan --model pro has published numbers"
        return [not_checked(WORK, "cost", f"model {answer.facts['model_path']}", why)]
    shape = shape_of(Path(answer.model_folder))
    if isinstance(shape, str):
        return [not_checked(WORK, "cost", shape, "numbers follow from config.json")]
    facts, found = answer.facts, []
    if answer.mode is not None:
        tokens = int(facts["chunked_prefill_size"] or 0)
        tokens = min(tokens if tokens > 0 else TYPICAL_CHUNK, shape.positions)
        chunk = Chunk(tokens, int(facts["attn_cp_size"]), page=answer.page or V4_PAGE, radix=answer.page is not None)
        rows = {design.id: design for design in costs.designs(shape, chunk, Rates(1, 1, 1))}
        chosen, packed = rows[answer.mode], rows["packed"]
        text = f"{chosen.received_bytes / 1e6:,.1f} MB arrive at each rank per forward of {tokens} tokens"
        if chosen is not packed and packed.received_bytes:
            text += f", {chosen.received_bytes / packed.received_bytes:.1%} of packed rows"
        found.append(passed(WORK, "traffic", text, "by arithmetic, for one request: sglang-dspark-cp plan has more"))
    sharded = facts["moe_a2a_backend"] in (None, "none") and machine.environ.get("SGLANG_SHARED_EXPERT_TP1") != "1"
    parts = costs.draft_parts(shape, int(facts["tp_size"]), shared_sharded=sharded)
    stock, context = sum(part.stock for part in parts), sum(part.context for part in parts)
    try:
        full = config.from_environment(machine.environ).draft is DraftParts.FULL
    except ConfigError:
        full = False
    if full:
        text = f"{stock / 1e6:,.1f} MB per GPU, the whole draft ({config.DRAFT}=full)"
    else:
        text = f"{context / 1e6:,.1f} MB per GPU, {(stock - context) / 1e6:,.1f} MB less than the whole draft"
    return [*found, passed(WORK, "draft memory", text, "by arithmetic from config.json")]
