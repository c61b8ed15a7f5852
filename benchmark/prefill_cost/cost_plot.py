"""The plot of `prefill_cost`, apart from the program so that it needs neither SGLang nor a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Cost of each side, a point per round, median and interval over them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sides = [side for side, each in result["summary"].items() if each["cost"]]
    figure, axes = pyplot.subplots(1, 2, figsize=(10.4, 4.2), squeeze=False)
    titles = {"ttft": "time to the first token", "throughput": "input tokens/s"}
    for (series, title), axis in zip(titles.items(), axes[0], strict=True):
        for place, side in enumerate(sides):
            cost = result["summary"][side]["cost"][series]
            if cost is None:
                continue
            count = len(cost["by_round"])
            spread = [place + 0.3 * (number / max(1, count - 1) - 0.5) for number in range(count)]
            axis.plot(spread, cost["by_round"], ".", color="0.6", markersize=4)
            errors = [[cost["percent"] - cost["low"]], [cost["high"] - cost["percent"]]]
            axis.errorbar([place], [cost["percent"]], yerr=errors, fmt="o", color="C0", capsize=4)
        axis.axhline(0, color="0.3", linewidth=0.8)
        axis.axhline(result["goal_percent"], color="C3", linewidth=0.8, linestyle="--", label="goal")
        axis.set_xticks(range(len(sides)), sides)
        axis.set(title=f"cost in {title}", ylabel="%")
        axis.grid(True, axis="y", alpha=0.3)
    axes[0][0].legend()
    gpu = next(iter(result["gpus"]), "GPU")
    shared = f", {result['ranks_per_gpu']} ranks on each GPU" if result["ranks_per_gpu"] > 1 else ""
    text = f"CP{result['cp_size']} prefill alone, {result['load']['input_len']} tokens, {result['gpus_used']} x {gpu}"
    figure.suptitle(f"{text}{shared}, {result['date'][:10]}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
