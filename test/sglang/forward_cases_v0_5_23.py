"""What `test_forward_v0_5_23` does inside gloo ranks: SGLang's own runner step around its own model forward."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from sglang_dspark_cp.config import Fault, FaultKind, GatherMode
from sglang_dspark_cp.core.align import HOST_WORDS
from sglang_dspark_cp.core.inject import BatchProof
from sglang_dspark_cp.smoke import geometry as g
from sglang_dspark_cp.smoke.processes import RankConfig
from sglang_dspark_cp.smoke.release import installed
from sglang_dspark_cp.smoke.weights import draft_checkpoint

SLOTS = 16


@dataclass(frozen=True)
class Forward:
    """What one rank saw of one batch: without CP, with CP as stock runs it, and hooked."""

    rows: torch.Tensor
    """[sent tokens, width] of the hooked forward, in global order."""
    which: list[int]
    """Their global rows, ascending."""
    expected: torch.Tensor
    """[T, width]: stock's captured rows of the same tokens without CP, projected as far as the mode does."""
    through: tuple[int, ...]
    """Shape of what goes through the engine in place of the rows."""
    logits_equal: bool
    """Whether the logits are those of stock under CP."""
    logits: tuple[int, ...]
    heads: int
    """Rows of hidden states that the logits processor was given."""
    collectives: list[int]
    """Bytes that this rank gave to each collective of the attention-CP group in the hooked forward."""
    stock_collectives: list[int]
    """The same for stock."""
    stock_rows: torch.Tensor
    """[T, A * H] that stock hands to injection."""
    addresses_right: bool
    counters: dict[str, int]
    left: tuple[Any, ...]
    """State of the runtime that a forward must not leave behind."""


class ForwardRank:
    """A rank of an attention-CP group that has the worker hooks."""

    def __init__(self, config: RankConfig, report: Callable[[Any], None]) -> None:
        from sglang.srt.distributed import parallel_state
        from sglang.srt.layers.logits_processor import LogitsProcessor
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.plugins import load_plugins
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        from sglang_dspark_cp.adapters.runtime import runtime

        self.rank, self.cp_size = config.rank, config.options["cp_size"]
        sglang, server_args = installed(), pickle.loads(config.options["server_args"])
        load_plugins()
        sglang.without_gpu()
        sglang.publish_prefill(server_args, self.rank)
        sglang.join_groups(self.cp_size, self.rank, config.options["port"], dp_size=1, cp_size=self.cp_size)
        SpeculativeAlgorithm.DSPARK.create_worker(server_args)
        self.draft = sglang.build_draft(server_args)
        self.draft.load_weights(iter(draft_checkpoint().items()))
        runtime().draft, runtime().cp_rank = self.draft, self.rank
        requests = ReqToTokenPool(SLOTS, g.CONTEXT, "cpu", enable_memory_saver=False)
        self.targets = {
            fused: sglang.target_worker(sglang.build_model(self.cp_size, fused), server_args, self.cp_size, requests)
            for fused in (True, False)
        }
        self.ledger = runtime().require_ledger(self.rank)
        self.heads: list[int] = []
        pick = LogitsProcessor.forward

        def watched(processor: Any, input_ids: Any, hidden_states: torch.Tensor, *rest: Any, **named: Any) -> Any:
            self.heads.append(hidden_states.shape[0])
            return pick(processor, input_ids, hidden_states, *rest, **named)

        LogitsProcessor.forward = watched  # type: ignore[method-assign]
        self.collectives: list[int] = []
        group = parallel_state.get_attn_cp_group()
        gather = group.all_gather_into_tensor

        def counted(output: torch.Tensor, rows: torch.Tensor) -> None:
            self.collectives.append(rows.numel() * rows.element_size())
            gather(output, rows)

        group.all_gather_into_tensor = counted

    def _batch(self, extend: list[int], prefix: list[int], logprobs: bool = False) -> Any:
        """A forward batch as the scheduler hands it to the runner."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        tokens = sum(extend)
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(0, g.VOCAB, (tokens,), generator=generator)
        positions = torch.cat([torch.arange(p, p + n) for p, n in zip(prefix, extend, strict=True)])
        locations = torch.randperm(tokens, generator=generator) + g.PAGE
        seq_lens = torch.tensor([p + n for p, n in zip(prefix, extend, strict=True)])
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(extend),
            input_ids=ids,
            req_pool_indices=torch.arange(len(extend)),
            seq_lens=seq_lens,
            out_cache_loc=locations,
            seq_lens_sum=int(seq_lens.sum()),
            seq_lens_cpu=seq_lens.clone(),
            positions=positions,
            extend_num_tokens=tokens,
            extend_seq_lens=torch.tensor(extend, dtype=torch.int32),
            extend_prefix_lens=torch.tensor(prefix, dtype=torch.int32),
            extend_start_loc=torch.tensor([0, *extend[:-1]], dtype=torch.int32).cumsum(0).to(torch.int32),
            extend_seq_lens_cpu=list(extend),
            extend_prefix_lens_cpu=list(prefix),
            extend_logprob_start_lens_cpu=[0] * len(extend) if logprobs else list(extend),
            return_logprob=logprobs,
            top_logprobs_nums=[0] * len(extend) if logprobs else None,
            token_ids_logprobs=[None] * len(extend) if logprobs else None,
            extend_input_logprob_token_ids_gpu=ids.clone() if logprobs else None,
            spec_algorithm=SpeculativeAlgorithm.DSPARK,
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )

    def _projected(self, hidden: torch.Tensor, mode: GatherMode) -> torch.Tensor:
        """[T, A * H] -> what the mode gathers of these rows, by the draft's own methods on all rows at once."""
        if mode is GatherMode.PACKED:
            return hidden
        context = self.draft.project_target_hidden(hidden)
        if mode is GatherMode.CONTEXT:
            return context
        return torch.cat([stage.self_attn.wkv(context)[0] for stage in self.draft.stages], dim=1)

    def _without_cp(self, fused: bool, batch: Any) -> torch.Tensor:
        """[T, A * H]: what stock's model captures when it is given the whole batch."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        model = self.targets[fused].model_runner.model.model
        batch.attn_cp_metadata = None
        with forward_context(ForwardContext(attn_backend=SimpleNamespace()), forward_batch=batch):
            _, aux = model.forward(batch.input_ids, batch.positions, batch, None)
        found: torch.Tensor = aux
        return found

    def _run(self, fused: bool, batch: Any) -> tuple[Any, list[int], int]:
        """The runner's own extend step: its output, collectives of the CP group, rows given to the logits processor."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        target = self.targets[fused]
        self.collectives.clear()
        self.heads.clear()
        context = ForwardContext(attn_backend=target.model_runner.attn_backend)
        with forward_context(context, forward_batch=batch):
            output = target.runner._execute_extend(batch)
        return output, list(self.collectives), self.heads[0]

    @torch.no_grad()
    def forward(
        self, extend: list[int], prefix: list[int], fused: bool, mode: str = "packed", logprobs: bool = False
    ) -> Forward:
        """One batch three times."""
        from sglang_dspark_cp.adapters.runtime import runtime

        state = runtime()
        state.mode, state.window, state.page = GatherMode(mode), g.WINDOW, g.PAGE
        tokens = sum(extend)
        expected = self._without_cp(fused, self._batch(extend, prefix))
        stock, stock_collectives, _ = self._run(fused, self._batch(extend, prefix, logprobs))
        batch = self._batch(extend, prefix, logprobs)
        positions, locations = batch.positions.clone(), batch.out_cache_loc.clone()
        proof = BatchProof([str(index) for index in range(len(extend))], prefix, extend)
        self.ledger.begin(proof)
        output, collectives, heads = self._run(fused, batch)
        self.ledger.current = None
        rows, order = proof.payload, proof._order
        assert rows is not None
        proof.admit(
            output.hidden_states,
            positions,
            locations,
            expected_width=rows.shape[1],
            to_swa=lambda where: where,
        )
        which = list(range(tokens))
        if order is not None:
            real = order >= 0
            rows = rows[real][order[real].argsort()]
            which = sorted(order[real].tolist())
        found = Forward(
            rows,
            which,
            self._projected(expected, GatherMode.PACKED if order is None else state.mode),
            tuple(output.hidden_states.shape),
            torch.equal(output.next_token_logits, stock.next_token_logits),
            tuple(output.next_token_logits.shape),
            heads,
            collectives,
            stock_collectives,
            stock.hidden_states,
            proof.words().tolist()[HOST_WORDS : HOST_WORDS + 4] == [0, 0, -1, 0],
            vars(self.ledger.counters).copy(),
            (state.passes, state.last_hidden),
        )
        state.passes = ()
        return found

    @torch.no_grad()
    def fail_in_a_layer(self) -> tuple[str, bool]:
        """(error, whether the next forward gathers again) after a layer raised under CP."""
        model = self.targets[False].model_runner.model.model
        model.layers[2].forward = None  # calling it is a TypeError, on every rank alike
        self.ledger.begin(BatchProof(["0"], [0], [16]))
        try:
            self._run(False, self._batch([16], [0]))
            error = ""
        except TypeError as raised:
            error = str(raised)
        finally:
            self.ledger.current = None
            del model.layers[2].forward
        _, collectives, _ = self._run(False, self._batch([16], [0]))
        return error, len(collectives) == 3

    @torch.no_grad()
    def faulty(self, kind: str) -> list[int]:
        """The words of the proof of a forward with a fault on rank 1."""
        import dataclasses

        from sglang_dspark_cp.adapters.runtime import runtime

        state = runtime()
        state.mode, state.window, state.page = GatherMode.KV, g.WINDOW, g.PAGE
        held, state.config = state.config, dataclasses.replace(state.config, fault=Fault(FaultKind(kind), 1))
        batch = self._batch([13], [0])
        positions, locations = batch.positions.clone(), batch.out_cache_loc.clone()
        proof = BatchProof(["0"], [0], [13])
        self.ledger.begin(proof)
        try:
            output, _, _ = self._run(True, batch)
        finally:
            self.ledger.current, state.config, state.passes = None, held, ()
        width = self.draft.num_stages * g.ROW
        proof.admit(output.hidden_states, positions, locations, expected_width=width, to_swa=lambda where: where)
        words: list[int] = proof.words().tolist()
        return words
