"""Which servers a GPU run needs, on which GPUs, with which flags. Pure functions, no process is started here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..hooks.check import sglang_release

CHUNK = 512
CP_FLAGS = ("--enable-dsa-prefill-context-parallel", "--dsa-prefill-cp-mode", "round-robin-split")
UNIFIED_CP_FLAGS = ("--enable-prefill-cp", "--cp-strategy", "interleave")


@dataclass(frozen=True)
class Flags:
    """What differs between releases.

    Attributes:
        cp: flags of a CP prefill worker.
        every: flags of every server.
        stock_serves: SGLang without this package serves CP prefill with DSPARK.
    """

    cp: tuple[str, ...]
    every: tuple[str, ...] = ()
    stock_serves: bool = False


RELEASES = {
    "0.5.17": Flags(CP_FLAGS),
    # The fusion would ask for NVLink multicast; 0.5.23 loads no tokenizer where prompts are token ids.
    "0.5.23": Flags(UNIFIED_CP_FLAGS, ("--enforce-disable-flashinfer-allreduce-fusion", "--skip-tokenizer-init"), True),
}


def flags() -> Flags:
    """Of the installed release.

    Raises:
        UsageError: it is none that runs were written for.
    """
    release = sglang_release().split("+", 1)[0]
    if release not in RELEASES:
        raise UsageError(f"SGLang {release}: runs know {', '.join(RELEASES)}; install one of these")
    return RELEASES[release]


SPECULATE = ("--speculative-algorithm", "DSPARK")
SIZES = (1, 2, 4, 8)


class UsageError(ValueError):
    """Options that do not fit together or do not fit the machine."""


@dataclass(frozen=True)
class Gpus:
    """GPU index of every rank of prefill and of decode servers; they may be the same, and repeat when ranks share."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]

    @property
    def cp_size(self) -> int:
        """CP size of prefill."""
        return len(self.prefill)


@dataclass(frozen=True)
class SetUp:
    """One way to serve the same prompts.

    Attributes:
        name: as options and reports say it.
        what: in words.
        answers: name of the server that answers.
        prefill: name of the prefill server, None without PD.
    """

    name: str
    what: str
    answers: str
    prefill: str | None = None

    @property
    def servers(self) -> tuple[str, ...]:
        """Names of its servers, prefill first."""
        return (self.answers,) if self.prefill is None else (self.prefill, self.answers)

    @property
    def is_cp(self) -> bool:
        """Whether its prefill is context parallel."""
        return self.prefill is not None and self.prefill.startswith("prefill-cp")

    @property
    def is_stock(self) -> bool:
        """Whether its prefill is context parallel without this package."""
        return self.prefill is not None and is_stock(self.prefill)


def is_stock(server: str) -> bool:
    """Whether a server is a CP prefill worker without this package."""
    return server.startswith("prefill-stock")


def split_list(text: str | None, default: Sequence[str]) -> tuple[str, ...]:
    """Parts of a comma list, without repetition; `default` when it is empty."""
    parts = [part.strip() for part in (text or "").split(",")]
    return tuple(dict.fromkeys(part for part in parts if part)) or tuple(default)


def choose_gpus(
    visible: Sequence[str], gpus: str | None, prefill: str | None, decode: str | None, ranks_per_gpu: int = 1
) -> Gpus:
    """GPUs of a run from the options.

    Raises:
        UsageError: none is there, one is not visible, or their number is not one that SGLang can use.
    """
    if not visible:
        raise UsageError("no GPU is visible here (nvidia-smi lists none); --device cpu needs none")
    every = split_list(gpus, visible)
    chosen = Gpus(split_list(prefill, every), split_list(decode, every))
    unknown = sorted({*chosen.prefill, *chosen.decode} - set(visible))
    if unknown:
        raise UsageError(f"GPU {', '.join(unknown)} is not visible; visible are {', '.join(visible)}")
    for side, indices in (("prefill", chosen.prefill), ("decode", chosen.decode)):
        if len(indices) * ranks_per_gpu not in SIZES:
            raise UsageError(
                f"{side} would have {len(indices)} GPUs x {ranks_per_gpu} ranks; allowed are"
                f" {', '.join(map(str, SIZES))} in all"
            )
    return Gpus(chosen.prefill * ranks_per_gpu, chosen.decode * ranks_per_gpu)


def possible(gpus: Gpus) -> dict[str, SetUp]:
    """Every set-up that these GPUs allow, by name; references first."""
    c, d = gpus.cp_size, len(gpus.decode)
    found = [
        SetUp("plain", "one GPU, no speculation", "plain"),
        SetUp("dspark", "one GPU, DSPARK, no PD", "dspark"),
        SetUp("pd1", "one-GPU prefill -> one-GPU decode", "decode-tp1", "prefill-tp1"),
    ]
    if c > 1:
        found += [
            SetUp(f"pd-tp{c}", f"TP{c} prefill without CP -> TP{d} decode", f"decode-tp{d}", f"prefill-tp{c}"),
            SetUp(f"cp{c}-tp{d}", f"CP{c} prefill -> TP{d} decode", f"decode-tp{d}", f"prefill-cp{c}"),
        ]
        if d > 1:
            what = f"CP{c} prefill -> TP{d}/DP{d} decode"
            found.append(SetUp(f"cp{c}-dp{d}", what, f"decode-dp{d}", f"prefill-cp{c}"))
        if flags().stock_serves:
            what = f"stock CP{c} prefill, without this package -> TP{d} decode"
            found.append(SetUp(f"stock-cp{c}-tp{d}", what, f"decode-tp{d}", f"prefill-stock{c}"))
    return {set_up.name: set_up for set_up in found}


def choose_set_ups(gpus: Gpus, names: str | None) -> list[SetUp]:
    """Set-ups of a run, in the order of `possible`.

    Raises:
        UsageError: a name is unknown or not possible here.
    """
    known = possible(gpus)
    chosen = split_list(names, tuple(known))
    wrong = [name for name in chosen if name not in known]
    if wrong:
        raise UsageError(
            f"--pairs {','.join(wrong)}: with {gpus.cp_size} prefill and {len(gpus.decode)} decode GPUs allowed are"
            f" {', '.join(known)}"
        )
    return [set_up for name, set_up in known.items() if name in chosen]


def reference_of(set_ups: Sequence[SetUp]) -> SetUp | None:
    """The PD set-up without CP that CP set-ups are compared with."""
    return next((each for each in reversed(set_ups) if each.prefill and not each.is_cp and not each.is_stock), None)


def row_reference_of(set_ups: Sequence[SetUp]) -> SetUp | None:
    """The PD set-up whose prefill rows CP rows must equal: CP 1 with attention TP 1, which adds up in the same order.

    A tensor-parallel prefill splits attention heads, so its hidden rows round differently; it stands in when there is
    no one-GPU prefill.
    """
    return next((each for each in set_ups if each.prefill == "prefill-tp1"), reference_of(set_ups))


def base_arguments(model: Path, quant: str) -> list[str]:
    """Flags of every server: a small pool, small chunks, nothing that needs a network.

    The pool's size comes from `--max-total-tokens`; the memory fraction only has to leave room for what other servers
    on the same GPU take while this one loads.
    """
    return [
        *("--model-path", str(model), "--context-length", "8192", "--max-total-tokens", "65536"),
        *("--mem-fraction-static", "0.35", "--chunked-prefill-size", str(CHUNK), "--max-running-requests", "16"),
        *("--cuda-graph-max-bs-decode", "4", "--swa-full-tokens-ratio", "0.5", "--mm-feature-transport", "cpu"),
        *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--skip-server-warmup"),
        *("--random-seed", "1", "--watchdog-timeout", "600", "--disable-custom-all-reduce"),
        *(("--fp8-gemm-backend", "triton") if quant == "fp8" else ()),
        *flags().every,
    ]


def role_arguments(server: str, transfer: str, bootstrap_port: int) -> list[str]:
    """Flags that make a server what its name says (`plain`, `dspark`, `prefill-cp2`, `decode-dp2`, ...)."""
    if server == "plain":
        return []
    if server == "dspark":
        return list(SPECULATE)
    mode, _, kind = server.partition("-")
    size = kind.removeprefix("stock") if is_stock(server) else kind[2:]
    return [
        *("--tp", size, *SPECULATE, "--disaggregation-mode", mode, "--disaggregation-transfer-backend", transfer),
        *(("--disaggregation-bootstrap-port", str(bootstrap_port)) if mode == "prefill" else ()),
        *(flags().cp if kind.startswith("cp") or is_stock(server) else ()),
        *(("--dp", size, "--enable-dp-attention", "--enable-dp-lm-head") if kind.startswith("dp") else ()),
    ]


def gpus_of(server: str, gpus: Gpus) -> tuple[str, ...]:
    """GPUs of a server; one-GPU servers sit at the two ends so that they do not share one where there are two."""
    if server in ("plain", "prefill-tp1"):
        return gpus.prefill[:1]
    if server in ("dspark", "decode-tp1"):
        return gpus.decode[-1:]
    return gpus.prefill if server.startswith("prefill") else gpus.decode


def launch_module(gpus: Sequence[str]) -> str:
    """What Python runs for a server whose ranks sit on these GPUs."""
    shared = len(set(gpus)) < len(gpus)
    return "sglang_dspark_cp.smoke.launch_shared" if shared else "sglang.launch_server"


def environment(quant: str, transfer: str, gpus: Sequence[str]) -> dict[str, str]:
    """Environment of a server."""
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(gpus)),
        "SGLANG_HOST_IP": "127.0.0.1",
        **({"MC_FORCE_TCP": "1"} if transfer == "mooncake_tcp" else {}),
        **({"SGLANG_DSV4_FP4_EXPERTS": "0", "SGLANG_OPT_FP8_WO_A_GEMM": "0"} if quant == "bf16" else {}),
    }
