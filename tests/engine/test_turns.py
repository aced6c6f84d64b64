"""Samples, sets of LoRA adapters and readers share an engine: everybody's turn comes within a bounded number of
batches, whatever the others ask for, and nobody's results change.

All bounds are counts of batches: a model that may decode so many is to be done with what it was asked for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tilebeam
from engine_kit import EXACT
from streaming_kit import DEADLINE, PROMPT, Together, idle, line, tokens, until
from tilebeam import LM, SamplingParams, TilebeamError
from tilebeam.engine import turns
from tilebeam.engine.dispatcher import Dispatcher
from tilebeam.engine.turns import STEPS, TOKENS
from tilebeam.native.llama import Context

LONG = SamplingParams(max_tokens=1500, seed=5, ignore_eos=True)
ONE = SamplingParams(max_tokens=1, seed=1)


class Budget:
    """Lets a model decode so many batches and no more, until it is given more.

    Attributes:
        sizes: of the batches so far.
    """

    def __init__(self, lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self._left = 0
        self._begun = 0
        self._changed = threading.Condition()
        context, real = lm.engine.context, Context.decode

        def decode(n: int) -> int:
            with self._changed:
                self._begun += 1
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: self._left > 0, DEADLINE)
                self._left -= 1
                self.sizes.append(n)
            return real(context, n)

        monkeypatch.setattr(context, "decode", decode)

    def give(self, batches: int) -> None:
        with self._changed:
            self._left += batches
            self._changed.notify_all()

    def spend(self, batches: int) -> None:
        """Give so many, and wait until the one behind them is to begin."""
        self.give(batches)
        with self._changed:
            assert self._changed.wait_for(lambda: self._begun > len(self.sizes) and self._left == 0, DEADLINE)


@pytest.fixture(scope="module")
def load(path: Path) -> Callable[..., LM]:
    options: dict[str, Any] = {"n_ctx": 2048, "n_seq_max": 8, "threads": 1, "lookup": False, **EXACT}
    return lambda **changes: tilebeam.load(path, "cpu", **options | changes)


@pytest.fixture
def lm(load: Callable[..., LM]) -> Iterator[LM]:
    with load() as model:
        yield model


@pytest.fixture
def budget(lm: LM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Budget]:
    made = Budget(lm, monkeypatch)
    yield made
    made.give(10**9)


def readers(lm: LM, count: int) -> None:
    """Return when so many readers wait."""
    until(lambda: line(lm).readers == count)


# --- bounded waiting --------------------------------------------------------------------------------------------------


def test_one_token_behind_a_reader_behind_a_long_answer(lm: LM, budget: Budget) -> None:
    long = Together(lambda: tokens(lm, PROMPT, LONG))
    budget.spend(20)
    reader = Together(lambda: lm.embed("a short text"))
    readers(lm, 1)
    short = Together(lambda: tokens(lm, "so", ONE))
    until(lambda: line(lm).queued == 1)
    budget.give(STEPS + 4)
    assert len(short.wait()[0][0]) == 1
    assert reader.wait()[0].shape == (lm.n_embd,)
    budget.give(10**9)
    assert [len(t) for t in long.wait()[0]] == [1500]
    assert idle(lm)


def reads(lm: LM) -> dict[str, Callable[[], Any]]:
    """All that wants the engine for itself, and is done with a batch or less."""
    return {
        "read": lambda: lm.read([PROMPT], [[-1]])[0].logits,
        "hidden": lambda: lm.hidden([PROMPT], [[0, -1]])[0].hidden,
        "embed": lambda: lm.embed([PROMPT, "another"]),
        "loglikelihood": lambda: [x.logprob for x in lm.loglikelihood(PROMPT, [" of", " in"])],
        "token_logprobs": lambda: lm.token_logprobs([PROMPT])[0].logprobs,
        "logits": lambda: lm.logits([5, 6, 7]),
    }


@pytest.mark.parametrize("what", list(reads(None)))  # type: ignore[arg-type]
def test_every_reader_beside_a_long_answer(lm: LM, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    params = SamplingParams(max_tokens=100, seed=5, ignore_eos=True)
    read = reads(lm)[what]
    with lm.keep_prefixes():
        alone, expected = read(), tokens(lm, PROMPT, params)
    budget = Budget(lm, monkeypatch)
    sampling = Together(lambda: tokens(lm, PROMPT, params))
    budget.spend(20)
    reading = Together(read)
    readers(lm, 1)
    budget.give(STEPS + 5)
    found = reading.wait()[0]
    if not what.startswith(("save", "load")):
        np.testing.assert_allclose(found, alone, atol=1e-4)
    budget.give(10**9)
    assert sampling.wait()[0] == expected


def test_all_readers_that_wait_get_their_turn_at_one_stop(lm: LM, budget: Budget) -> None:
    sampling = Together(lambda: tokens(lm, PROMPT, LONG))
    budget.spend(20)
    reading = [Together(lambda i=i: lm.embed(f"text {i}")) for i in range(6)]  # type: ignore[misc]
    readers(lm, 6)
    budget.give(1 + STEPS + 6)  # 1: the batch under way
    for one in reading:
        one.wait()
    budget.give(10**9)
    assert [len(t) for t in sampling.wait()[0]] == [1500]


def test_a_flood_of_readers_does_not_stop_a_sample(lm: LM, budget: Budget) -> None:
    params, done = SamplingParams(max_tokens=80, seed=5, ignore_eos=True), threading.Event()

    def flood() -> None:
        while not done.is_set():
            lm.embed("a short text")

    sampling = Together(lambda: tokens(lm, PROMPT, params))
    budget.spend(2)
    flooding = Together(*[flood] * 4)
    readers(lm, 4)
    budget.give(80 + 4 * (80 // STEPS + 1))
    assert [len(t) for t in sampling.wait()[0]] == [80]
    done.set()
    budget.give(10**9)
    flooding.wait()
    assert idle(lm)


def test_a_flood_of_samples_does_not_stop_a_reader(lm: LM, budget: Budget) -> None:
    async def flood() -> None:
        async def one(i: int) -> None:
            while not done.is_set():
                await lm.agenerate(f"{PROMPT} {i}", max_tokens=5, ignore_eos=True)

        await asyncio.gather(*map(one, range(20)))

    done = threading.Event()
    flooding = Together(lambda: asyncio.run(flood()))
    budget.spend(30)
    for _ in range(3):
        reading = Together(lambda: lm.embed("a short text"))
        readers(lm, 1)
        budget.give(STEPS + 2)
        assert reading.wait()[0].shape == (lm.n_embd,)
        budget.spend(0)  # with batches left, the next reader would not wait
    done.set()
    budget.give(10**9)
    flooding.wait()


def test_a_long_text_is_read_in_turns(lm: LM, budget: Budget) -> None:
    text, params = [3 + i % 500 for i in range(3 * TOKENS)], SamplingParams(max_tokens=200, seed=5, ignore_eos=True)
    budget.give(10**9)
    alone, expected = lm.embed([text]), tokens(lm, [9], params)  # type: ignore[arg-type]
    stream = lm.stream([9], params)
    first = next(stream)
    before = len(budget.sizes)
    np.testing.assert_allclose(lm.embed([text]), alone, atol=1e-5)
    sizes = budget.sizes[before:]
    assert [*first.token_ids, *(t for d in stream for t in d.token_ids)] == expected[0]
    assert sum(n for n in sizes if n > 1) == len(text)  # nothing was read twice
    parts = "".join("R" if n > 1 else "s" for n in sizes).split("s" * (STEPS + TOKENS // 128))
    assert [set(part) for part in parts] == [{"R"}] * 3


def test_a_reader_alone_is_not_interrupted(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its texts share batches as they did, however many they are."""
    taken = 0
    real = Dispatcher.exclusive

    def exclusive(*args: Any) -> Any:
        nonlocal taken
        taken += 1
        return real(*args)

    monkeypatch.setattr(Dispatcher, "exclusive", exclusive)
    lm.embed([[3 + i, *range(100, 300)] for i in range(20)])
    assert taken == 1


# --- few cells --------------------------------------------------------------------------------------------------------

TEXT = [3 + i % 500 for i in range(200)]


@pytest.fixture
def small(load: Callable[..., LM]) -> Iterator[LM]:
    with load(n_ctx=256, n_seq_max=4) as model:
        yield model


def test_readers_that_take_all_cells_do_not_stop_a_sample(
    load: Callable[..., LM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has to decode its text again after every stop, in more steps than there are between two stops: these count
    for nothing."""
    params, done = SamplingParams(max_tokens=40, seed=5, ignore_eos=True), threading.Event()
    with load(n_ctx=256, n_seq_max=4, n_batch=16) as lm:
        again = -(-(len(TEXT) + 40) // 16)  # batches
        assert again > STEPS
        expected = tokens(lm, TEXT, params)  # type: ignore[arg-type]
        budget = Budget(lm, monkeypatch)

        def flood() -> None:
            while not done.is_set():
                lm.embed([[7, *TEXT]])  # nothing in common, which the sample could fork

        sampling = Together(lambda: tokens(lm, TEXT, params))  # type: ignore[arg-type]
        budget.spend(again)
        flooding = Together(flood, flood)
        readers(lm, 2)
        budget.give(40 + (40 // STEPS + 1) * 3 * again)  # at every stop both readers, and the sample again
        assert sampling.wait() == [expected]
        done.set()
        budget.give(10**9)
        flooding.wait()
        assert idle(lm)


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_reader_that_fails_hurts_nobody(lm: LM, error: type[BaseException]) -> None:
    params = SamplingParams(n=2, max_tokens=60, seed=5, ignore_eos=True)
    text = [3 + i % 500 for i in range(2 * TOKENS)]
    expected = tokens(lm, PROMPT, params)

    def hook(seen: int, _total: int) -> None:
        if seen > TOKENS:
            raise error

    with lm.keep_prefixes():
        stream = lm.stream(PROMPT, params)
        ids: list[list[int]] = [[], []]
        for i, delta in enumerate(stream):
            ids[delta.index] += delta.token_ids
            if i == 20:
                with pytest.raises(error):
                    lm.token_logprobs([text], progress=hook)
        assert ids == expected
    assert idle(lm)


def test_a_model_that_is_closed_ends_a_reader_between_its_turns(load: Callable[..., LM]) -> None:
    lm = load()
    reached, go_on = threading.Event(), threading.Event()

    def hook(_seen: int, _total: int) -> None:
        reached.set()
        assert go_on.wait(DEADLINE)

    reading = Together(lambda: lm.embed([[3 + i % 500 for i in range(3 * TOKENS)]], progress=hook))
    assert reached.wait(DEADLINE)
    closing = Together(lm.close)
    until(lambda: "closed" in repr(lm))
    go_on.set()
    assert closing.wait() == [None]
    (error,) = reading.wait()
    assert isinstance(error, TilebeamError)
    assert "closed" in str(error)


def test_readings_that_were_pushed_out_are_read_again(small: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two texts that do not fit beside each other, in turns: each pushes out what was read of the other."""
    monkeypatch.setattr(turns, "TOKENS", 48)
    texts = [[*TEXT, 7], [7, *TEXT]]
    alone = [small.token_logprobs([text])[0] for text in texts]
    real, taken = Dispatcher.exclusive, list[Any]()

    def exclusive(*args: Any) -> Any:
        taken.append(args)
        assert len(taken) < 40
        return real(*args)

    with small.raw_decode():
        monkeypatch.setattr(Dispatcher, "exclusive", exclusive)
        monkeypatch.setattr(Dispatcher, "_is_wanted", lambda _: True)  # else who is just coming back may be missed
        reading = Together(*[lambda t=t: small.token_logprobs([t])[0] for t in texts])  # type: ignore[misc]
        readers(small, 2)
    found = reading.wait()
    assert not any(isinstance(one, BaseException) for one in found)
    for one, want in zip(found, alone, strict=True):
        np.testing.assert_allclose(one.logprobs, want.logprobs, atol=1e-5)
    assert sum(one.decoded_tokens for one in found) > 2 * len(TEXT)
    assert idle(small)
