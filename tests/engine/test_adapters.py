"""`SamplingParams.lora`: prompts computed with scales of their own for the model's LoRA adapters. Texts are those of a
model that has just these adapters, whatever else runs, and cells of different adapters never meet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tilebeam
from engine_kit import EXACT
from tilebeam import LM, SamplingParams, TilebeamError

from bench.lib.adapters import write_adapter

PROMPT = "the question is how many " * 12
DRAWN: dict[str, Any] = {"max_tokens": 12, "seed": 4, "n": 2, "ignore_eos": True}
# Scales, and the adapters that a model is loaded with for the same.
SETS: dict[tuple[float, ...] | None, list[tuple[int, float]]] = {
    None: [(0, 1.0), (1, 0.0)],
    (): [],
    (1.0,): [(0, 1.0)],
    (0.0, 0.5): [(1, 0.5)],
    (-1.0, 2.0): [(0, -1.0), (1, 2.0)],
}


@pytest.fixture(scope="module")
def adapters(path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / f"{i}.gguf", path, seed=i) for i in range(2)]


def load(path: Path, lora: Any, **changes: Any) -> LM:
    options: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 4, "threads": 1, "lookup": False}
    return tilebeam.load(path, lora=lora, **{"device": "cpu", **options, **EXACT, **changes})


@pytest.fixture
def lm(path: Path, adapters: list[Path]) -> Iterator[LM]:
    with load(path, [(adapters[0], 1.0), (adapters[1], 0.0)]) as model:
        yield model


Texts = list[list[int]]


def texts(lm: LM, lora: Any = None, prompt: str = PROMPT, **more: Any) -> Texts:
    (output,) = lm.generate(prompt, lora=lora, **{**DRAWN, **more})
    return [sample.token_ids for sample in output.outputs]


@pytest.fixture(scope="module")
def expected(path: Path, adapters: list[Path]) -> dict[Any, Texts]:
    """What models say that have just these adapters."""
    found = {}
    for scales, chosen in SETS.items():
        with load(path, [(adapters[i], scale) for i, scale in chosen]) as lm:
            found[scales] = texts(lm)
    assert len({str(t) for t in found.values()}) == len(SETS) - 1  # None is (1.0,)
    return found


def test_texts_are_those_of_a_model_with_these_adapters(lm: LM, expected: dict[Any, Texts]) -> None:
    for _ in range(2):
        for scales in SETS:
            assert texts(lm, scales) == expected[scales], scales


def test_on_the_npu(path: Path, adapters: list[Path]) -> None:
    with load(path, adapters, device="npu") as lm:
        found = {scales: texts(lm, scales) for scales in ((), (1.0,), (0.0, 0.5))}
        assert [texts(lm, scales) for scales in found] == list(found.values())
    for scales, want in found.items():
        chosen = [(adapters[i], scale) for i, scale in SETS[scales]]
        with load(path, chosen, device="npu") as lm:
            assert texts(lm) == want


def test_cells_of_different_adapters_do_not_meet(lm: LM, expected: dict[Any, Texts]) -> None:
    length = len(lm.tokenize(PROMPT))
    with lm.keep_prefixes():
        for seen in (0, 1):
            for scales in SETS:
                output = lm.generate(PROMPT, lora=scales, **DRAWN | {"n": 1})[0]
                assert [s.token_ids for s in output.outputs] == expected[scales][:1], scales
                cached = output.usage.cached_tokens
                assert cached == (length - 1 if seen or scales == (1.0,) else 0), scales  # None came before (1.0,)


def test_guessed_tokens_change_nothing(path: Path, adapters: list[Path], expected: dict[Any, Texts]) -> None:
    with load(path, [(adapters[0], 1.0), (adapters[1], 0.0)], lookup=True) as lm:
        for scales in SETS:
            assert texts(lm, scales) == expected[scales], scales


def test_threads_with_different_adapters(lm: LM, expected: dict[Any, Texts]) -> None:
    """Calls of all sets at once: each gets its own text."""
    with ThreadPoolExecutor(10) as pool:
        asked = [(scales, pool.submit(texts, lm, scales)) for _ in range(4) for scales in SETS]
        for scales, future in asked:
            assert future.result(120) == expected[scales], scales


def test_no_set_starves(lm: LM) -> None:
    """One set is asked for without a pause, another one once: it is not made to wait for ever."""

    async def scenario() -> int:
        done, count = asyncio.Event(), 0

        async def crowd() -> None:
            nonlocal count
            while not done.is_set():
                await lm.agenerate(PROMPT, lora=[1], max_tokens=4, ignore_eos=True)
                count += 1
                assert count < 100

        async def single() -> int:
            while count < 3:
                await asyncio.sleep(0)
            before = count
            await lm.agenerate(PROMPT, lora=[0, 1], max_tokens=4, ignore_eos=True)
            done.set()
            return count - before

        *_, waited = await asyncio.gather(*(crowd() for _ in range(4)), single())
        return waited

    assert asyncio.run(scenario()) <= 8  # those that came before it


def test_calls_with_the_same_adapters_share_batches(lm: LM) -> None:
    """Two sets in turn: when one is through, all that wait for the other run together."""

    async def scenario() -> None:
        asked = [lm.agenerate(PROMPT, lora=[i % 2, 1 - i % 2], max_tokens=20, ignore_eos=True) for i in range(8)]
        await asyncio.gather(*asked)

    before = lm.figures().batches
    asyncio.run(scenario())
    after = lm.figures().batches
    assert sum(n - before.get(rows, 0) for rows, n in after.items()) <= 3 * 20 + 6  # 160 one by one


def test_what_stands_between_waits_its_turn(lm: LM, expected: dict[Any, Texts]) -> None:
    """Reading is done with the adapters of the load, unless others are asked for."""
    loaded = lm.token_logprobs([PROMPT])[0].logprobs
    plain = lm.token_logprobs([PROMPT], lora=())[0].logprobs
    assert np.abs(loaded - plain).max() > 0.1
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(texts, lm, (0.0, 0.5)) for _ in range(3)]
        read = [pool.submit(lm.token_logprobs, [PROMPT], lora=lora) for lora in (None, (), (1.0, 0.0))]
        assert [future.result(120) for future in asked] == [expected[(0.0, 0.5)]] * 3
        for future, want in zip(read, (loaded, plain, loaded), strict=True):
            np.testing.assert_allclose(future.result(120)[0].logprobs, want, atol=1e-5)
    assert texts(lm) == expected[None]


def test_only_the_adapters_of_the_load_are_saved(lm: LM, tmp_path: Path, expected: dict[Any, Texts]) -> None:
    with lm.keep_prefixes():
        texts(lm, ())
        assert lm.save_prefixes(tmp_path) == 0
        texts(lm)
        assert lm.save_prefixes(tmp_path) > 0
        texts(lm, (0.0, 0.5), "other " * 40)
        assert lm.load_prefixes(tmp_path) > 0
        assert texts(lm, ()) == expected[()]
        assert texts(lm) == expected[None]


def test_many_prompts_one_by_one(lm: LM, expected: dict[Any, Texts]) -> None:
    params = [SamplingParams(lora=scales, **DRAWN) for scales in SETS]
    found = dict(lm.completed([PROMPT] * len(SETS), params))
    for i, scales in enumerate(SETS):
        assert [s.token_ids for s in found[i].outputs] == expected[scales]


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ([1, 2, 3], "loaded with 2 LoRA adapters; lora has 3 scales"),
        ("1", "lora must be a list of numbers"),
        ([float("nan")], "lora must be a list of numbers"),
        ([[0, 1]], "lora must be a list of numbers"),
    ],
)
def test_scales_that_are_none(lm: LM, lora: Any, said: str) -> None:
    with pytest.raises(TilebeamError, match=said):
        lm.generate("two", lora=lora)


def test_one_call_with_several_sets(lm: LM, expected: dict[Any, Texts]) -> None:
    outputs = lm.generate([PROMPT] * len(SETS), [SamplingParams(lora=scales, **DRAWN) for scales in SETS])
    assert [[s.token_ids for s in output.outputs] for output in outputs] == list(expected.values())


def test_a_model_without_adapters(path: Path) -> None:
    with load(path, []) as lm:
        assert texts(lm, ()) == texts(lm)
        with pytest.raises(TilebeamError, match="with 0 LoRA adapters; lora has 1 scales"):
            texts(lm, [1])
