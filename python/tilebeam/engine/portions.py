"""How a batch's room is shared by the prompts that are being decoded."""

from __future__ import annotations


def portions(needs: list[int], room: int, free: int) -> list[int]:
    """Return how much of each prompt goes into a batch with `room` for prompt tokens: at least half of it is for the
    prompt that came first, so that none waits for ever; the rest goes to the shortest, which so need not wait for long
    ones. Where cells are short, all is for the prompt that came first."""
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
