"""What the prefill scheduler does about a proof: the handlers that the releases share, and how they read the engine.

A handler here has the shape that SGLang's hook registry wants, with the release's `Engine` in front:
`functools.partial(handler, ENGINE)` is what a hook table holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..core.inject import BatchProof
from .metrics import LOG_EVERY, Metrics, log_line
from .runtime import runtime

logger = logging.getLogger(__name__)

NO_PAGE = -1


@dataclass(frozen=True)
class Engine:
    """How one release's scheduler and requests are read and written.

    Attributes:
        end_of: position after the last token that a request's newest chunk computes.
        pool_row: a request's row in the request pool, None once it gave its memory back.
        skip_cache: keep a refused request's rows out of the prefix cache.
        sends_from: first position of a request's final window that prefill sends. Arguments: scheduler, request, end.
        fail: end a request's transfer with a text, on this rank and for its decode ranks; idempotent.
        refused_decodes: sessions that the Mooncake manager refuses now.
        has_prefixes: whether a cache hands out prefixes.
        retire: what is left to do about a request that is never sent.
        dump_rows: of the release's debug module; used only with SGLANG_DSPARK_CP_DUMP_DIR.
    """

    end_of: Callable[[Any], int]
    pool_row: Callable[[Any], int | None]
    skip_cache: Callable[[Any], None]
    sends_from: Callable[[Any, Any, int], int]
    fail: Callable[[Any, str], None]
    refused_decodes: Callable[[Any], int]
    has_prefixes: Callable[[Any], bool]
    retire: Callable[[Any, Any], None]
    dump_rows: Callable[[Any, Any], None]


def open_proof(engine: Engine, worker: Any, batch: Any) -> BatchProof:
    """The proof of a batch whose forward comes next; it is the ledger's current one afterwards."""
    state = runtime()
    state.cp_rank, state.draft = cp_rank(), worker._kv_injector.draft_model
    ledger = state.require_ledger(state.cp_rank)
    proof = BatchProof(
        [req.rid for req in batch.reqs],
        batch.prefix_lens,
        batch.extend_lens,
        check_shape=state.check_shape,
        check_rows=state.addressed,
    )
    ledger.begin(proof)
    if ledger.tainted_pages:  # only after a refusal; costs a host sync then
        pool = worker.model_runner.req_to_token_pool
        for req, (start, _) in zip(batch.reqs, proof.spans, strict=True):
            ledger.refuse_tainted(req.rid, _pages(engine, pool, worker.page_size, req, 0, start))
    return proof


def process_batch_result(
    engine: Engine, original: Callable[..., None], scheduler: Any, batch: Any, result: Any
) -> None:
    """Settle the batch's proof on all ranks before anything of it is cached or sent."""
    proof = result.__dict__.pop("dspark_cp_proof", None)
    if proof is not None:
        if result.copy_done is not None:
            result.copy_done.synchronize()  # stock's own first step; the verdict's words are older than this event
        group = scheduler.attn_cp_cpu_group
        error = runtime().require_ledger(cp_rank()).settle(proof, lambda words: _gather_words(words, group))
        if error is not None:
            logger.error("AlignmentError on attn_cp_rank %d: %s", cp_rank(), error)
            for req, (start, end) in zip(batch.reqs, proof.spans, strict=True):
                refuse(engine, scheduler, req, start, end, f"AlignmentError: {error}")
        _report(engine, scheduler, proof)
    return original(scheduler, batch, result)


def _report(engine: Engine, scheduler: Any, proof: BatchProof) -> None:
    """Metrics, where SGLang serves any, and a line in the log now and then. Once per batch."""
    state = runtime()
    counters = state.require_ledger(cp_rank()).counters
    refused = engine.refused_decodes(scheduler.disagg_prefill_bootstrap_queue.kv_manager)
    if counters.forwards % LOG_EVERY == 0:
        logger.info("sglang-dspark-cp: %s", log_line(counters, refused))
    if not scheduler.metrics_reporter.enable_metrics:
        return
    if state.metrics is None:
        if not scheduler.metrics_collector_context.current_scheduler_metrics_enabled:
            return
        labels = scheduler.metrics_collector.labels
        state.metrics = Metrics(labels, gather=state.mode.value, align=state.config.align.value)
    state.metrics.update(counters, [] if proof.gather_span is None else [proof.gather_span.seconds()], refused)


def send_kv_chunk(
    engine: Engine,
    original: Callable[..., None],
    scheduler: Any,
    req: Any,
    last_chunk: bool = False,
    end_idx: int | None = None,
) -> None:
    """Send nothing of a failed request, and a last chunk only when its final window was injected."""
    ledger = runtime().require_ledger(cp_rank())
    failed = ledger.failure(req.rid)
    if failed is None and last_chunk:
        length = min(engine.end_of(req), len(req.origin_input_ids))
        failed = ledger.require_complete(req.rid, length, scheduler.sliding_window_size)
    if failed is not None:
        refuse(engine, scheduler, req, 0, engine.end_of(req), failed)
        engine.retire(scheduler, req)
        return None
    if last_chunk and runtime().config.dump_dir is not None:
        engine.dump_rows(scheduler, req)
    if last_chunk:
        ledger.counters.rows_sent += length - engine.sends_from(scheduler, req, length)
    return original(scheduler, req, last_chunk=last_chunk, end_idx=end_idx)


def process_inflight_queue(
    engine: Engine, original: Callable[..., list[Any]], scheduler: Any, *args: Any, **kwargs: Any
) -> list[Any]:
    """Forget finished requests; once the last refused one is gone, empty the prefix cache of what it left there."""
    done = original(scheduler, *args, **kwargs)
    ledger = runtime().require_ledger(cp_rank())
    if done and runtime().config.dump_dir is not None:
        from .debug import dump_counters

        dump_counters(ledger)
    finished = [req.rid for req in done]
    if refused := ledger.failed_requests():
        # A refused request may end elsewhere, such as by its client's abort while it is still being chunked.
        held = {req.rid for req in _requests(scheduler)}
        finished += [request_id for request_id in refused if request_id not in held]
    if ledger.forget(finished):
        drop_cached_prefixes(engine, scheduler.tree_cache)
        ledger.tainted_pages.clear()
        logger.warning("sglang-dspark-cp: the prefix cache was emptied after refused requests")
    return done


def _requests(scheduler: Any) -> list[Any]:
    """Every request that the prefill scheduler holds, beside those of a batch in flight."""
    queues = (
        scheduler.disagg_prefill_bootstrap_queue.queue,
        scheduler.waiting_queue,
        scheduler.disagg_prefill_inflight_queue,
    )
    chunked = [] if scheduler.chunked_req is None else [scheduler.chunked_req]
    return [*(req for queue in queues for req in queue), *chunked]


def refuse(engine: Engine, scheduler: Any, req: Any, start: int, end: int, text: str) -> None:
    """Fail a request, and keep its rows at positions [start, end) from being used again."""
    ledger = runtime().require_ledger(cp_rank())
    pool, page_size = scheduler.req_to_token_pool, scheduler.token_to_kv_pool_allocator.page_size
    ledger.tainted_pages |= _pages(engine, pool, page_size, req, start, end)
    engine.skip_cache(req)
    engine.fail(req, text)


def _pages(engine: Engine, req_to_token_pool: Any, page_size: int, req: Any, start: int, end: int) -> set[int]:
    """KV pages of a request's positions [start, end); a host sync, used after a refusal only.

    A request that was aborted meanwhile has given its pages back; the prefix cache is emptied all the same.
    """
    row = engine.pool_row(req)
    if row is None:
        return {NO_PAGE}
    loc = req_to_token_pool.req_to_token[row, start:end]
    return set((loc // page_size).unique().tolist())


def drop_cached_prefixes(engine: Engine, tree_cache: Any) -> None:
    """Empty the prefix cache of everything that no request holds."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    if not engine.has_prefixes(tree_cache):
        return
    everything = tree_cache.full_evictable_size() + tree_cache.swa_evictable_size()
    tree_cache.evict(EvictParams(num_tokens=everything, swa_num_tokens=everything))


def _gather_words(words: torch.Tensor, group: dist.ProcessGroup) -> list[list[int]]:
    gathered = [torch.empty_like(words) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, words, group=group)
    return [row.tolist() for row in gathered]


def cp_rank() -> int:
    """This process's attention-CP rank."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().attn_cp_rank)
