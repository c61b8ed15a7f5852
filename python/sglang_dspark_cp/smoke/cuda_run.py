"""The measuring part of the GPU run: start servers, send the same prompts everywhere, judge what came back."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import config
from . import cuda_cost, judge, set_ups
from .checkpoint import CheckpointInfo, read_checkpoint_info, write_checkpoint
from .prompts import PromptSet, prompt_set
from .servers import HOST, Ports, Reply, Server, ServerFailed, ServerSet, all_at_once, launch_command
from .set_ups import Gpus, SetUp

REQUEST_TIMEOUT = 90.0
SHORTEST_RANDOM = 64
SHORT_NEW_TOKENS = 8
GAP_LIMIT = 1.5
"""Teacher-forced gap beyond which a token is not a rounding tie. With random weights up to 0.8 was seen between runs of
equal quality, and 2.2 to 4.5 with an altered context."""
FIRST_ROOM = 100_001
QUIET_S = 0.5
"""For NCCL's log of what ran before, or just ran, to be written."""


@dataclass
class Answers:
    """Replies of one set-up or control; `rooms` stand beside `measured` (0 without PD)."""

    measured: list[Reply] = field(default_factory=list)
    rooms: list[int] = field(default_factory=list)
    short: list[Reply] = field(default_factory=list)
    together: list[Reply] = field(default_factory=list)
    ttft_ms: dict[int, float] = field(default_factory=dict)
    gaps: list[float | None] = field(default_factory=list)

    def accept_lengths(self) -> list[float | None]:
        """Of the measured prompts, None where there is none."""
        return [accept_length(reply) for reply in self.measured]


def accept_length(reply: Reply) -> float | None:
    """Tokens per verification, as SGLang reports it."""
    value = reply.meta.get("spec_accept_length")
    return None if value is None else round(float(value), 4)


class GpuRun:
    """One run. Writes into `report` as it goes, so that a broken run still says what it saw."""

    def __init__(
        self,
        args: argparse.Namespace,
        gpus: Gpus,
        chosen: Sequence[SetUp],
        faults: Sequence[str],
        folder: Path,
        console: Console,
        report: dict[str, Any],
    ) -> None:
        self.args, self.gpus, self.chosen, self.faults = args, gpus, list(chosen), list(faults)
        self.folder, self.console, self.report = folder, console, report
        self.info = self._checkpoint()
        self.quant = self.info.quant
        report |= {"kind": self.info.kind, "quant": self.info.quant}
        self.prompts: PromptSet = prompt_set(
            self.info.sample_prompt,
            cp_size=gpus.cp_size,
            chunk=set_ups.CHUNK,
            shortest=self.info.period or SHORTEST_RANDOM,
        )
        self.servers: dict[str, Server] = {}
        self.bootstrap: dict[str, int] = {}
        self.answers: dict[str, Answers] = {}
        self._rooms = itertools.count(FIRST_ROOM)
        self._ports = Ports(args.ports)
        self._began = time.monotonic()

    # -------------------------------------------------------------------------------------------------- preparation

    def say(self, text: str, style: str | None = None) -> None:
        """One line of progress."""
        self.console.print(f"[{time.monotonic() - self._began:6.1f}] {text}", markup=False, style=style)

    def _checkpoint(self) -> CheckpointInfo:
        if self.args.model_dir:
            return read_checkpoint_info(self.args.model_dir)
        target = self.folder / "ck"
        if (target / "config.json").is_file():
            found = read_checkpoint_info(target)
            if (found.kind, found.quant) == (self.args.kind, self.args.quant):
                return found
        return write_checkpoint(target, kind=self.args.kind, quant=self.args.quant)

    def dump_folder(self, name: str) -> Path:
        """Where a server's debug hooks write."""
        return self.folder / "dump" / name

    def make_server(
        self, name: str, role: str, extra: dict[str, str] | None = None, module: str | None = None
    ) -> Server:
        """A server that is not started yet.

        Args:
            name: of its log and its dump folder.
            role: what it is, in the words of `set_ups.role_arguments`.
            extra: environment beyond the role's.
            module: what Python runs, if not what fits the GPUs.
        """
        port = self._ports.take()
        self.bootstrap[name] = port + 50
        gpus = set_ups.gpus_of(role, self.gpus)
        self.dump_folder(name).mkdir(parents=True, exist_ok=True)
        environment = set_ups.environment(self.quant, self.args.transfer, gpus)
        mode = {config.GATHER: self.args.mode} if self.args.mode else {}
        if set_ups.is_stock(role):
            environment |= {config.ENABLED: "0"}
        else:
            environment |= {config.DUMP_DIR: str(self.dump_folder(name)), **mode}
        if role.startswith(("prefill-cp", "prefill-stock")):
            environment |= cuda_cost.nccl_environment(self.folder, name)
        environment |= extra or {}
        arguments = [
            *set_ups.base_arguments(Path(self.info.path), self.quant),
            *set_ups.role_arguments(role, self.args.transfer, self.bootstrap[name]),
            # SGLang would draw a random port, and servers that start together draw the same one now and then.
            *("--nccl-port", str(port + 60)),
            *self.args.server_args.split(),
        ]
        command = launch_command(arguments, port, module or set_ups.launch_module(gpus))
        return Server(name, port, command, environment, self.folder)

    def start(self, group: ServerSet, servers: Iterable[Server]) -> set[str]:
        """Start servers; those that fail are shown at once and named in the answer."""
        new = list(servers)
        self.say(f"starting {len(new)} servers: {', '.join(server.name for server in new)}")

        def failed(server: Server, error: ServerFailed) -> None:
            self.say(str(error), style="red")
            self.report["reasons"].append(str(error))

        def ready(server: Server) -> None:
            self.say(f"{server.name} is ready after {server.boot_seconds} s")
            self.report.setdefault("boot_seconds", {})[server.name] = server.boot_seconds

        return set(group.start_each(new, self.args.boot_timeout, ready, failed))

    # ----------------------------------------------------------------------------------------------------- requests

    def ask(
        self, prefill: Server | None, answering: Server, prompt: Sequence[int], new_tokens: int
    ) -> tuple[Reply, int]:
        """Send one prompt; with PD, to both servers at once.

        Returns:
            The reply, with the prefill server's error in its text if there is one, and the bootstrap room.
        """
        body: dict[str, Any] = {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        }
        if prefill is None:
            (reply,) = all_at_once([lambda: answering.generate(body, REQUEST_TIMEOUT)], [answering])
            return reply, 0
        room = next(self._rooms)
        port = self.bootstrap[prefill.name]
        body |= {"bootstrap_host": HOST, "bootstrap_port": port, "bootstrap_room": room}
        prefilled, reply = all_at_once(
            [
                lambda: prefill.generate(body, REQUEST_TIMEOUT, stream=False),
                lambda: answering.generate(body, REQUEST_TIMEOUT),
            ],
            [prefill, answering],
        )
        if reply.tokens is None:
            reply.error = f"decode: {reply.error}; prefill: {prefilled.error or 'answered'}"
        return reply, room

    def measure(self, set_up: SetUp) -> None:
        """All prompts through one set-up."""
        answers = self.answers[set_up.name] = Answers()
        servers = [self.servers[name] for name in set_up.servers]
        prefill, answering = (servers[0], servers[1]) if set_up.prefill else (None, servers[0])
        new_tokens = self.args.new_tokens
        _flush(servers)
        for number, prompt in enumerate(self.prompts.measured, 1):
            reply, room = self.ask(prefill, answering, prompt, new_tokens)
            answers.measured.append(reply)
            answers.rooms.append(room)
            if reply.tokens is None:
                self.say(f"{set_up.name}: prompt {number} of {len(prompt)} tokens: {reply.error[:300]}", style="red")
        for prompt in self.prompts.short:
            answers.short.append(self.ask(prefill, answering, prompt, SHORT_NEW_TOKENS)[0])
        _flush(servers)
        calls = [
            functools.partial(self.ask, prefill, answering, self.prompts.measured[index], new_tokens)
            for index in self.prompts.together
        ]
        answers.together = [found[0] for found in all_at_once(calls, servers) if found is not None]
        for length, prompts in self.prompts.ttft.items():
            times = [self.ask(prefill, answering, prompt, 4)[0].first_token_s for prompt in prompts][1:]
            known = [seconds for seconds in times if seconds is not None]
            if known:
                answers.ttft_ms[length] = round(1000 * statistics.median(known), 2)
        self.say(f"{set_up.name}: mean accept length {judge.mean(answers.accept_lengths())}")

    def _force(self, answers: Answers) -> None:
        """Teacher-force every answer through the plain server."""
        for prompt, reply in zip(self.prompts.measured, answers.measured, strict=False):
            answers.gaps.append(self._gap(prompt, reply))

    def _gap(self, prompt: Sequence[int], reply: Reply) -> float | None:
        plain = self.servers.get("plain")
        if plain is None or not plain.alive() or not reply.tokens:
            return None
        _flush([plain])
        answer = plain.post(
            "/generate",
            {
                "input_ids": [*prompt, *reply.tokens],
                "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
                "return_logprob": True,
                "logprob_start_len": len(prompt) - 1,
                "top_logprobs_num": 1,
            },
            REQUEST_TIMEOUT,
        )
        return judge.worst_gap(answer.get("meta_info") or {}, reply.tokens)

    def expected(self, prompt: Sequence[int], count: int) -> list[int] | None:
        """Tokens that a right answer starts with, None if the checkpoint promises none."""
        return list(self.info.expected_continuation(prompt, count)) if self.info.period else None

    # ---------------------------------------------------------------------------------------------------------- run

    def run(self) -> None:
        """Measure every set-up, then the controls, and judge."""
        cp_set_ups = [each for each in self.chosen if each.is_cp]
        names = dict.fromkeys(name for each in self.chosen for name in each.servers)
        self.say(
            f"checkpoint {self.info.kind} {self.info.quant}; {len(self.prompts.measured)} prompts;"
            f" set-ups {', '.join(each.name for each in self.chosen)}"
        )
        control_base = None
        try:
            with ServerSet() as group:
                self.servers = {name: self.make_server(name, name) for name in names}
                down = self.start(group, self.servers.values())
                for set_up in self.chosen:
                    if down.isdisjoint(set_up.servers):
                        self._guarded(set_up.name, functools.partial(self.measure, set_up))
                for name, answers in self.answers.items():
                    self._guarded(name, functools.partial(self._force, answers))
                for set_up in self.chosen:
                    if (set_up.is_cp or set_up.is_stock) and self._complete(set_up.name):
                        self._guarded(set_up.name, functools.partial(self._chunk_cost, set_up))
                control_base = next((each for each in cp_set_ups if self._complete(each.name)), None)
                if self.faults and control_base is not None:
                    keep = self.servers[control_base.answers]
                    group.stop(server for server in group.servers if server is not keep)
                    self._controls(group, control_base)
        finally:
            self._report(control_base)

    def _chunk_cost(self, set_up: SetUp) -> None:
        """NCCL calls of one chunk without a cached prefix, once per prefill server."""
        assert set_up.prefill is not None
        costs = self.report.setdefault("chunk_cost", {})
        if set_up.prefill in costs:
            return
        prefill, decode = self.servers[set_up.prefill], self.servers[set_up.answers]
        (prompt,) = [each for each in self.prompts.measured if len(each) == set_ups.CHUNK][:1]
        _flush([prefill, decode])
        time.sleep(QUIET_S)
        before = cuda_cost.nccl_files(self.folder, prefill.name)
        self.ask(prefill, decode, prompt, 1)
        time.sleep(QUIET_S)
        calls = cuda_cost.calls_since(before, cuda_cost.nccl_files(self.folder, prefill.name))
        costs[set_up.prefill] = {"nccl": cuda_cost.summary(calls), "loaded_gb": cuda_cost.loaded_gb(prefill.log())}

    def _complete(self, name: str) -> bool:
        answers = self.answers.get(name)
        return answers is not None and len(answers.measured) == len(self.prompts.measured)

    def _guarded(self, name: str, work: Callable[[], Any]) -> None:
        try:
            work()
        except ServerFailed as error:
            self.say(str(error), style="red")
            self.report["reasons"].append(f"{name}: {error}")

    def _controls(self, group: ServerSet, like: SetUp) -> None:
        """Prefill servers with faults, in front of the decode server of a set-up that works."""
        assert like.prefill is not None
        decode = self.servers[like.answers]
        off = {fault: {config.FAULT: fault, config.ALIGN: "off"} for fault in self.faults}
        on = {fault: {config.FAULT: self._once(fault)} for fault in self.faults}
        for level, prefix, faults, work in (
            ("off", "fault", off, self._control),
            ("default", "proof", on, self._refusal),
        ):
            if self.args.fault_level not in (level, "both"):
                continue
            servers = {
                fault: self.make_server(f"{prefix}-{_label(fault)}", like.prefill, extra)
                for fault, extra in faults.items()
            }
            down = self.start(group, servers.values())
            for fault, server in servers.items():
                if server.name not in down:
                    self._guarded(server.name, functools.partial(work, fault, server, decode))
            group.stop(servers.values())  # so that all of them together need not fit in the GPUs' memory

    def _once(self, fault: str) -> str:
        """A fault of the first CP forward only; on the last CP rank alone if no rank is named."""
        kind, _, count = fault.partition("#")
        return f"{kind if '@' in kind else f'{kind}@{self.gpus.cp_size - 1}'}#{count or 1}"

    def _control(self, fault: str, server: Server, decode: Server) -> None:
        answers = self.answers[f"fault {fault}"] = Answers()
        calls = [
            functools.partial(self.ask, server, decode, self.prompts.measured[index], self.args.new_tokens)
            for index in self.prompts.controls
        ]
        for found in all_at_once(calls, [server, decode]):
            if found is not None:  # its thread met the end of a server, which is reported by itself
                answers.measured.append(found[0])
                answers.rooms.append(found[1])
        self.say(f"control {fault}: mean accept length {judge.mean(answers.accept_lengths())}")

    def _refusal(self, fault: str, server: Server, decode: Server) -> None:
        one_chunk = [prompt for prompt in self.prompts.measured if 150 <= len(prompt) <= set_ups.CHUNK]
        first, _ = self.ask(server, decode, one_chunk[0], SHORT_NEW_TOKENS)
        second, _ = self.ask(server, decode, one_chunk[1], SHORT_NEW_TOKENS)
        again, _ = self.ask(server, decode, one_chunk[0], SHORT_NEW_TOKENS)
        log = server.log()
        ranks = [f"AlignmentError on attn_cp_rank {rank}:" in log for rank in range(self.gpus.cp_size)]
        found = {
            "control": fault,
            "fault": server.environment[config.FAULT],
            "answered": first.tokens is not None,
            "error": first.error[:1500],
            "ranks_with_alignment_error": sum(ranks),
            "next_request_answered": self._right(second, one_chunk[1]),
            "same_prompt_answered_later": self._right(again, one_chunk[0]),
            "later_errors": [reply.error[:500] for reply in (second, again) if reply.error],
        }
        self.report.setdefault("proof_on", []).append(found)
        self.say(f"proof on, {fault}: {first.error[:160]!r}; next answered: {found['next_request_answered']}")

    def _right(self, reply: Reply, prompt: Sequence[int]) -> bool:
        return reply.tokens is not None and self.expected(prompt, SHORT_NEW_TOKENS) in (None, reply.tokens)

    # ------------------------------------------------------------------------------------------------------- report

    def _report(self, control_base: SetUp | None) -> None:
        report, reasons = self.report, self.report["reasons"]
        present = [each for each in self.chosen if each.name in self.answers]
        reference = set_ups.reference_of(present)
        proposals = self._proposals()
        report["prompts"] = len(self.prompts.measured)
        report["per_prompt"] = [self._prompt_row(index, present) for index in range(len(self.prompts.measured))]
        report["set_ups"] = {each.name: self._summary(each, reference, proposals) for each in present}
        row_reference = set_ups.row_reference_of(present)
        for each in present:
            if each.is_cp and row_reference is not None and row_reference is not reference:
                report["set_ups"][each.name]["rows_vs_cp1"] = self._rows_against(each, row_reference)
        for each in present:
            reasons += self._complaints(each)
            if each.is_cp:
                summary = report["set_ups"][each.name]
                finding = judge.Finding(
                    each.name,
                    summary["mean_accept_length"],
                    report["set_ups"][reference.name]["mean_accept_length"] if reference else None,
                    (summary.get("proposal_agreement") or {}).get("first_step"),
                    summary.get("rows_vs_cp1") or summary.get("rows_vs_non_cp"),
                )
                reasons += judge.judge_set_up(finding, strict_rows=self.info.kind == "oracle")
        self._report_controls(control_base, reference, proposals)
        for refusal in report.get("proof_on", []):
            reasons += judge.judge_refusal(refusal, self.gpus.cp_size)
        self._report_counters(present)

    def _prompt_row(self, index: int, present: Sequence[SetUp]) -> dict[str, Any]:
        prompt = self.prompts.measured[index]
        row: dict[str, Any] = {"tokens": len(prompt)}
        expected = self.expected(prompt, self.args.new_tokens)
        for each in present:
            answers = self.answers[each.name]
            if index >= len(answers.measured):
                continue
            reply = answers.measured[index]
            row[each.name] = {
                "accept_length": accept_length(reply),
                "as_expected": None if expected is None else reply.tokens == expected,
                "worst_gap": answers.gaps[index] if index < len(answers.gaps) else None,
                "ttft_ms": None if reply.first_token_s is None else round(1000 * reply.first_token_s, 2),
                "cached_tokens": reply.meta.get("cached_tokens"),
            }
        return row

    def _summary(self, each: SetUp, reference: SetUp | None, proposals: judge.Proposals) -> dict[str, Any]:
        answers = self.answers[each.name]
        everything = [*answers.measured, *answers.short, *answers.together]
        summary: dict[str, Any] = {
            "what": each.what,
            "asked": len(self.prompts.measured) + len(self.prompts.short) + len(self.prompts.together),
            "answered": sum(reply.tokens is not None for reply in everything),
            "mean_accept_length": judge.mean(answers.accept_lengths()),
            "mean_accept_length_together": judge.mean(accept_length(reply) for reply in answers.together),
            "ttft_ms": answers.ttft_ms,
            "worst_gap": max((gap for gap in answers.gaps if gap is not None), default=None),
        }
        if each.prefill is None:
            return summary
        if each.is_stock:
            return summary | self._rows_against_plugin(each)
        sent = judge.load_rows(self.dump_folder(each.prefill), "prefill")
        arrived = judge.load_rows(self.dump_folder(each.answers), "decode")
        rooms = [room for room in answers.rooms if room in sent and room in arrived]
        summary["rows_prefill_vs_decode"] = judge.compare_many((arrived[room], sent[room]) for room in rooms)
        if reference is None or each.name == reference.name:
            return summary
        theirs = self.answers[reference.name]
        base = judge.mean(theirs.accept_lengths())
        if base and summary["mean_accept_length"]:
            summary["accept_length_vs_non_cp"] = round(summary["mean_accept_length"] / base, 4)
        pairs = list(zip(answers.rooms, theirs.rooms, strict=False))
        summary["rows_vs_non_cp"] = self._rows_against(each, reference)
        agreed = judge.agreement(proposals, [a for a, _ in pairs], [b for _, b in pairs])
        summary["proposal_agreement"] = agreed.report()
        return summary

    def _rows_against(self, each: SetUp, reference: SetUp) -> dict[str, Any]:
        """Prefill rows of two set-ups, request by request."""
        ours = judge.load_rows(self.dump_folder(str(each.prefill)), "prefill")
        theirs = judge.load_rows(self.dump_folder(str(reference.prefill)), "prefill")
        rooms = zip(self.answers[each.name].rooms, self.answers[reference.name].rooms, strict=False)
        return judge.compare_many((ours[a], theirs[b]) for a, b in rooms if a in ours and b in theirs)

    def _rows_against_plugin(self, each: SetUp) -> dict[str, Any]:
        """Rows that decode got from stock's CP prefill, against those from this package's, request by request."""
        like = next((other for other in self.chosen if other.is_cp and other.answers == each.answers), None)
        if like is None or like.name not in self.answers:
            return {}
        arrived = judge.load_rows(self.dump_folder(each.answers), "decode")
        rooms = zip(self.answers[each.name].rooms, self.answers[like.name].rooms, strict=False)
        pairs = [(arrived[a], arrived[b]) for a, b in rooms if a in arrived and b in arrived]
        return {"rows_vs_plugin": judge.compare_many(pairs)}

    def _complaints(self, each: SetUp) -> list[str]:
        """What is wrong with a set-up by itself."""
        answers, summary = self.answers[each.name], self.report["set_ups"][each.name]
        found = []
        for number, (prompt, reply) in enumerate(zip(self.prompts.measured, answers.measured, strict=False), 1):
            expected = self.expected(prompt, self.args.new_tokens)
            if reply.tokens is None:
                found.append(f"{each.name}: prompt {number} of {len(prompt)} tokens: {reply.error[:400]}")
            elif expected is not None and reply.tokens != expected:
                found.append(f"{each.name}: prompt {number} of {len(prompt)} tokens: not the oracle's continuation")
        for index, reply in zip(self.prompts.together, answers.together, strict=False):
            prompt = self.prompts.measured[index]
            if reply.tokens is not None and self.expected(prompt, self.args.new_tokens) not in (None, reply.tokens):
                found.append(f"{each.name}: at once, prompt of {len(prompt)} tokens: not the oracle's continuation")
        others = [reply.error[:300] for reply in (*answers.short, *answers.together) if reply.tokens is None]
        found += [f"{each.name}: {error}" for error in others[:3]]
        if summary["answered"] != summary["asked"] and not found:
            found.append(f"{each.name}: {summary['answered']} of {summary['asked']} requests were answered")
        if summary["worst_gap"] is not None and summary["worst_gap"] > GAP_LIMIT:
            found.append(f"{each.name}: teacher-forced gap {summary['worst_gap']}, allowed is {GAP_LIMIT}")
        stock = summary.get("rows_vs_plugin")
        if stock is not None and (not stock["rows"] or stock["rows_missing"] or stock["rows_over_tolerance"]):
            found.append(f"{each.name}: stock's draft rows are not those of this package: {stock}")
        rows = summary.get("rows_prefill_vs_decode")
        if rows is not None:
            if rows["requests"] != len(answers.rooms):
                found.append(f"{each.name}: rows of {rows['requests']} of {len(answers.rooms)} requests were dumped")
            if rows["rows_byte_equal"] != rows["rows"] or rows["rows_missing"]:
                found.append(f"{each.name}: decode holds other draft rows than prefill sent: {rows}")
        return found

    def _report_controls(self, base: SetUp | None, reference: SetUp | None, proposals: judge.Proposals) -> None:
        if base is None:
            return
        right = self.answers[base.name]
        accept_right = judge.mean(right.accept_lengths()[index] for index in self.prompts.controls)
        compared = self.answers[(reference or base).name]
        rooms = [compared.rooms[index] for index in self.prompts.controls if index < len(compared.rooms)]
        for name, answers in self.answers.items():
            if not name.startswith("fault "):
                continue
            fault = name.partition(" ")[2]
            count = min(len(rooms), len(answers.rooms))
            agreed = judge.agreement(proposals, answers.rooms[:count], rooms[:count]).report()
            accept = judge.mean(answers.accept_lengths())
            self.report.setdefault("controls", {})[fault] = {
                "mean_accept_length": accept,
                "reference_accept_length": accept_right,
                "requests": len(answers.measured),
                "proposal_agreement": agreed,
            }
            complaint = judge.judge_control(fault, accept, accept_right, agreed["first_step"])
            if complaint:
                self.report["reasons"].append(complaint)

    def _report_counters(self, present: Sequence[SetUp]) -> None:
        for server in dict.fromkeys(each.prefill for each in present if each.is_cp):
            assert server is not None
            path = self.dump_folder(server) / "counters-0.json"
            if not path.is_file():
                self.report["reasons"].append(f"{server}: no counters were dumped")
                continue
            found = json.loads(path.read_text())
            counters = found["counters"]
            self.report.setdefault("counters", {})[server] = found
            if not counters["cp_forwards"] or counters["aux_collectives"] != counters["cp_forwards"]:
                self.report["reasons"].append(
                    f"{server}: {counters['aux_collectives']} aux collectives in {counters['cp_forwards']} CP forwards,"
                    " wanted is one each"
                )
            if counters["alignment_failures"] or counters["requests_refused"]:
                self.report["reasons"].append(f"{server}: the alignment proof failed without a fault: {counters}")

    def _proposals(self) -> judge.Proposals:
        found: dict[int, Any] = {}
        for folder in sorted((self.folder / "dump").glob("decode-*")):
            found |= judge.load_proposals(folder)
        return found


def _label(fault: str) -> str:
    return fault.replace("@", "-rank").replace("#", "-first")


def _flush(servers: Iterable[Server]) -> None:
    """Empty prefix caches, so that set-ups that share a server do not share its work."""
    for server in servers:
        server.post("/flush_cache?timeout=10", {}, 30.0)
