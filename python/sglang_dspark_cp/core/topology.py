"""Which context-parallel prefill set-ups are admitted, as plain data. Standard library and errors only."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import TopologyError

TRANSFER_BACKENDS = ("mooncake", "mooncake_tcp")


@dataclass(frozen=True)
class PrefillTopology:
    """What the launch arguments and the environment say about a DSPARK + PD prefill worker with CP."""

    tp_size: int
    dp_size: int
    pp_size: int
    attn_cp_size: int
    """The size that was asked for; 1 means "not asked, derive it from tp_size"."""
    cp_strategy: str | None
    """`interleave` is the round-robin split, `zigzag` the in-sequence split."""
    transfer_backend: str
    dcp_size: int = 1
    cp_v2: bool = False
    unified_kv: bool = False
    hierarchical_cache: bool = False
    cache_layer_split: bool = False
    pdmux: bool = False
    two_batch_overlap: bool = False
    prefill_graph: bool = False


@dataclass(frozen=True)
class Violation:
    """One reason why a set-up is refused."""

    found: str
    allowed: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"found {self.found}; allowed: {self.allowed}; because {self.why}; fix: {self.fix}"


def violations(topology: PrefillTopology) -> list[Violation]:
    """Every reason to refuse `topology`, in a fixed order; empty when it is supported."""
    t = topology
    found: list[Violation] = []
    if t.cp_strategy != "interleave":
        found.append(
            Violation(
                f"context-parallel split {t.cp_strategy or 'unset'!r}",
                "'interleave' (round-robin)",
                "the global order of captured rows is restored for the round-robin split only",
                "--enable-prefill-cp --cp-strategy interleave, or"
                " --enable-dsa-prefill-context-parallel --dsa-prefill-cp-mode round-robin-split",
            )
        )
    if t.pp_size != 1:
        found.append(
            Violation(
                f"pipeline parallel size {t.pp_size}",
                "1",
                "captured layers of other pipeline stages do not reach the draft",
                "--pipeline-parallel-size 1",
            )
        )
    if t.dp_size != 1:
        found.append(
            Violation(
                f"data parallel size {t.dp_size}",
                "1",
                "SGLang's round-robin prefill CP takes the whole tensor-parallel group",
                "--data-parallel-size 1 on the prefill side (decode may use any)",
            )
        )
    if t.attn_cp_size > 1 and t.dp_size >= 1 and t.attn_cp_size * t.dp_size != t.tp_size:
        found.append(
            Violation(
                f"attention TP {t.tp_size / (t.attn_cp_size * t.dp_size):g}"
                f" (tp {t.tp_size}, attention CP {t.attn_cp_size}, dp {t.dp_size})",
                "attention TP 1, that is attention CP == tp",
                "each CP rank must hold whole hidden rows and whole draft KV rows",
                f"--attention-context-parallel-size {t.tp_size}, or leave that flag out",
            )
        )
    if not 2 <= t.tp_size <= 8:
        found.append(
            Violation(
                f"tensor parallel size {t.tp_size}",
                "2 to 8",
                "context parallelism needs at least two ranks, and SGLang keeps them on one host",
                "--tensor-parallel-size 8 (or 2, 4) with one host per prefill server, or take the CP flags away",
            )
        )
    if t.dcp_size != 1:
        found.append(
            Violation(
                f"decode context parallel size {t.dcp_size}",
                "1",
                "draft KV rows are not laid out for it",
                "--dcp-size 1",
            )
        )
    if t.transfer_backend not in TRANSFER_BACKENDS:
        found.append(
            Violation(
                f"transfer backend {t.transfer_backend!r}",
                " or ".join(repr(name) for name in TRANSFER_BACKENDS),
                "draft KV travels as a state component whose order and senders were checked for Mooncake only",
                "--disaggregation-transfer-backend mooncake",
            )
        )
    if t.cp_v2:
        found.append(
            Violation(
                "SGLANG_ENABLE_CP_V2=1",
                "SGLANG_ENABLE_CP_V2 unset or 0",
                "in this release the model and the runner disagree about who splits a DeepSeek-V4 batch then",
                "unset SGLANG_ENABLE_CP_V2",
            )
        )
    if t.unified_kv:
        found.append(
            Violation(
                "the unified-KV ring (SGLANG_HACK_FLASHMLA_BACKEND=unified_kv_triton)",
                "the paged sliding-window pool",
                "the ring is addressed by request slot, not by the cache locations that are proved here",
                "unset SGLANG_HACK_FLASHMLA_BACKEND",
            )
        )
    if t.hierarchical_cache:
        found.append(
            Violation(
                "the hierarchical cache",
                "radix cache on or off, without a host tier",
                "it was not shown that draft KV rows come back from the host together with a restored prefix",
                "leave out --enable-hierarchical-cache on the prefill side",
            )
        )
    if t.cache_layer_split:
        found.append(
            Violation(
                "KV cache layers split over the CP ranks",
                "whole KV on every CP rank",
                "draft KV is sent by CP rank 0, which must hold all of it",
                "leave out --enable-dsa-cache-layer-split",
            )
        )
    if t.pdmux:
        found.append(
            Violation(
                "PD multiplexing",
                "separate prefill and decode servers",
                "split prefill runs the layers outside the forward that captures hidden rows",
                "leave out --enable-pdmux",
            )
        )
    if t.two_batch_overlap:
        found.append(
            Violation(
                "two-batch overlap",
                "one batch at a time on the prefill side",
                "overlapped layers do not show their finished hidden states one after the other",
                "leave out --enable-two-batch-overlap",
            )
        )
    if t.prefill_graph:
        found.append(
            Violation(
                "a CUDA graph for prefill",
                "eager prefill, which is SGLang's default for DeepSeek-V4 with context parallelism",
                "a replayed graph does not run the code that takes up the captured rows",
                "leave out --cuda-graph-backend-prefill",
            )
        )
    return found


def require_supported(topology: PrefillTopology) -> None:
    """Raise one error that names every violation.

    Raises:
        TopologyError: the set-up is not supported; each violation says what was found, what is allowed, why,
            and which flag to change.
    """
    found = violations(topology)
    if found:
        lines = "\n".join(f"  {number}. {violation}" for number, violation in enumerate(found, 1))
        raise TopologyError(
            "DSPARK on a PD prefill worker with context parallelism is refused before weights load,"
            f" {len(found)} setting(s) have to change:\n{lines}"
        )


def require_live_groups(*, attn_tp_size: int, attn_cp_size: int, tp_size: int, pp_size: int) -> None:
    """Check the sizes of the process groups that really exist, once, when the draft worker is built.

    Raises:
        TopologyError: attention TP is not 1, or attention CP is not the whole TP group, or PP is not 1.
    """
    if attn_tp_size != 1 or attn_cp_size != tp_size or pp_size != 1:
        raise TopologyError(
            f"the live process groups have attention TP {attn_tp_size}, attention CP {attn_cp_size}, TP {tp_size},"
            f" PP {pp_size}; allowed is attention TP 1, attention CP == TP, PP 1, because each CP rank must hold"
            " whole hidden rows; fix: --tensor-parallel-size equal to the CP size, --data-parallel-size 1,"
            " --pipeline-parallel-size 1."
        )
