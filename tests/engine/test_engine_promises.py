"""What the engine promises about batches: nobody waits long for somebody's long prompt, the same requests give the same
texts on every executor, greedy texts do not depend on the batch where logits are apart, and the accounts add up."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tilebeam import LM, SamplingParams, Usage
from tilebeam.engine.portions import portions
from tilebeam.engine.scheduler import PREFILL_CHUNK
from tilebeam.native.llama import Context

PROMPTS = ["the question is how many times the number", "so it was", "of the step the sum is"]


# --- long prompts -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 600), max_size=8), st.integers(1, 512), st.integers(0, 3000))
def test_portions_use_the_room_and_starve_nobody(needs: list[int], room: int, free: int) -> None:
    counts = portions(needs, room, free)
    assert sum(counts) == min(room, free, sum(needs))
    assert all(0 <= c <= n for c, n in zip(counts, needs, strict=True))
    if not needs:
        return
    assert counts[0] >= min(needs[0], min(room, free) // 2)
    if sum(needs) > free:  # cells are short: all for who came first
        for i in range(1, len(needs)):
            assert counts[i] == 0 or counts[i - 1] == needs[i - 1]
    else:  # of the others nobody gets anything before a shorter one has all
        for i in range(1, len(needs)):
            assert counts[i] == 0 or all(counts[j] == needs[j] for j in range(1, len(needs)) if needs[j] < needs[i])


def test_decoding_goes_on_beside_long_prompts(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    short = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
    expected = lm.generate("so", short)[0].outputs[0].token_ids
    sizes: list[int] = []
    real = Context.decode

    def decode(context: Context, n: int) -> int:
        sizes.append(n)
        return real(context, n)

    stream = lm.stream("so", short)
    got = next(stream).token_ids
    monkeypatch.setattr(Context, "decode", decode)
    long = [[5 + i] * 900 for i in range(1)]
    waiting = [lm.stream(p, SamplingParams(max_tokens=2, seed=1, ignore_eos=True)) for p in long]
    for delta in stream:
        got += delta.token_ids
    assert got == expected
    assert len(sizes) == 39  # one batch per token: it never waited
    assert max(sizes) == PREFILL_CHUNK + 1
    assert sum(sizes[: 900 // PREFILL_CHUNK]) == (900 // PREFILL_CHUNK) * (PREFILL_CHUNK + 1)
    assert [len(d.token_ids) for d in waiting[0]] == [1, 1]


def test_who_waits_for_a_prefix_keeps_nobody_waiting(lm: LM) -> None:
    """Ten samples of a long prompt, more than there are slots: it is kept for them, and a short one need not wait."""
    params = SamplingParams(n=10, max_tokens=3, seed=1, ignore_eos=True)
    many, other = (
        lm.stream([9] * 1200, params),
        lm.stream([7] * 5, SamplingParams(max_tokens=3, seed=1, ignore_eos=True)),
    )
    next(other)
    assert not many.take()
    assert len([d for d in many if d.finish_reason]) == 10


# --- accounts ---------------------------------------------------------------------------------------------------------


def test_seconds_of_shared_batches_add_up(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the requests are charged for llama_decode is what it took; drawing is charged too, and nothing twice."""
    inside = 0.0
    real = Context.decode

    def decode(context: Context, n: int) -> int:
        nonlocal inside
        began = time.perf_counter()
        code = real(context, n)
        inside += time.perf_counter() - began
        return code

    monkeypatch.setattr(Context, "decode", decode)
    params = [SamplingParams(n=1 + 2 * i, max_tokens=10 + 7 * i, seed=i, ignore_eos=True) for i in range(3)]
    began = time.perf_counter()
    results = lm.generate(PROMPTS, params)
    total = time.perf_counter() - began
    usage = sum((r.usage for r in results), Usage())
    charged = usage.prefill_seconds + usage.decode_seconds
    assert inside * (1 - 1e-9) <= charged <= total
    assert 0 < usage.sampling_seconds <= total - charged
    assert usage.scored_tokens == usage.scoring_seconds == 0
    for r, p in zip(results, params, strict=True):
        assert r.usage.completion_tokens == p.n * (p.max_tokens or 0)
        assert min(r.usage.prefill_seconds, r.usage.decode_seconds, r.usage.sampling_seconds) > 0
    # Of batches that only go on, each request pays for its samples.
    assert results[2].usage.decode_seconds > results[0].usage.decode_seconds
