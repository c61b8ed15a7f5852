"""SGLang 0.5.17: one prefill forward under CP, from captured layers to written pool rows.

In this release the model itself splits the batch: the runner pads ids, positions and cache locations to Tp = C * P
before the forward, and the forward ends with a gather of all ranks' streams [P, hc_mult, H] before the head. Here the
head runs on the shard, for the last token of each request only, and these rows travel behind the draft's rows in the
one gather of the forward. Shapes: see `core`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..config import GatherMode
from ..core.capture import AuxCapture
from ..core.gather import ArrivedRows, gather_rows
from ..core.inject import BatchProof, GatherSpan, to_device
from ..core.layout import SendPlan, last_rows, rows_per_rank, send_all, send_some, shard
from ..core.pack import PackedRows
from ..core.project import pack_context, pack_kv
from ..core.rows import Placed
from ..core.window import kept_rows
from ..faults import spoil_locations, spoil_order, spoil_packed, spoil_positions, spoil_streams
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

    def of_requests(self, tail: torch.Tensor, hidden: int, requests: int) -> torch.Tensor:
        """Gathered rows [C, >= K * H] -> [requests, H], in the order of the requests."""
        rows = tail[:, : self.plan.rows * hidden].reshape(-1, hidden)
        order = self.plan.order
        source = torch.empty(requests, dtype=torch.int64)
        real = order >= 0
        source[order[real].argsort().argsort()] = real.nonzero().flatten()
        return rows[to_device(source, rows.device)]


def model_forward(
    original: Callable[..., Any], model: Any, input_ids: Any, positions: Any, forward_batch: Any, *args: Any, **kw: Any
) -> Any:
    """Run the target; what stands for its aux hidden states afterwards is what `inject_target_hidden` takes up."""
    from sglang.srt.layers.attention.dsa.utils import dsa_use_prefill_cp

    layer_ids = model.dspark_layers_to_capture
    state = runtime()
    proof = state.proof
    if layer_ids is None or proof is None:
        return original(model, input_ids, positions, forward_batch, *args, **kw)
    if not dsa_use_prefill_cp(forward_batch):
        output, aux = original(model, input_ids, positions, forward_batch, *args, **kw)
        hidden = torch.cat([rows[: proof.tokens] for rows in aux], dim=-1)
        proof.note_local(hidden)
        return output, hidden
    # With layers to capture stock refuses CP; the capture of `_forward_on_shard` takes their place meanwhile.
    model.dspark_layers_to_capture = None
    try:
        run = functools.partial(original, model, input_ids, positions, forward_batch, *args, **kw)
        return _forward_on_shard(run, state, model, proof, layer_ids, forward_batch)
    finally:
        model.dspark_layers_to_capture = layer_ids
        state.heads = None


def _forward_on_shard(
    run: Callable[[], Any], state: Runtime, model: Any, proof: BatchProof, layer_ids: list[int], forward_batch: Any
) -> Any:
    from sglang.srt.layers.dp_attention import attn_cp_all_gather_into_tensor

    ledger = state.require_ledger(state.cp_rank)
    ledger.counters.cp_forwards += 1
    fault, cp_rank, cp_size, mode = state.fault, state.cp_rank, model.cp_size, state.mode
    device = forward_batch.out_cache_loc.device
    plan = _plan(state, proof, cp_size)
    select = None if plan.local is None else to_device(plan.local, device)
    heads = _heads(proof, forward_batch, cp_size, cp_rank, device)
    tail = 0 if heads is None else heads.plan.rows * model.hidden_size

    def streams(layer: Any, output: Any) -> torch.Tensor:
        hidden, residual, post, comb = output
        finished = layer.hc_post(hidden, residual, post, comb) if model.use_fused_mhc_post_pre else hidden
        return spoil_streams(fault, cp_rank, finished)

    projected = mode is not GatherMode.PACKED
    expected = rows_per_rank(proof.tokens, cp_size)
    capture = AuxCapture(
        model.layers,
        layer_ids,
        streams,
        expected_rows=expected,
        addressed=state.addressed and not projected,
        select=select,
        tail=0 if projected else tail,
    )
    state.heads = heads
    last = model.layers[model.end_layer - 1].register_forward_hook(heads.finished) if heads is not None else None
    try:
        with capture:
            last_hidden, before_head = run()
    finally:
        if last is not None:
            last.remove()
    if capture.packed is None:
        raise RuntimeError(f"none of the captured layers {layer_ids} ran in this forward of {proof.tokens} tokens")
    missing = capture.missing_rows()
    packed = _wire_rows(state, capture.packed, tail)
    if state.addressed:
        _write_address(packed, capture.positions, shard(forward_batch.out_cache_loc, cp_size, cp_rank), select, missing)
    if heads is not None:
        packed.write_tail(last_hidden)
    spoil_packed(fault, cp_rank, packed)
    gather = attn_cp_all_gather_into_tensor
    if state.metrics is not None:
        proof.gather_span = GatherSpan(device)
        gather = functools.partial(_timed, proof.gather_span, gather)
    arrived = gather_rows(packed, plan, gather)
    extend_lens = [end - start for start, end in proof.spans]
    arrived = dataclasses.replace(arrived, order=spoil_order(fault, cp_rank, extend_lens, arrived.order))
    ticket = arrived.hidden.new_empty(proof.tokens, 1)
    proof.note_arrived(arrived, missing, ticket, plan.sent)
    _count(state, arrived, plan, expected, 0 if heads is None else heads.plan.rows)
    if heads is not None:
        assert arrived.tail is not None
        last_hidden = heads.of_requests(arrived.tail, model.hidden_size, len(proof.spans))
        state.last_hidden = last_hidden
    return (last_hidden, before_head), ticket


def _timed(span: GatherSpan, gather: Callable[[Any, Any], None], output: torch.Tensor, rows: torch.Tensor) -> None:
    span.mark()
    gather(output, rows)
    span.mark()


def _plan(state: Runtime, proof: BatchProof, cp_size: int) -> SendPlan:
    if state.mode is not GatherMode.WINDOW:
        return send_all(proof.tokens, cp_size)
    kept = kept_rows(proof.spans, state.window, state.page)
    return send_some(kept, proof.tokens, cp_size, state.cp_rank)


def _heads(proof: BatchProof, forward_batch: Any, cp_size: int, cp_rank: int, device: torch.device) -> Heads | None:
    """The rows for the LM head, or None where the logits processor wants more than the last one of each request."""
    if forward_batch.return_logprob or forward_batch.multi_item_delimiter_indices is not None:
        return None
    plan = send_some(last_rows([end - start for start, end in proof.spans]), proof.tokens, cp_size, cp_rank)
    assert plan.local is not None
    return Heads(plan, to_device(plan.local, device))


def _wire_rows(state: Runtime, captured: PackedRows, tail: int) -> PackedRows:
    if state.mode is GatherMode.PACKED:
        return captured
    pack = pack_context if state.mode is GatherMode.CONTEXT else pack_kv
    return pack(DraftProjection(state.draft), captured, addressed=state.addressed, tail=tail)


def _write_address(
    packed: PackedRows,
    positions: torch.Tensor | None,
    local_loc: torch.Tensor,
    select: torch.Tensor | None,
    missing: int,
) -> None:
    """positions [P], local_loc [P]: of all local rows; only those that are sent get their address."""
    if (
        missing
        or positions is None
        or positions.shape != local_loc.shape
        or (select is None and positions.shape[0] != packed.rows)
    ):
        packed.forget_address()
    else:
        packed.write_address(positions, local_loc, select)


def _count(state: Runtime, arrived: ArrivedRows, plan: SendPlan, on_shard: int, heads: int) -> None:
    counters = state.require_ledger(state.cp_rank).counters
    counters.rows_on_shard += on_shard
    counters.heads_sent += heads
    counters.aux_collectives += 1
    counters.gather_bytes += arrived.wire_bytes
    counters.rows_captured += plan.rows
    counters.rows_gathered += plan.sent


def gather_before_head(
    original: Callable[..., Any], input_tensor: Any, cp_size: int, forward_batch: Any, stream: Any
) -> Any:
    """In place of the gather that ends the forward: the shard's own rows for the LM head. Other gathers pass."""
    heads = runtime().heads
    if heads is None or not heads.layers_done:
        return original(input_tensor, cp_size, forward_batch, stream)
    heads.layers_done = False
    return input_tensor.index_select(0, heads.local)


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


def inject_target_hidden(
    original: Callable[..., None], injector: Any, *, target_hidden: Any, cache_loc: Any, positions: Any, **rest: Any
) -> None:
    """Prove the rows against the locations they are to be written to; write only rows that passed."""
    state = runtime()
    proof = state.proof
    if proof is None or target_hidden is None:
        return original(injector, target_hidden=target_hidden, cache_loc=cache_loc, positions=positions, **rest)
    draft, pool = injector.draft_model, injector.draft_model_runner.token_to_kv_pool
    if proof.used_cp:
        cache_loc = spoil_locations(state.fault, state.cp_rank, cache_loc)
        positions = spoil_positions(state.fault, state.cp_rank, positions)
    device = target_hidden.device
    positions = positions.to(device, non_blocking=True)
    rows = proof.payload
    placed = proof.admit(
        target_hidden,
        positions,
        cache_loc.to(device, non_blocking=True),
        expected_width=_expected_width(state.mode if proof.used_cp else GatherMode.PACKED, draft),
        to_swa=pool.translate_loc_from_full_to_swa,
    )
    if placed is None:
        return
    if not proof.used_cp:
        original(injector, target_hidden=target_hidden, cache_loc=placed.locations, positions=positions, **rest)
    elif rows is not None:
        write_kv(draft, pool, _kv_rows(state.mode, draft, rows), placed)


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


def write_kv(draft: Any, pool: Any, kv: Sequence[torch.Tensor], placed: Placed) -> None:
    """Norm, rotate, quantise and scatter rows into the draft's pool.

    Args:
        kv: S x [N, D], rows may have any stride.
        placed: where they go; a row with slot -1 is not written.
    """
    with torch.inference_mode():
        for stage, rows in zip(draft.stages, kv, strict=True):
            attention = stage.self_attn
            pool.set_swa_key_buffer_radix_fused_norm_rope(
                layer_id=attention.layer_id,
                swa_loc=placed.slots,
                kv=rows,
                kv_weight=attention.kv_norm.weight.data,
                eps=attention.eps,
                freqs_cis=attention.freqs_cis,
                positions=placed.positions,
            )
