"""SGLang 0.5.23: the end of a prefill forward under CP, from stock's captured rows to written pool rows.

In this release the runner splits the batch before the model: rank r gets global rows r, r + C, ... and rows of zeros up
to a multiple of C ("physical" rows). The model captures into one tensor [physical, A * H] by itself, and the runner
gathers three tensors behind it: [T, H], [T, hc_mult * H] and [T, A * H]. Here what is needed of them goes through the
one gather of `forward.exchange` before the model returns, and the runner's gathers find nothing left to do. Stock
computes positions and locations before the forward, because the tables that they are read from may change afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core.inject import BatchProof
from ..core.pack import PackedRows, RowFormat
from ..core.rows import Placed
from ..faults import spoil_locations, spoil_streams
from .forward import Shard, exchange, open_shard, write_arrived
from .runtime import Runtime, runtime


def model_forward(
    original: Callable[..., Any], model: Any, input_ids: Any, positions: Any, forward_batch: Any, *args: Any, **kw: Any
) -> Any:
    """Run the target; what stands for its aux hidden states afterwards is what `inject_prefill` takes up."""
    output = original(model, input_ids, positions, forward_batch, *args, **kw)
    state = runtime()
    proof, layer_ids = state.proof, model.dspark_layers_to_capture
    if layer_ids is None or proof is None:
        return output
    (hidden, before_head), aux = output
    if forward_batch.attn_cp_metadata is None:
        proof.note_local(aux)
        return (hidden, before_head), aux
    del output, before_head  # [physical, hc_mult * H]: nobody reads it where layers are captured
    return _shard_output(state, proof, len(layer_ids), hidden, aux, positions, forward_batch)


def _shard_output(
    state: Runtime,
    proof: BatchProof,
    layers: int,
    hidden: torch.Tensor,
    aux: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: Any,
) -> Any:
    """What the model returns on a CP rank: rows for the LM head, and the ticket in place of the aux hidden states."""
    physical = forward_batch.attn_cp_metadata.per_rank_actual_token
    part = open_shard(
        state,
        proof,
        forward_batch,
        cp_size=len(physical),
        hidden=hidden.shape[1],
        every_row=_every_row(forward_batch),
    )
    aux = spoil_streams(part.fault, part.cp_rank, aux)
    captured = _captured(part, aux, layers)
    missing = physical[part.cp_rank] - aux.shape[0]
    head_rows = None if part.heads is None else part.heads.plan.pick_local(hidden)
    of_requests, ticket = exchange(part, [captured], missing, positions, forward_batch.out_cache_loc, head_rows)
    if of_requests is None:
        state.passes = (ticket,)
        return (hidden, None), ticket  # the runner gathers these rows, as stock does
    state.passes = (of_requests, ticket)
    return (of_requests, None), ticket


def _every_row(forward_batch: Any) -> bool:
    """Whether the logits processor wants more than the last row of each request."""
    scores = forward_batch.multi_item_delimiter_indices, forward_batch.token_indices_to_pool
    return bool(forward_batch.return_logprob) or any(wanted is not None for wanted in scores)


def _captured(part: Shard, aux: torch.Tensor, layers: int) -> PackedRows:
    """This rank's rows to send, of aux [delivered, A * H]; a short capture is reported, here it only must fit."""
    if aux.shape[0] < part.rows:
        aux = torch.nn.functional.pad(aux, (0, 0, 0, part.rows - aux.shape[0]))
    rows = aux[: part.rows] if part.select is None else aux.index_select(0, part.select)
    if part.projected:
        return PackedRows.around(rows)
    row_format = RowFormat(layers, rows.shape[1] // layers, rows.dtype, part.state.addressed)
    packed = PackedRows(row_format, rows.shape[0], part.device, part.tail)
    packed.payload().copy_(rows)
    return packed


def gather_after_forward(original: Callable[..., Any], x: Any, forward_batch: Any, stream: Any = None) -> Any:
    """What `model_forward` has exchanged already is whole on every rank; everything else is gathered by stock."""
    state = runtime()
    first = x[0] if isinstance(x, tuple) else x
    if any(first is whole for whole in state.passes):
        state.passes = tuple(whole for whole in state.passes if whole is not first)
        return x
    return original(x, forward_batch, stream)


def inject_prefill(
    original: Callable[..., None],
    injector: Any,
    placement: Any,
    *,
    target_hidden: Any,
    token_indices: Any,
    target_hidden_is_projected: bool,
) -> None:
    """Prove the rows against the places that stock computed before the forward; write only rows that passed."""
    state = runtime()
    proof = state.proof
    rest: dict[str, Any] = {"token_indices": token_indices, "target_hidden_is_projected": target_hidden_is_projected}
    if proof is None:
        return original(injector, placement, target_hidden=target_hidden, **rest)
    draft, pool = injector.draft_model, injector.draft_model_runner.token_to_kv_pool
    if token_indices is not None:  # fewer rows than tokens: the proof refuses them by their number
        placement, rest["token_indices"] = placement.select(token_indices), None
    slots = placement.swa_loc
    if proof.used_cp:
        slots = spoil_locations(state.fault, state.cp_rank, slots)

    def write_local(placed: Placed) -> None:
        proved = placement._replace(cache_loc=placed.locations, positions=placed.positions, swa_loc=placed.slots)
        original(injector, proved, target_hidden=target_hidden, **rest)

    def write_kv(kv: Sequence[torch.Tensor], placed: Placed) -> None:
        with torch.inference_mode():
            draft.store_commit_kv(kvs=list(kv), swa_loc=placed.slots, positions=placed.positions, pool=pool)

    write_arrived(
        state,
        proof,
        draft,
        ticket=target_hidden,
        positions=placement.positions,
        cache_loc=placement.cache_loc,
        to_swa=lambda _: slots,
        write_local=write_local,
        write_kv=write_kv,
    )
