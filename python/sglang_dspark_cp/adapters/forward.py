"""One prefill forward under CP, from captured rows to written pool rows: what the releases share.

    open_shard   from the batch's lengths alone: which rows this rank sends, which rows meet the LM head
    exchange     captured rows -> projection on the shard, address, tail, the one all-gather, the ticket
    pruned_states, write_arrived   what stands in the logits processor and in the injector afterwards

Each release's own module says where captured rows come from. Shapes: see `core`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..config import Fault, GatherMode
from ..core.gather import ArrivedRows, gather_rows
from ..core.inject import BatchProof, GatherSpan
from ..core.layout import SendPlan, rows_per_rank, send_all, send_last, shard
from ..core.pack import Address, PackedRows
from ..core.project import pack_context, pack_kv
from ..core.rows import Placed
from ..core.window import send_kept
from ..faults import spoil_locations, spoil_order, spoil_packed, spoil_positions
from .runtime import Runtime, runtime


class DraftProjection:
    """The draft's projections, as `core.project.Projection`."""

    def __init__(self, draft: Any) -> None:
        self._draft = draft

    def context(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, A * H] -> [N, H]."""
        projected: torch.Tensor = self._draft.project_target_hidden(hidden.contiguous())
        return projected

    def kv(self, context: torch.Tensor) -> Sequence[torch.Tensor]:
        """[N, H] -> S x [N, D]."""
        from sglang.kernels.ops.speculative.dspark.dspark_draft_model import CommitKvProj

        linears = [stage.self_attn.wkv for stage in self._draft.stages]
        found: Sequence[torch.Tensor] = CommitKvProj.execute(main_x=context.contiguous(), wkv_linears=linears)
        return found


@dataclasses.dataclass
class Heads:
    """The rows of one forward that meet the LM head.

    Attributes:
        plan: which local rows this rank contributes, and where each request's row is after the gather.
        local: [K] int64 on the device, local rows of this rank; padding repeats one.
        layers_done: the last layer has run, so the next gather of the model is the one before the head.
    """

    plan: SendPlan
    local: torch.Tensor
    layers_done: bool = False

    def finished(self, *_: Any) -> None:
        """Forward hook of the last layer."""
        self.layers_done = True

    def of_requests(self, tail: torch.Tensor, hidden: int) -> torch.Tensor:
        """Gathered rows [C, >= K * H] -> [requests, H], in the order of the requests."""
        rows = tail[:, : self.plan.rows * hidden].unflatten(1, (self.plan.rows, hidden))
        return self.plan.pick_arrived(rows)


@dataclasses.dataclass(frozen=True)
class Shard:
    """This rank's part of one CP forward, known before it runs.

    Attributes:
        rows: P, rows that every rank has; a rank that owns fewer has a row of padding.
        plan: which rows every rank sends.
        select: [rows sent] int64 on the device, the local rows that this rank sends; None: all P.
        heads: rows for the LM head; None where the logits processor wants more than the last one of each request.
        hidden: H.
        tail: elements behind the rows that the heads take.
    """

    state: Runtime
    proof: BatchProof
    cp_size: int
    cp_rank: int
    device: torch.device
    rows: int
    plan: SendPlan
    select: torch.Tensor | None
    heads: Heads | None
    hidden: int
    fault: Fault | None

    @property
    def tail(self) -> int:
        """Elements that the rows for the LM head take."""
        return 0 if self.heads is None else self.heads.plan.rows * self.hidden

    @property
    def projected(self) -> bool:
        """Whether rows are projected before the gather."""
        return self.state.mode is not GatherMode.PACKED


def open_shard(
    state: Runtime, proof: BatchProof, forward_batch: Any, *, cp_size: int, hidden: int, every_row: bool
) -> Shard:
    """Plan a CP forward.

    Args:
        hidden: H.
        every_row: the logits processor wants more than the last row of each request.
    """
    state.require_ledger(state.cp_rank).counters.cp_forwards += 1
    device = forward_batch.out_cache_loc.device
    plan = _plan(state, proof, cp_size)
    return Shard(
        state,
        proof,
        cp_size,
        state.cp_rank,
        device,
        rows_per_rank(proof.tokens, cp_size),
        plan,
        plan.local_on(device),
        None if every_row else _heads(proof, cp_size, state.cp_rank, device),
        hidden,
        state.fault,
    )


def _plan(state: Runtime, proof: BatchProof, cp_size: int) -> SendPlan:
    if state.mode is not GatherMode.WINDOW:
        return send_all(proof.tokens, cp_size)
    return send_kept(proof.spans, state.window, state.page, cp_size, state.cp_rank)


def _heads(proof: BatchProof, cp_size: int, cp_rank: int, device: torch.device) -> Heads:
    plan = send_last(tuple(end - start for start, end in proof.spans), cp_size, cp_rank)
    local = plan.local_on(device)
    assert local is not None
    return Heads(plan, local)


def exchange(
    part: Shard,
    captured: list[PackedRows],
    missing: int,
    positions: torch.Tensor | None,
    out_cache_loc: torch.Tensor,
    head_rows: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The one collective of the forward. Every rank must come here, also one whose capture went wrong.

    Args:
        captured: this rank's rows to send, in one or more buffers, taken out of the list as they are projected;
            with a mode that does not project, the wire's own buffer.
        missing: rows that capture failed to deliver on this rank (negative: surplus).
        positions: [>= P] that the layers were run with.
        out_cache_loc: [T] or padded to C * P, cache locations of the whole batch.
        head_rows: [K, H], this rank's rows for the LM head; None without heads.

    Returns:
        [requests, H] for the LM head (None without heads), and the ticket [T, 1] that goes through the engine in
        place of the aux hidden states.
    """
    from sglang.srt.layers.dp_attention import attn_cp_all_gather_into_tensor

    state, proof, heads = part.state, part.proof, part.heads
    address = _address(part, positions, shard(out_cache_loc, part.cp_size, part.cp_rank), missing)
    packed = _wire_rows(part, captured, address)
    if heads is not None:
        assert head_rows is not None
        packed.write_tail(head_rows)
    spoil_packed(part.fault, part.cp_rank, packed)
    gather = attn_cp_all_gather_into_tensor
    if state.metrics is not None:
        proof.gather_span = GatherSpan(part.device)
        gather = functools.partial(_timed, proof.gather_span, gather)
    arrived = gather_rows(packed, part.plan, gather)
    extend_lens = [end - start for start, end in proof.spans]
    arrived = dataclasses.replace(arrived, order=spoil_order(part.fault, part.cp_rank, extend_lens, arrived.order))
    ticket = arrived.hidden.new_empty(proof.tokens, 1)
    proof.note_arrived(arrived, missing, ticket, part.plan.sent)
    _count(part, arrived)
    if heads is None:
        return None, ticket
    assert arrived.tail is not None
    state.last_hidden = heads.of_requests(arrived.tail, part.hidden)
    return state.last_hidden, ticket


def _timed(span: GatherSpan, gather: Callable[[Any, Any], None], output: torch.Tensor, rows: torch.Tensor) -> None:
    span.mark()
    gather(output, rows)
    span.mark()


def _wire_rows(part: Shard, captured: list[PackedRows], address: Address | None) -> PackedRows:
    state = part.state
    if part.projected:
        pack = pack_context if state.mode is GatherMode.CONTEXT else pack_kv
        projection = DraftProjection(state.draft)
        packed = pack(projection, captured, addressed=state.addressed, tail=part.tail, address=address)
    else:
        (packed,) = captured
        if address is not None:
            packed.write_address(address.positions, address.cache_loc, address.select)
    if state.addressed and address is None:
        packed.forget_address()
    return packed


def _address(part: Shard, positions: torch.Tensor | None, local_loc: torch.Tensor, missing: int) -> Address | None:
    """positions [>= P], local_loc [P], or one less on a rank with a row of padding, which gets an address of zeros.

    Returns:
        None if rows carry no address, or theirs is not known.
    """
    if not part.state.addressed or missing or positions is None or positions.shape[0] < part.rows:
        return None
    padding = part.rows - local_loc.shape[0]
    if padding:
        local_loc = torch.nn.functional.pad(local_loc, (0, padding))
    return Address(positions[: part.rows], local_loc, part.select)


def _count(part: Shard, arrived: ArrivedRows) -> None:
    counters = part.state.require_ledger(part.cp_rank).counters
    counters.rows_on_shard += part.rows
    counters.heads_sent += 0 if part.heads is None else part.heads.plan.rows
    counters.aux_collectives += 1
    counters.gather_bytes += arrived.wire_bytes
    counters.rows_captured += part.plan.rows
    counters.rows_gathered += part.plan.sent


def pruned_states(
    original: Callable[..., Any],
    processor: Any,
    hidden_states: Any,
    hidden_states_before_norm: Any,
    aux_hidden_states: Any,
    logits_metadata: Any,
) -> Any:
    """The rows that stock would pick from all rows are the only ones here: each request has one."""
    state = runtime()
    if state.last_hidden is not None and hidden_states is state.last_hidden:
        state.last_hidden = None
        lengths = logits_metadata.extend_seq_lens
        if lengths.shape[0] != hidden_states.shape[0]:
            raise RuntimeError(
                f"the logits processor wants rows of {lengths.shape[0]} requests, the batch has"
                f" {hidden_states.shape[0]}; this is a defect of sglang-dspark-cp, please report it"
            )
        logits_metadata = dataclasses.replace(logits_metadata, extend_seq_lens=torch.ones_like(lengths))
    return original(processor, hidden_states, hidden_states_before_norm, aux_hidden_states, logits_metadata)


def write_arrived(
    state: Runtime,
    proof: BatchProof,
    draft: Any,
    *,
    ticket: torch.Tensor,
    positions: torch.Tensor,
    cache_loc: torch.Tensor,
    to_swa: Callable[[torch.Tensor], torch.Tensor],
    write_local: Callable[[Placed], None],
    write_kv: Callable[[Sequence[torch.Tensor], Placed], None],
) -> None:
    """Prove the rows against the locations they are to be written to; write only rows that passed.

    Args:
        ticket: [T, ...], what the engine hands to injection.
        positions, cache_loc: [T], of the batch.
        to_swa: cache_loc -> window slots, [T].
        write_local: stock's injection of a batch that was not split, at the given places.
        write_kv: norm, rotate, quantise and scatter S x [N, D] (rows may have any stride) into the pool.
    """
    if proof.used_cp:
        cache_loc = spoil_locations(state.fault, state.cp_rank, cache_loc)
        positions = spoil_positions(state.fault, state.cp_rank, positions)
    device, rows = ticket.device, proof.payload
    placed = proof.admit(
        ticket,
        positions.to(device, non_blocking=True),
        cache_loc.to(device, non_blocking=True),
        expected_width=_expected_width(state.mode if proof.used_cp else GatherMode.PACKED, draft),
        to_swa=to_swa,
    )
    if placed is None:
        return
    if not proof.used_cp:
        write_local(placed)
    elif rows is not None:
        write_kv(_kv_rows(state.mode, draft, rows), placed)


def _expected_width(mode: GatherMode, draft: Any) -> int:
    hidden = int(draft.config.hidden_size)
    if mode is GatherMode.PACKED:
        return int(draft.num_target_features) * hidden
    return hidden if mode is GatherMode.CONTEXT else int(draft.num_stages) * int(draft.config.head_dim)


def _kv_rows(mode: GatherMode, draft: Any, rows: torch.Tensor) -> Sequence[torch.Tensor]:
    """Gathered rows [N, width] -> S x [N, D], by what is left of the projection."""
    projection = DraftProjection(draft)
    with torch.inference_mode():
        if mode is GatherMode.PACKED:
            return projection.kv(projection.context(rows))
        if mode is GatherMode.CONTEXT:
            return projection.kv(rows)
    width = int(draft.config.head_dim)
    return [rows[:, start : start + width] for start in range(0, rows.shape[1], width)]
