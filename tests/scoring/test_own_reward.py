"""A reward head on the generator's own hidden states: its scores are those of the states read afterwards, in every kind
of search, and nothing is decoded for them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine_kit
import numpy as np
import pytest
import tilebeam
from cli_kit import Ran, ok
from tilebeam import LM, OwnReward, Rating, SamplingParams, SearchResult, StepScorer, TilebeamError
from tilebeam.scoring.load_reward import RewardSpec
from tilebeam.scoring.own_reward import _plain, layer_for, maker_of
from tilebeam.scoring.reward_heads import Head, load_head, save_head
from tilebeam.search import algorithms as methods
from tilebeam.text_state import Confidence, TextState, width

from bench.lib.synth import preset, write_model

FEATURES = ("mean", "recent", "last", "length", "confidence")
PARAMS = SamplingParams(max_tokens=24, seed=3, temperature=1.5)
PROMPT = "the question is how many times the number of the people"
STEP = "7"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("models") / "qwen2.gguf"
    write_model(file, preset("tiny", arch="qwen2", type="f32", n_layer=2))
    return file


@pytest.fixture(scope="module", params=[None, 0], ids=["behind the norm", "behind a layer"])
def lm(path: Path, request: pytest.FixtureRequest) -> Iterator[LM]:
    options = {"n_ctx": 2048, "n_seq_max": 8, "threads": 1, "hidden_layer": request.param, **engine_kit.EXACT}
    with tilebeam.load(path, "cpu", lookup=False, **options) as model:
        yield model


def head_of(lm: LM, features: Any = FEATURES, hidden: int = 5) -> Head:
    """A random head."""
    rng = np.random.default_rng(5)
    n = width(features, lm.n_embd)
    weights = [rng.normal(0, n**-0.5, (hidden, n)), rng.normal(0, 1, (1, hidden))]
    layers = tuple((w.astype(np.float32), np.zeros(len(w), np.float32)) for w in weights)
    return Head(layers, features=features, layer=lm.info.hidden_layer, maker=maker_of(lm))


def by_hand(lm: LM, head: Head, prompt: list[int], tokens: list[int]) -> float:
    """The score of a text by its hidden states, read afterwards, and what `LM.logits` says of it."""
    state = engine_kit.empty_state(lm.n_embd)
    logits = lm.logits(prompt + tokens)[len(prompt) - 1 : -1].astype(np.float64)
    for row, token in zip(logits, tokens, strict=True):
        x = float(row[token] - np.logaddexp.reduce(row))
        drawn = Confidence(1, x, x * x, x, x, token == lm.eos)
        state = state.then(replace(engine_kit.empty_state(lm.n_embd), confidence=drawn))
    for row in engine_kit.states_behind(lm, prompt + tokens)[len(prompt) : -1]:
        state = state.then(TextState(1, row, row, row))
    return float(head(state.features(head.features)[None])[0])


class Decoded:
    """Batches of a model and the tokens in them."""

    def __init__(self, lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts = [0, 0]
        real = lm.engine.context.decode

        def decode(n: int) -> int:
            self.counts[0] += 1
            self.counts[1] += n
            return real(n)

        monkeypatch.setattr(lm.engine.context, "decode", decode)

    def of(self, work: Any) -> tuple[Any, list[int]]:
        before = list(self.counts)
        return work(), [a - b for a, b in zip(self.counts, before, strict=True)]


class _Noted(OwnReward):
    """Keeps what it says, call by call."""

    said: list[list[Rating]]

    def rate_states(self, solutions: Sequence[Sequence[TextState]]) -> list[Rating]:
        self.said = [*getattr(self, "said", []), super().rate_states(solutions)]
        return self.said[-1]


class _Repeated(StepScorer):
    """Says again what another scorer said, and wants nothing of samples."""

    def __init__(self, said: list[list[Rating]]) -> None:
        super().__init__(step_stop=STEP)
        self._said = iter(said)

    def score_steps(self, prompts: Sequence[Any], solutions: Sequence[Sequence[str]]) -> list[list[float]]:  # noqa: ARG002
        return [rating.scores for rating in next(self._said)]


def search(lm: LM, name: str, scorer: StepScorer, n: int = 2) -> list[SearchResult]:
    options: dict[str, Any] = {"max_steps": 4, "step_stop": STEP, "max_step_tokens": 6, "beam_width": 2}
    prompts = [PROMPT, PROMPT + " and the other"][:n]
    return methods.create(name, scorer=scorer, **options).run(lm, prompts, 4, sampling=PARAMS)


@pytest.mark.parametrize("name", ["beam", "dvts"])
@pytest.mark.parametrize("aggregate", ["last", "min"])
def test_searches_by_steps(lm: LM, name: str, aggregate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step's score is that of the text up to there; a search that is told the same scores decodes as much."""
    head = head_of(lm)
    decoded = Decoded(lm, monkeypatch)
    for n in (1, 2):
        scorer = _Noted(lm, head, aggregate=aggregate, step_stop=STEP)
        results, own = decoded.of(lambda: search(lm, name, scorer, n))  # noqa: B023
        if aggregate == "last":
            replayed, told = decoded.of(lambda: search(lm, name, _Repeated(scorer.said), n))  # noqa: B023
            assert [r.best.text for r in replayed] == [r.best.text for r in results]
            # A prompt that comes while others decode takes turns with them.
            assert own[0] - told[0] in range(n)
            assert own[1] == told[1]
    rated = 0
    for result in results:
        assert (result.usage.scored_tokens, result.usage.full_scoring_tokens) == (0, 0)
        prompt = lm.tokenize(result.prompt)
        for candidate, total, trajectory in zip(result.candidates, result.scores, result.trajectories, strict=True):
            assert math.isclose(trajectory.scores[-1], by_hand(lm, head, prompt, candidate.token_ids), abs_tol=1e-3)
            assert total == (trajectory.scores[-1] if aggregate == "last" else min(trajectory.scores))
            rated += len(trajectory.steps) > 1
    assert rated


@pytest.mark.parametrize("aggregate", ["last", "mean"])
def test_searches_over_whole_candidates(lm: LM, aggregate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    head = head_of(lm)
    decoded = Decoded(lm, monkeypatch)
    scorer = OwnReward(lm, head, aggregate=aggregate, step_stop=STEP)
    best, own = decoded.of(lambda: tilebeam.BestOfN(scorer).infer(lm, PROMPT, 6, sampling=PARAMS))
    _, plain = decoded.of(lambda: lm.generate([PROMPT], replace(PARAMS, n=6)))
    assert own == plain
    assert best.usage.scored_tokens == 0
    assert best.scores[best.best_index] == max(best.scores)
    prompt = lm.tokenize(PROMPT)
    for candidate, score in zip(best.candidates, best.scores, strict=True):
        tokens, ends = candidate.token_ids, [len(candidate.token_ids)]
        if aggregate == "mean":
            pieces = [lm.piece(t) for t in tokens[:-1]]
            # A step that the first token ends has no hidden state yet.
            ends = [i + 1 for i, p in enumerate(pieces) if i and STEP.encode() in p] + ends
        wanted = np.mean([by_hand(lm, head, prompt, tokens[:end]) for end in ends])
        assert math.isclose(score, wanted, abs_tol=1e-3)
    vote = tilebeam.SelfConsistency(lambda text: text[-1:], weighting="reward", scorer=scorer)
    assert vote.infer(lm, PROMPT, 6, sampling=PARAMS).scores == pytest.approx(best.scores, abs=1e-4)


def test_heads_of_other_models_are_refused(lm: LM) -> None:
    head = head_of(lm)
    for maker in ({"name": "another model"}, {"shape": "3 layers, 64 elements, 512 tokens"}):
        with pytest.raises(TilebeamError, match="made for another model"):
            OwnReward(lm, replace(head, maker=head.maker | maker))
    OwnReward(lm, replace(head, maker=head.maker | {"name": lm.metadata["general.name"].upper() + "_"}))
    OwnReward(lm, replace(head, maker={}))
    of = "Qwen2.5 Coder 0.5B Instruct"
    assert _plain(of) == _plain("qwen2.5-coder-0.5b-instruct-q4_k_m") == _plain(of + " GGUF") == _plain(of + "_IQ4_XS")
    assert _plain(of) not in map(
        _plain, ("Qwen2.5 Coder 0.5B", "Qwen3 Coder 0.5B Instruct", "Qwen2.5 Coder 1.5B Instruct")
    )
    narrow = Head(((np.zeros((1, 7), np.float32), np.zeros(1, np.float32)),), features=("last",))
    with pytest.raises(TilebeamError, match="made for another model"):
        OwnReward(lm, narrow)


def test_heads_of_other_layers_are_refused(lm: LM, tmp_path: Path) -> None:
    """In one sentence that says how to load the model; a head that reads no hidden states fits any."""
    other = 1 if lm.info.hidden_layer == 0 else 0
    with pytest.raises(TilebeamError, match=f"load it with hidden_layer={other}"):
        OwnReward(lm, replace(head_of(lm), layer=other))
    OwnReward(lm, replace(head_of(lm, ("length", "confidence")), layer=other))
    deep = replace(head_of(lm), layer=40)
    assert layer_for(lm.info.path, [deep]) == 40
    assert layer_for(lm.info.path, [replace(deep, maker=deep.maker | {"shape": "another"})]) == 40
    wrong = replace(deep, maker=deep.maker | {"name": "another model"})
    assert layer_for(lm.info.path, [wrong]) is None  # and what is loaded then refuses the head
    save_head(tmp_path / "h.gguf", replace(head_of(lm), layer=7))
    content = (tmp_path / "h.gguf").read_bytes()
    (tmp_path / "h.gguf").write_bytes(content.replace(b"layer 7", b"level 7"))
    with pytest.raises(TilebeamError, match="hidden states of level 7"):
        load_head(tmp_path / "h.gguf")


def test_several_models_have_a_head_each(path: Path, lm: LM, tmp_path: Path) -> None:
    """An evaluation of two models finds the head that was made for each, in whatever order the files are given."""
    small = tmp_path / "small.gguf"
    write_model(small, preset("tiny", arch="qwen2", type="f32", n_layer=1))
    heads = tmp_path / "h1.gguf", tmp_path / "h2.gguf"
    with tilebeam.load(small, "cpu", n_ctx=256, threads=1, lookup=False) as other:
        save_head(heads[0], head_of(other))
        save_head(heads[1], head_of(lm))
        spec = RewardSpec(None, head=heads)
        assert spec.open(lm).head.maker == maker_of(lm)
        assert spec.open(other).head.maker == maker_of(other)
        with pytest.raises(TilebeamError, match="made for another model"):
            RewardSpec(None, head=(heads[1], heads[1])).open(other)
    with pytest.raises(TilebeamError, match="one head"):
        RewardSpec(path, head=heads, kind="value-head").check()
    (tmp_path / "items.jsonl").write_text('{"prompt": "the cat", "answer": "1"}\n')
    work = ["eval", "-m", path, "-m", f"other={small}", "--task", f"jsonl:{tmp_path}/items.jsonl", "--budget", 2]
    work += ["--method", "best-of-n", "--seeds", 1, "-n", 6, "--device", "cpu", "-t", 1, "--json"]
    reports = []
    for order in (heads, heads[::-1]):
        flags = [part for head in order for part in ("--reward-head", head)]
        # the second time it is the same evaluation
        reports.append(json.loads(ok(*work, *flags, "--out", tmp_path / "eval").out))
    assert reports[0] == reports[1]
    assert {r["model"] for r in reports[0]["accuracy"] if r["series"] == "best-of-n[head]"} == {"qwen2", "other"}


def test_heads_in_the_wrong_place_are_refused(lm: LM, tmp_path: Path) -> None:
    """A head for single positions is no head for whole texts, and the other way round."""
    own, other = head_of(lm), Head(((np.zeros((1, lm.n_embd), np.float32), np.zeros(1, np.float32)),))
    with pytest.raises(TilebeamError, match="single positions"):
        OwnReward(lm, other)
    save_head(tmp_path / "other.gguf", other)
    with pytest.raises(TilebeamError, match="single positions"):
        RewardSpec(None, head=tmp_path / "other.gguf").check()
    with pytest.raises(TilebeamError, match="without --prm"):
        tilebeam.HeadReward(lm, own)
    with pytest.raises(TilebeamError, match="not given texts"):
        OwnReward(lm, own).rate_text("a", "b")
    with pytest.raises(TilebeamError, match="hidden=True"):
        OwnReward(lm, own).score(PROMPT, lm.generate([PROMPT], PARAMS)[0].outputs)
    with pytest.raises(TilebeamError, match="has 3 inputs"):
        Head(((np.zeros((1, 3), np.float32), np.zeros(1, np.float32)),), features=("last", "mean"))
    with pytest.raises(TilebeamError, match="does not know"):
        Head(((np.zeros((1, 3), np.float32), np.zeros(1, np.float32)),), features=("first",))  # type: ignore[arg-type]


def test_from_the_shell(path: Path, lm: LM, tmp_path: Path) -> None:
    """--reward-head alone: votes, beams and evaluations."""
    head = tmp_path / "h.gguf"
    save_head(head, head_of(lm))
    (tmp_path / "items.jsonl").write_text('{"prompt": "the cat", "answer": "1"}\n{"prompt": "a dog", "answer": "2"}\n')
    flags = ["-m", path, "--device", "cpu", "-t", 1, "--json", "-n", 12]
    model = ["-p", "the cat", "-N", 4, "--seed", 3, "--reward-head", head]
    methods_ = "best-of-n,vote,beam:beam_width=2,max_steps=2"
    work = ["--task", f"jsonl:{tmp_path}/items.jsonl", "--method", methods_, "--budget", 2, "--seeds", 1]
    for command in (
        ["best-of-n", *model],
        ["vote", *model, "--extract", "text"],
        ["beam", *model, "--max-steps", 2, "--step-stop", "7", "--beam-width", 2],
        ["eval", *work, "--reward-head", head, "--out", tmp_path / "eval"],
    ):
        found = ok(*command[:1], *flags, *command[1:]).out
        report = json.loads(found)
        assert "best-of-n[head]" in found if command[0] == "eval" else report["usage"]["scored_tokens"] == 0
    two = ["eval", "-m", path, "-m", f"other={path}", *work, "--reward-head", head, "--out", tmp_path / "two"]
    refused = Ran(*two)
    assert refused.code == 1
    assert "for one model" in refused.err


def test_behind_the_server(path: Path, lm: LM, tmp_path: Path) -> None:
    """Requests that search with the reward model get the head."""
    pytest.importorskip("fastapi")
    from tilebeam.server.requests import Search
    from tilebeam.server.searches import algorithm_of
    from tilebeam.server.served_model import ServedModel

    save_head(tmp_path / "h.gguf", head_of(lm))
    load = {"device": "cpu", "threads": 1, "n_ctx": 1024, "n_seq_max": 4}
    loaded = ServedModel(("m",), str(path), load, RewardSpec(None, head=tmp_path / "h.gguf"), STEP).open()
    with loaded.resources:
        asked = Search(method="beam", scorer="reward", budget=4, beam_width=2, max_steps=2, step_stop=STEP)
        [result] = algorithm_of(asked, loaded.lm, loaded.scorer).run(loaded.lm, [PROMPT], 4, sampling=PARAMS)
        assert result.usage.scored_tokens == 0
        assert all(0 < score < 1 for score in result.scores)
        assert loaded.failure is None
