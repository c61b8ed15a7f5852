"""`smoke --device cuda --stock`: what stock SGLang says to DSPARK on a CP prefill worker, obstacle after obstacle."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import config
from . import set_ups
from .servers import Server, ServerFailed, ServerSet, first_traceback

if TYPE_CHECKING:
    from .cuda_run import GpuRun

UNCHECKED = "sglang_dspark_cp.smoke.launch_unchecked"
NO_DECODE_PEER = "2.2.2.2"
"""Bootstrap host for which SGLang's prefill computes a request and sends nothing."""
CRASH_WITHIN = 60.0


@dataclass(frozen=True)
class Step:
    """One attempt, which gets past the obstacles of the steps before it.

    Attributes:
        what: how the server is started.
        says: part of stock's answer in the reviewed release.
        unified: the unified CP flags instead of the legacy ones.
        extra: flags added.
        unchecked: with one check of stock bypassed.
        unsharded: with the Markov head's TP shard off.
    """

    what: str
    says: str
    unified: bool = False
    extra: tuple[str, ...] = ()
    unchecked: bool = False
    unsharded: bool = False


LM_HEAD = ("--enable-dp-lm-head",)
STEPS = (
    Step("unified CP flags", "mutually exclusive", unified=True),
    Step("legacy CP flags", "requires --enable-dp-lm-head"),
    Step("legacy CP flags, --enable-dp-lm-head", "does not support context parallel", extra=LM_HEAD),
    Step("the same with that check bypassed", "attn_tp_size", extra=LM_HEAD, unchecked=True),
    Step("and with the Markov shard off", "NotImplementedError", extra=LM_HEAD, unchecked=True, unsharded=True),
)


def make(job: GpuRun, number: int, step: Step) -> Server:
    """The server of a step, not started."""
    environment = {config.ENABLED: "0"}
    if step.unsharded:
        environment["SGLANG_DSPARK_OPT_MARKOV_W2_TP_SHARD"] = "0"
    module = UNCHECKED if step.unchecked else "sglang.launch_server"
    server = job.make_server(f"stock-{number}", f"prefill-cp{job.gpus.cp_size}", environment, module)
    if step.unified:
        kept = [part for part in server.command if part not in set_ups.CP_FLAGS]
        server.command = [*kept, *set_ups.UNIFIED_CP_FLAGS]
    server.command += step.extra
    return server


def stock_refusals(job: GpuRun) -> None:
    """Start all steps at once; the one that boots is asked for one prefill. Results go to the report."""
    report = job.report
    job.say(f"stock SGLang, {len(STEPS)} attempts at CP{job.gpus.cp_size} + DSPARK prefill")
    with ServerSet() as group:
        servers = [make(job, number, step) for number, step in enumerate(STEPS, 1)]
        failures = group.start_each(servers, job.args.boot_timeout)
        found: list[dict[str, Any]] = []
        for number, (step, server) in enumerate(zip(STEPS, servers, strict=True), 1):
            error = ""
            if server.name in failures:
                error = _last_line(first_traceback(server.log())) or str(failures[server.name])
                where = "at start"
            else:
                error = _ask_for_one_prefill(job, server)
                where = "at the first request"
            found.append({"step": number, "what": step.what, "where": where, "error": error[:500]})
            job.say(f"{number}. {step.what}: {error or 'accepted'}")
    report["stock_refusals"] = found
    for step, result in zip(STEPS, found, strict=True):
        if not result["error"]:
            report["reasons"].append(f"stock SGLang accepted: {step.what}")
        elif step.says not in result["error"]:
            report["reasons"].append(f"stock, {step.what}: {result['error']!r}, expected was {step.says!r}")


def _ask_for_one_prefill(job: GpuRun, server: Server) -> str:
    """The error of the first prefill request, from the server's log or the answer."""
    body = {
        "input_ids": list(job.prompts.measured[0]),
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "bootstrap_host": NO_DECODE_PEER,
        "bootstrap_room": 1,
    }
    reply = server.generate(body, CRASH_WITHIN, stream=False)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if "Traceback" in server.log():
            return _last_line(first_traceback(server.log()))
        try:
            server.require_alive()
        except ServerFailed as error:
            return _last_line(str(error))
        time.sleep(0.2)
    return reply.error


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else ""
