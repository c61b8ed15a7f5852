"""The prompts of a GPU run: the same for every set-up, and chosen for what can go wrong at a boundary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Sample = Callable[[int, int], list[int]]
"""(length, seed) -> token ids of a prompt; prompts of different seeds share no prefix."""

PAGE = 256
WINDOW = 128


@dataclass(frozen=True)
class PromptSet:
    """What is sent.

    Attributes:
        measured: long enough for a promised continuation; one after the other, the last repeats the one before it.
        short: shorter than the CP size and a little more; only has to be answered.
        together: indices of `measured` that are sent once more, all at once, from an empty cache.
        controls: indices of `measured` that negative controls use.
        ttft: new prompts, by length, to take the time to the first token from, after one that only warms up.
    """

    measured: tuple[tuple[int, ...], ...]
    short: tuple[tuple[int, ...], ...]
    together: tuple[int, ...]
    controls: tuple[int, ...]
    ttft: dict[int, tuple[tuple[int, ...], ...]]


def lengths(cp_size: int, chunk: int, shortest: int) -> tuple[int, ...]:
    """Prompt lengths without repetition, shortest first, none below `shortest`."""
    found = {shortest, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW - 1, 900, 1500, 2049}
    found |= set(range(150, 150 + cp_size))  # every residue of T % C in one chunk
    found |= {at + step for at in (PAGE, chunk, 2 * chunk) for step in (-1, 0, 1)}
    found |= {chunk + cp_size - 1, chunk + cp_size, chunk + cp_size + 1}  # a last chunk around the CP size
    found |= {chunk + WINDOW - 1, chunk + WINDOW + 1, 2 * PAGE + 100, 700, 300, 1100, 383}
    return tuple(sorted(length for length in found if length >= shortest))


def prompt_set(sample: Sample, *, cp_size: int, chunk: int, shortest: int) -> PromptSet:
    """The prompts of a run.

    Args:
        sample: makes a prompt.
        cp_size: CP size of prefill (1 without).
        chunk: chunked prefill size in tokens.
        shortest: shortest length with a promised continuation.
    """
    measured = [sample(length, seed) for seed, length in enumerate(lengths(cp_size, chunk, shortest))]
    measured.append(list(measured[-1]))
    count = len(measured)
    return PromptSet(
        measured=tuple(tuple(prompt) for prompt in measured),
        short=tuple(tuple(sample(length, 500 + length)) for length in range(1, max(cp_size, 2) + 1)),
        together=tuple(range(0, count - 1, 2))[:16],
        controls=tuple(range(2, count - 1, 3))[:10],
        ttft={length: tuple(tuple(sample(length, 1000 + seed)) for seed in range(4)) for length in (chunk, 4 * chunk)},
    )
