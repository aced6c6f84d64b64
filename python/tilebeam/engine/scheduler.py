"""What one llama_decode works on, and how a batch is divided between prompts."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilebeam.engine.drawing import Draws
from tilebeam.engine.kv_cache import Sequence
from tilebeam.engine.request import Request, Sample

# Tokens of prompts in one batch while samples decode, who should not have to wait for long.
PREFILL_CHUNK = 128


@dataclass(eq=False)
class Plan:
    """One batch: what is decoded, and whose token is drawn from which entry.

    While all samples simply go on, one token each, the plan of the next batch is the same: `going`.
    """

    rows: list[tuple[Sample, int]]  # samples whose token is drawn, and the entries
    spans: list[tuple[Sequence, Request, Sample | None, int]]  # sequences, whose they are, and how many tokens of each
    n: int  # entries
    going: bool = False
    shares: list[tuple[Request, int]] = field(default_factory=list)  # requests and their rows, of a plan that is going
    draws: Draws | None = None
    quiet: int = 0  # of a plan that is going: so many draws need no look at the single sample, unless a token ends it


def portions(needs: list[int], room: int, free: int) -> list[int]:
    """How much of each prompt goes into a batch with `room` for prompt tokens: at least half of it is for the prompt
    that came first, so that none waits for ever; the rest goes to the shortest, which so need not wait for long ones.
    Where cells are short, all is for who came first."""
    room = min(room, free)
    fair = sum(needs) <= free
    counts = [0] * len(needs)
    order = sorted(range(1, len(needs)), key=lambda i: needs[i]) if fair else range(1, len(needs))
    if needs:
        counts[0] = min(needs[0], room - room // 2 if fair else room)
    left = room - sum(counts)
    for i in order:
        counts[i] = min(needs[i], left)
        left -= counts[i]
    if needs:
        counts[0] += min(needs[0] - counts[0], left)
    return counts
