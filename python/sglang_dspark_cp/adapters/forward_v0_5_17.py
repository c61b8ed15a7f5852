"""SGLang 0.5.17: one prefill forward under CP, from captured layers to written pool rows.

In this release the model itself splits the batch: the runner pads ids, positions and cache locations to Tp = C * P
before the forward, and the forward ends with a gather of all ranks' streams [P, hc_mult, H] before the head. Here the
head runs on the shard, for the last token of each request only, and these rows travel behind the draft's rows in the
one gather of the forward (`forward`). Shapes: see `core`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core.capture import AuxCapture
from ..core.inject import BatchProof
from ..core.project import capture_blocks
from ..core.rows import Placed
from ..faults import spoil_streams
from .forward import exchange, open_shard, write_arrived
from .runtime import Runtime, runtime


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
    every_row = forward_batch.return_logprob or forward_batch.multi_item_delimiter_indices is not None
    part = open_shard(state, proof, forward_batch, cp_size=model.cp_size, hidden=model.hidden_size, every_row=every_row)

    def streams(layer: Any, output: Any) -> torch.Tensor:
        hidden, residual, post, comb = output
        finished = layer.hc_post(hidden, residual, post, comb) if model.use_fused_mhc_post_pre else hidden
        return spoil_streams(part.fault, part.cp_rank, finished)

    capture = AuxCapture(
        model.layers,
        layer_ids,
        streams,
        expected_rows=part.rows,
        addressed=state.addressed and not part.projected,
        select=part.select,
        tail=0 if part.projected else part.tail,
        blocks=capture_blocks(part.plan.rows) if part.projected else None,
    )
    state.heads = heads = part.heads
    last = model.layers[model.end_layer - 1].register_forward_hook(heads.finished) if heads is not None else None
    try:
        with capture:
            last_hidden, before_head = run()
    finally:
        if last is not None:
            last.remove()
    captured = capture.take()
    if not captured:
        raise RuntimeError(f"none of the captured layers {layer_ids} ran in this forward of {proof.tokens} tokens")
    rows = None if heads is None else last_hidden
    of_requests, ticket = exchange(
        part, captured, capture.missing_rows(), capture.positions, forward_batch.out_cache_loc, rows
    )
    return (last_hidden if of_requests is None else of_requests, before_head), ticket


def gather_before_head(
    original: Callable[..., Any], input_tensor: Any, cp_size: int, forward_batch: Any, stream: Any
) -> Any:
    """In place of the gather that ends the forward: the shard's own rows for the LM head. Other gathers pass."""
    heads = runtime().heads
    if heads is None or not heads.layers_done:
        return original(input_tensor, cp_size, forward_batch, stream)
    heads.layers_done = False
    # A copy: a view would keep the streams of all rows until the logits are made.
    return input_tensor.index_select(0, heads.local)


def inject_target_hidden(
    original: Callable[..., None], injector: Any, *, target_hidden: Any, cache_loc: Any, positions: Any, **rest: Any
) -> None:
    """Prove the rows against the locations they are to be written to; write only rows that passed."""
    state = runtime()
    proof = state.proof
    if proof is None or target_hidden is None:
        return original(injector, target_hidden=target_hidden, cache_loc=cache_loc, positions=positions, **rest)
    draft, pool = injector.draft_model, injector.draft_model_runner.token_to_kv_pool
    write_arrived(
        state,
        proof,
        draft,
        ticket=target_hidden,
        positions=positions,
        cache_loc=cache_loc,
        to_swa=pool.translate_loc_from_full_to_swa,
        write_local=lambda placed: original(
            injector, target_hidden=target_hidden, cache_loc=placed.locations, positions=placed.positions, **rest
        ),
        write_kv=functools.partial(write_kv, draft, pool),
    )


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
