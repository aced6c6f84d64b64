"""Prompts of hybrid, recurrent and windowed models go on from what was read before, as those of dense ones do.

Tokens that went through the model are counted; what was drawn is compared with the stock backend, which reads the
prompt and the sample as one text.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tilebeam
from engine_kit import Count, check_engine
from tilebeam import LM, SamplingParams, TilebeamError
from tilebeam.engine.request import make_request
from tilebeam.model import loader, memory_check
from tilebeam.outputs import Progress, RequestOutput

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "archs"))
import run as archs

STATES = ("qwen35-dense", "lfm2-dense", "granitehybrid-dense", "nemotron_h-dense", "mamba2-dense")
WINDOWS = ("gemma3-dense", "gpt-oss-moe")
LIMIT = 1e-3  # as in test_recurrent_models.py
TEXT = np.random.default_rng(0).integers(3, 100, 2000).tolist()


def drawn(n: int = 1, tokens: int = 4) -> SamplingParams:
    free = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 7, "ignore_eos": True, "logprobs": True}
    return SamplingParams(n=n, max_tokens=tokens, **free)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = "|".join(name.rpartition("-")[0] for name in (*STATES, *WINDOWS))
    return {path.stem: path for path in archs.save(f"^({names})$", tmp_path_factory.mktemp("models"))}


def load(path: Path, **more: object) -> LM:
    return tilebeam.load(path, "npu", **({"n_ctx": 4096, "n_seq_max": 4, "threads": 1} | more))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def stocks(models: dict[str, Path]) -> Iterator[dict[str, LM]]:
    opened: dict[str, LM] = {}

    class Opened(dict[str, LM]):
        def __missing__(self, name: str) -> LM:
            opened[name] = tilebeam.load(models[name], "cpu", n_ctx=4096, n_seq_max=1, threads=1)
            return self.setdefault(name, opened[name])

    yield Opened()
    for lm in opened.values():
        lm.close()


def assert_as_stock(
    stock: LM, prompts: Sequence[list[int]], outputs: Sequence[RequestOutput], limit: float = LIMIT
) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        for sample in output.outputs:
            logits = stock.logits(prompt + sample.token_ids).astype(np.float64)[len(prompt) - 1 : -1]
            logits -= logits.max(1, keepdims=True)
            wanted = (logits - np.log(np.exp(logits).sum(1, keepdims=True)))[range(len(logits)), sample.token_ids]
            np.testing.assert_allclose(sample.logprobs, wanted, atol=limit)


def fresh(output: RequestOutput) -> int:
    """Tokens of a prompt that were read."""
    return output.usage.prompt_tokens - output.usage.cached_tokens


@pytest.mark.parametrize("name", [*STATES, *WINDOWS])
def test_texts_are_read_once(
    models: dict[str, Path], stocks: dict[str, LM], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A prompt again, one with the same beginning, a vote, texts that fork where samples stood, turns of a chat."""
    with load(models[name]) as lm, lm.keep_prefixes():
        prompts = [TEXT + [at] * 20 for at in (5, 6, 7, 7)]
        outputs = [lm.generate([prompt], drawn())[0] for prompt in prompts]
        assert fresh(outputs[0]) == 2020
        assert fresh(outputs[1]) < 520
        assert fresh(outputs[2]) == 20
        assert fresh(outputs[3]) <= 20
        count = Count(lm, monkeypatch)
        prompt = [9, *TEXT[:300]]
        votes = lm.generate([prompt], drawn(16))
        assert count.tokens <= len(prompt) + 16 * 4
        steps = [prompt + sample.token_ids[:2] for sample in votes[0].outputs[:4]]
        beams = lm.generate(steps, drawn(2))
        assert all(fresh(o) <= 3 for o in beams)
        assert_as_stock(stocks[name], [*prompts[2:], prompt, *steps], [*outputs[2:], *votes, *beams])
        chat, new, count.tokens = TEXT[:40], 40, 0
        for turn in range(20):
            (answer,) = lm.generate([chat], drawn(1, 8))
            chat = [*chat, *answer.outputs[0].token_ids, *[turn + 3] * 30]
            new += 38
        assert count.tokens <= 1.1 * new
        assert_as_stock(stocks[name], [answer.prompt_token_ids], [answer])
        check_engine(lm.engine)


@pytest.mark.parametrize("name", ["qwen35-dense", "lfm2-dense", "mamba2-dense"])
def test_too_little_memory_or_a_refusal_costs_time_only(
    models: dict[str, Path], stocks: dict[str, LM], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    prompts = [TEXT[:700] + [at] * 20 for at in (5, 6, 6)]
    for room in (0, "1K", 64):
        with load(models[name], cache_ram=room) as lm, lm.keep_prefixes():
            if room == 64:
                monkeypatch.setattr(lm.engine.context, "load_sequence", lambda *_, **__: False)
            outputs = [lm.generate([prompt], drawn())[0] for prompt in prompts]
            assert fresh(outputs[1]) == 720
            assert_as_stock(stocks[name], prompts, outputs)
            check_engine(lm.engine)
            assert (len(lm.engine.kv.snapshots) > 0) == (room == 64)


@pytest.mark.parametrize("held", [True, False])
def test_windows_that_others_reached_into_fork_at_marks(
    models: dict[str, Path], stocks: dict[str, LM], held: bool
) -> None:
    """A cached fork holds the cells there; without it, those that left the window go to who comes next."""
    with load(models["gemma3-dense"], n_ctx=1024) as lm, lm.keep_prefixes():
        kv, prompt = lm.engine.kv, TEXT[:400]
        lm.generate([[50] * 100], drawn())
        before = list(kv._cached.values())
        lm.generate([prompt], drawn(1, 80))
        fork, text = list(kv._cached.values())[len(before) :]
        assert (len(fork), len(text)) == (399, 479)
        for seq in before if held else [*before, fork]:
            kv.close(seq)
        lm.generate([[51] * 500], drawn())
        assert lm.engine.context.first(text.id) > 399 - 32
        again = lm.generate([prompt], drawn())
        assert fresh(again[0]) == (1 if held else 400)
        assert_as_stock(stocks["gemma3-dense"], [prompt], again)


def test_a_cancelled_prompt_leaves_nothing(models: dict[str, Path]) -> None:
    with load(models["qwen35-dense"], n_seq_max=1) as lm, lm.keep_prefixes():
        engine = lm.engine
        for steps in range(1, 5):
            request = make_request(engine.context, "", TEXT, drawn(), Progress())
            engine.submit(request)
            for _ in range(steps):
                engine.step()
            assert len(engine.kv.snapshots) == min(steps, 4)
            engine.cancel(request)
            check_engine(engine)
            assert len(engine.kv.snapshots) == engine.kv.snapshots.bytes == 0


def test_the_bytes_of_a_snapshot_are_told_and_bounded(models: dict[str, Path]) -> None:
    with load(models["mamba2-dense"]) as lm:
        size = lm.snapshot_bytes()
        check_engine(lm.engine)
        assert lm.engine.context.sequence_bytes(0, partial=True) < size
    with load(models["gemma3-dense"]) as lm:
        assert lm.snapshot_bytes() == 0
    with load(models["mamba2-dense"], cache_ram=f"{2 * size // 1024 + 1}K") as lm, lm.keep_prefixes():
        lm.generate([TEXT], drawn())
        assert size <= lm.engine.kv.snapshots.bytes <= lm.info.cache_ram
    for wrong in (-1, "much", True):
        with pytest.raises(TilebeamError, match="cache_ram must be MiB"):
            load(models["mamba2-dense"], cache_ram=wrong)


def test_windows_get_cells_by_memory_and_as_asked(
    models: dict[str, Path], stocks: dict[str, LM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells for windows alone hold fewer places to go on from, never another text."""
    path = models["gemma3-dense"]
    size = {"n_ctx": 4096, "n_batch": 128}
    with load(path, **size) as lm:
        assert (lm.info.window, lm.info.window_cells) == (32, 4096)
    with load(path, swa_full=False, n_ctx=256) as lm:
        assert lm.info.window_cells == 256  # fewer would not hold the windows
    monkeypatch.setattr(memory_check, "usable_memory", lambda: SimpleNamespace(with_swap=1 << 20))
    monkeypatch.setattr(memory_check, "check", lambda *_, **__: 0)
    loaded, real = list[LM](), loader.load

    def noted(*args: Any, **options: Any) -> LM:
        loaded.append(real(*args, **options))
        return loaded[-1]

    monkeypatch.setattr(loader, "load", noted)
    with load(path, **size, swa_full=True, lookup=None, draft=path) as lm:
        assert [lm.info.window_cells, loaded[0].info.window_cells] == [4096, 4096]
    with load(path, **size) as lm, lm.keep_prefixes():
        assert lm.info.window_cells == 1280  # 33 texts and a batch
        prompts = [TEXT[:1500] + [at] * 20 for at in (5, 6, 6)] + [[9, *TEXT[:300]]]
        outputs = [lm.generate([prompt], drawn(n, 40))[0] for prompt, n in zip(prompts, (1, 1, 1, 16), strict=True)]
        assert fresh(outputs[0]) == 1520
        steps = [prompts[3] + sample.token_ids[:20] for sample in outputs[3].outputs[:6]]
        beams = lm.generate(steps, drawn(2, 40))
        # Behind 1,500 tokens other batches of the same text differ by so much on the stock backend alone.
        assert_as_stock(stocks["gemma3-dense"], [*prompts, *steps], [*outputs, *beams], 3 * LIMIT)
        [found] = lm.loglikelihood(TEXT[:1200], [[5, 6, 7]])
        [wanted] = stocks["gemma3-dense"].loglikelihood(TEXT[:1200], [[5, 6, 7]])
        np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=LIMIT)
        check_engine(lm.engine)
    # Texts that share more than the cells of the windows have none that is taken again.
    with load(path, **size) as lm:
        [output] = lm.generate([TEXT[:1500]], drawn(4, 8))
        assert_as_stock(stocks["gemma3-dense"], [TEXT[:1500]], [output], 3 * LIMIT)
        several = [[5, 6, 7], [8, 9], [10]]
        wanted = stocks["gemma3-dense"].loglikelihood(TEXT[:1500], several)
        for found, want in zip(lm.loglikelihood(TEXT[:1500], several), wanted, strict=True):
            np.testing.assert_allclose(found.logprobs, want.logprobs, atol=3 * LIMIT)
        check_engine(lm.engine)
    for wrong in ("yes", 0):
        with pytest.raises(TilebeamError, match="swa_full must be True, False or None"):
            load(path, swa_full=wrong)
