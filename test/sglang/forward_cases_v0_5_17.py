"""What `test_forward_v0_5_17` does inside gloo ranks: SGLang's own `DeepseekV4Model.forward` over small layers."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from sglang_dspark_cp.config import GatherMode
from sglang_dspark_cp.core import project
from sglang_dspark_cp.core.align import HOST_WORDS
from sglang_dspark_cp.core.inject import BatchProof
from sglang_dspark_cp.smoke import geometry as g
from sglang_dspark_cp.smoke.processes import RankConfig
from sglang_dspark_cp.smoke.ranks import join_groups, without_gpu
from sglang_dspark_cp.smoke.target import build_model
from sglang_dspark_cp.smoke.weights import draft_checkpoint


@dataclass(frozen=True)
class Forward:
    """What one rank saw of one forward."""

    rows: torch.Tensor | None
    """[sent tokens, width] of the hooked forward, in global order."""
    which: list[int]
    """Their global rows, ascending."""
    expected: torch.Tensor
    """[T, width]: what the same tokens give without CP: stock's captured states, projected as far as the mode does."""
    through: tuple[int, ...]
    """Shape of what goes through the engine in place of the rows."""
    last_equal: bool
    """Whether the hidden states for the LM head are stock's: of all tokens, or of each request's last one."""
    heads: int
    """How many hidden states for the LM head came."""
    collectives: list[int]
    """Bytes that this rank gave to each collective of the attention-CP group in the hooked forward."""
    stock_collectives: list[int]
    """The same for stock's forward under CP with nothing to capture."""
    addresses_right: bool
    counters: dict[str, int]
    capture_restored: bool


class ForwardRank:
    """A rank of an attention-CP group that has the worker hooks."""

    def __init__(self, config: RankConfig, report: Callable[[Any], None]) -> None:
        import sglang.srt.models.deepseek_v4 as deepseek_v4
        import sglang.srt.models.deepseek_v4_dspark as deepseek_v4_dspark
        from sglang.srt import runtime_context
        from sglang.srt.distributed import parallel_state
        from sglang.srt.plugins import load_plugins
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        from sglang_dspark_cp.adapters.runtime import runtime

        self.rank, self.cp_size = config.rank, config.options["cp_size"]
        server_args = pickle.loads(config.options["server_args"])
        # Held in a list: SGLang's registry rebinds names of modules only, so this stays stock's.
        self.stock_forward = [deepseek_v4.DeepseekV4Model.forward]
        self.stock_markov_head = [deepseek_v4_dspark.DSparkV4MarkovHead.__init__]
        load_plugins()
        without_gpu()
        runtime_context.publish(server_args, role="scheduler")
        server_args.__dict__["device"] = "cpu"
        runtime_context.get_context().config_bag("device")._set("device", "cpu")
        join_groups(self.cp_size, self.rank, config.options["port"], dp_size=1, cp_size=server_args.attn_cp_size)
        SpeculativeAlgorithm.DSPARK.create_worker(server_args)
        assert deepseek_v4.DeepseekV4Model.forward is not self.stock_forward[0]
        self.draft = self._draft(server_args)
        runtime().draft, runtime().cp_rank = self.draft, self.rank
        self.models = {fused: build_model(self.cp_size, fused) for fused in (True, False)}
        self.ledger = runtime().require_ledger(self.rank)
        self.group = parallel_state.get_attn_cp_group()
        self.collectives: list[int] = []
        gather = self.group.all_gather_into_tensor

        def counted(output: torch.Tensor, rows: torch.Tensor) -> None:
            self.collectives.append(rows.numel() * rows.element_size())
            gather(output, rows)

        self.group.all_gather_into_tensor = counted

    def _draft(self, server_args: Any) -> Any:
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark

        config = ModelConfig.from_server_args(server_args, model_path=server_args.model_path, is_draft_model=True)
        torch.set_default_dtype(torch.bfloat16)
        draft = DeepseekV4ForCausalLMDSpark(config.hf_config, None, "")
        torch.set_default_dtype(torch.float32)
        draft.load_weights(iter(draft_checkpoint().items()))
        return draft

    def _projected(self, hidden: torch.Tensor, mode: GatherMode) -> torch.Tensor:
        """[T, A * H] -> what the mode gathers of these rows, by the draft's own methods on all rows at once."""
        if mode is GatherMode.PACKED:
            return hidden
        context = self.draft.project_target_hidden(hidden)
        if mode is GatherMode.CONTEXT:
            return context
        return torch.cat([stage.self_attn.wkv(context)[0] for stage in self.draft.stages], dim=1)

    def _batch(self, extend: list[int], prefix: list[int], padded: int, cp: bool) -> tuple[Any, Any, Any]:
        """(ids [padded], positions [padded], forward batch) as the runner hands them to the model."""
        from sglang.srt.layers.attention.dsa.utils import can_dsa_cp_split
        from sglang.srt.layers.utils.cp_utils import prepare_context_parallel_metadata
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        tokens = sum(extend)
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(0, g.VOCAB, (tokens,), generator=generator)
        positions = torch.cat([torch.arange(p, p + n) for p, n in zip(prefix, extend, strict=True)])
        locations = torch.randperm(tokens, generator=generator) + g.PAGE

        def pad(values: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(values, (0, padded - tokens))

        seq_lens = [p + n for p, n in zip(prefix, extend, strict=True)]
        batch = SimpleNamespace(
            forward_mode=ForwardMode.EXTEND,
            extend_seq_lens_cpu=list(extend),
            seq_lens_cpu=torch.tensor(seq_lens),
            out_cache_loc=pad(locations),
            attn_cp_metadata=None,
            return_logprob=False,
            multi_item_delimiter_indices=None,
            can_run_tbo=False,
            tbo_children=None,
        )
        if cp and can_dsa_cp_split(padded, self.cp_size, True, batch):
            batch.attn_cp_metadata = prepare_context_parallel_metadata(
                padded, 0, self.cp_size, seq_lens, extend_seqs_len=list(extend)
            )
        return pad(ids), pad(positions), batch

    def _model(self, fused: bool, capture: bool) -> Any:
        model = self.models[fused]
        model.dspark_layers_to_capture = list(g.CAPTURED_LAYERS) if capture else None
        return model

    @torch.no_grad()
    def forward(
        self, extend: list[int], prefix: list[int], fused: bool, mode: str = "packed", logprobs: bool = False
    ) -> Forward:
        """One batch three times: stock without CP, stock with CP and no capture, hooked with both."""
        from sglang_dspark_cp.adapters.runtime import runtime

        state = runtime()
        state.mode, state.window, state.page = GatherMode(mode), g.WINDOW, g.PAGE
        tokens = sum(extend)
        padded = -(-tokens // self.cp_size) * self.cp_size
        stock = self.stock_forward[0]
        (stock_last, _), aux = stock(self._model(fused, True), *self._batch(extend, prefix, tokens, False), None)

        self.collectives.clear()
        stock(self._model(fused, False), *self._batch(extend, prefix, padded, True), None)
        stock_collectives = list(self.collectives)

        model = self._model(fused, True)
        ids, positions, batch = self._batch(extend, prefix, padded, True)
        batch.return_logprob = logprobs
        proof = BatchProof([str(index) for index in range(len(extend))], prefix, extend)
        self.ledger.begin(proof)
        self.collectives.clear()
        (last, _), through = model.forward(ids, positions, batch, None)
        self.ledger.current = None
        rows, order = proof.payload, proof._order
        assert rows is not None
        proof.admit(
            through,
            positions[:tokens],
            batch.out_cache_loc[:tokens],
            expected_width=rows.shape[1],
            to_swa=lambda locations: locations,
        )
        if order is None:
            which = list(range(tokens))
        else:
            real = order >= 0
            rows = rows[real][order[real].argsort()]
            which = sorted(order[real].tolist())
        ends = torch.tensor(extend).cumsum(0) - 1
        wanted_last = stock_last if (last.shape[0] >= tokens and order is None) or logprobs else stock_last[ends]
        return Forward(
            rows,
            which,
            self._projected(torch.cat(aux, dim=-1), GatherMode.PACKED if order is None else state.mode),
            tuple(through.shape),
            torch.equal(last[: len(wanted_last)], wanted_last),
            last.shape[0],
            list(self.collectives),
            stock_collectives,
            proof.words().tolist()[HOST_WORDS : HOST_WORDS + 4] == [0, 0, -1, 0],
            vars(self.ledger.counters).copy(),
            model.dspark_layers_to_capture == list(g.CAPTURED_LAYERS),
        )

    def split_from(self, rows: int) -> int:
        """Captured rows lie in two buffers from this number on; returns the number that was valid before."""
        before, project.SPLIT_ROWS = project.SPLIT_ROWS, rows
        return before

    @torch.no_grad()
    def logits_rows(self, extend: list[int]) -> tuple[list[float], list[float]]:
        """What the logits processor picks: from the hooked forward's rows, and, stock, from all rows."""
        from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

        from sglang_dspark_cp.adapters.runtime import runtime

        tokens = sum(extend)
        every = torch.arange(float(tokens)).unsqueeze(1)
        ends = torch.tensor(extend).cumsum(0) - 1
        metadata = LogitsMetadata(
            forward_mode=ForwardMode.EXTEND,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            extend_seq_lens=torch.tensor(extend, dtype=torch.int32),
            extend_seq_lens_cpu=list(extend),
        )
        processor = LogitsProcessor.__new__(LogitsProcessor)
        ticket = torch.zeros(tokens, 1)

        def pick(rows: torch.Tensor) -> list[float]:
            found = LogitsProcessor._get_pruned_states(processor, rows, None, ticket, metadata)
            picked: list[float] = found[0].flatten().tolist()
            return picked

        runtime().last_hidden = heads = every[ends]
        ours = pick(heads)
        assert runtime().last_hidden is None
        return ours, pick(every)

    @torch.no_grad()
    def fail_in_a_layer(self) -> tuple[str, bool, int]:
        """(error, capture restored, hooks left on the layers) after a layer raised under CP."""
        model = self._model(False, True)
        model.layers[2].forward = None  # calling it is a TypeError, on every rank alike
        self.ledger.begin(BatchProof(["0"], [0], [16]))
        try:
            model.forward(*self._batch([16], [0], 16, True), None)
            error = ""
        except TypeError as raised:
            error = str(raised)
        finally:
            self.ledger.current = None
            del model.layers[2].forward
        left = sum(len(layer._forward_hooks) for layer in model.layers)
        return error, model.dspark_layers_to_capture == list(g.CAPTURED_LAYERS), left

    @torch.no_grad()
    def stock_capture_under_cp(self) -> str:
        """What stock's forward says where capture meets CP."""
        try:
            self.stock_forward[0](self._model(False, True), *self._batch([16], [0], 16, True), None)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def markov_shard(self, lm_head_shards: int) -> str:
        """What stock's Markov head says to an LM head with that many shards, in a group with attention TP 1."""
        from sglang.srt.models.deepseek_v4_dspark import DSparkV4MarkovHead

        head = DSparkV4MarkovHead.__new__(DSparkV4MarkovHead)
        self.stock_markov_head[0](head, vocab_size=g.VOCAB, markov_rank=32)
        lm_head = SimpleNamespace(
            org_vocab_size=g.VOCAB,
            tp_size=lm_head_shards,
            num_embeddings_per_partition=g.VOCAB // lm_head_shards,
            num_embeddings_padded=g.VOCAB,
            shard_indices=SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=g.VOCAB // lm_head_shards),
        )
        try:
            head.configure_tp_shard(lm_head=lm_head)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""
