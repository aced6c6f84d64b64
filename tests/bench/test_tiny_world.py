"""The tiny world: its checker by definition, its models against PyTorch's logits, and what search makes of them.

The models were trained by `python -m bench.tiny`; nothing here needs PyTorch but the tests that say so.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tilebeam
from hypothesis import given, settings
from hypothesis import strategies as st
from tilebeam import LM, BeamSearch, BestOfN, SamplingParams, SelfConsistency, TokenReward
from tiny_kit import F32, arithmetic, references, stored

from bench import tiny_world

MODELS, PRM, SIZES, TEXTS = references.MODELS, references.PRM, references.REASONERS, references.TEXTS
FILES = sorted(p.stem for p in MODELS.glob("*.gguf"))
DEVICES = ("cpu", "npu")


# --- the exact checker ------------------------------------------------------------------------------------------------


def worth(line: str) -> int:
    """Python's own opinion of an expression."""
    return int(eval(compile(ast.parse(line, mode="eval"), "line", "eval"), {"__builtins__": {}}))


NUMBERS = st.integers(0, 29)
EXPRESSIONS = st.builds(
    lambda first, rest: str(first) + "".join(op + str(n) for op, n in rest),
    st.integers(-29, 29),
    st.lists(st.tuples(st.sampled_from("+-*"), NUMBERS), min_size=1, max_size=5),
)


def legal_reductions(line: str) -> set[str]:
    """By brute force: which operation may go first is found by putting it into parentheses and trying the expression's
    form on other numbers; only what never changes the value keeps it by right and not by chance."""
    numbers = re.findall(r"(?:^-)?\d+", line)
    operations = re.findall(r"(?<=\d)[-+*]", line)
    rng = random.Random(line)
    found = set()
    for i in range(len(operations)):
        keeps = True
        for _ in range(20):
            values = [f"({rng.randint(-50, 50)})" for _ in numbers]
            plain = "".join(v + op for v, op in zip(values, [*operations, ""], strict=True))
            values[i], values[i + 1] = "(" + values[i], values[i + 1] + ")"
            grouped = "".join(v + op for v, op in zip(values, [*operations, ""], strict=True))
            keeps = keeps and worth(plain) == worth(grouped)
        result = worth(f"({numbers[i]}){operations[i]}({numbers[i + 1]})")
        if keeps and abs(result) <= arithmetic.LARGEST and (i == 0 or result >= 0):
            parts = [*numbers[:i], str(result), *numbers[i + 2 :]]
            found.add("".join(p + op for p, op in zip(parts, [*operations[:i], *operations[i + 1 :], ""], strict=True)))
    return found


@settings(deadline=None)
@given(EXPRESSIONS)
def test_value_and_successors_are_those_of_arithmetic(line: str) -> None:
    assert arithmetic.value(line) == worth(line)
    assert set(arithmetic.successors(line)) == legal_reductions(line)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["train", "validation", "test"]))
def test_solutions_are_right_and_expressions_stay_in_their_set(seed: int, split: Any) -> None:
    problem = arithmetic.draw(random.Random(seed), split)
    lines = arithmetic.solution(problem)
    assert lines is not None
    assert arithmetic.split_of(problem) == split
    assert arithmetic.check_lines(problem, lines) == [True] * len(lines)
    assert arithmetic.is_right(problem, "\n".join(lines) + "\n")
    assert int(lines[-1]) == worth(problem)


@given(st.text("0123456789+-*\n? x", max_size=20))
def test_nonsense_is_no_expression(text: str) -> None:
    if not re.fullmatch(r"-?\d{1,3}([-+*]\d{1,3})*", text):
        assert arithmetic.value(text) is None
        assert arithmetic.successors(text) == []
        assert arithmetic.check_lines(text, [text]) == [False]
    assert arithmetic.check_lines("1+2*3", ["7"]) == [False]  # right, but two operations


# --- the files --------------------------------------------------------------------------------------------------------


def logits(path: Path, device: str, text: str) -> F32:
    with tilebeam.load(path, device, n_ctx=256, n_seq_max=1, threads=1) as lm:
        tokens = lm.tokenize(text)
        return lm.read([tokens], [range(len(tokens))])[0].logits


def divergence(reference: F32, got: F32) -> F32:
    """KL divergence at every position, in nats."""
    p, q = (x - np.logaddexp.reduce(x.astype(np.float64), 1, keepdims=True) for x in (reference, got))
    return np.asarray((np.exp(p) * (p - q)).sum(1), np.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("file", FILES)
def test_logits_are_those_of_pytorch(file: str, device: str) -> None:
    name, kind = file.rsplit("-", 1)
    most = {"f16": 1e-3, "q8_0": 1e-2, "q4_0": 1.0}[kind]
    for text, reference in zip(TEXTS, stored(name), strict=True):
        got = logits(MODELS / f"{file}.gguf", device, references.as_read(name, text))
        assert got.shape == reference.shape
        assert divergence(reference, got).mean() < most


# --- what the models do -----------------------------------------------------------------------------------------------

PROBLEMS = arithmetic.draw_many(11, "test", 40)
SAMPLING = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, max_tokens=96, seed=5)


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reasoner(device: str) -> Iterator[LM]:
    with tilebeam.load(references.file_of("0.5m", "q8_0"), device, n_ctx=4096, n_seq_max=32, threads=1) as lm:
        yield lm


@pytest.fixture(scope="module")
def reward(device: str) -> Iterator[TokenReward]:
    with tilebeam.load(references.file_of(PRM, "q8_0"), device, n_ctx=4096, n_seq_max=32, threads=1) as lm:
        yield TokenReward(lm, tag=references.TAG, good=references.GOOD, bad=references.BAD)


def test_reward_model_rates_right_lines_above_wrong_ones(reasoner: LM, reward: TokenReward) -> None:
    """Over all lines that the reasoner sampled."""
    outputs = reasoner.generate([p + "\n" for p in PROBLEMS], SAMPLING)
    solutions = [o.outputs[0].text.splitlines() for o in outputs]
    good = np.array([v for p, s in zip(PROBLEMS, solutions, strict=True) for v in arithmetic.check_lines(p, s)])
    steps = [[line + "\n" for line in s] for s in solutions]
    scores = np.array([s for part in reward.score_steps([p + "\n" for p in PROBLEMS], steps) for s in part])
    assert (scores[good][:, None] > scores[~good]).mean() > 0.8  # AUC


def test_votes_beat_single_samples(reasoner: LM) -> None:
    results = SelfConsistency(arithmetic.answer).run(reasoner, [p + "\n" for p in PROBLEMS], 16, sampling=SAMPLING)
    single = np.mean([arithmetic.is_right(r.prompt.strip(), c.text) for r in results for c in r.candidates])
    voted = np.mean([arithmetic.is_right(r.prompt.strip(), r.best.text) for r in results])
    assert voted - single > 0.05


@pytest.mark.parametrize("method", ["best-of-8", "beam-16"])
def test_search_with_the_reward_model_beats_single_samples(reasoner: LM, reward: TokenReward, method: str) -> None:
    prompts = [p + "\n" for p in PROBLEMS]
    outputs = reasoner.generate(prompts, replace(SAMPLING, n=8))
    single = np.mean(
        [arithmetic.is_right(p, c.text) for p, o in zip(PROBLEMS, outputs, strict=True) for c in o.outputs]
    )
    assert 0.35 < single < 0.6
    if method == "beam-16":
        results: list[Any] = list(BeamSearch(reward, beam_width=4).run(reasoner, prompts, 16, sampling=SAMPLING))
    else:
        results = list(BestOfN(reward).run(reasoner, prompts, 8, sampling=SAMPLING))
    found = np.mean([arithmetic.is_right(p, r.best.text) for p, r in zip(PROBLEMS, results, strict=True)])
    assert found >= single + 0.1


def test_budgets_of_thoughts_are_measured_into_a_document(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("# Page\n\n<!-- thoughts: begin -->\n<!-- thoughts: end -->\n")
    rows = tiny_world.thoughts(12, 1, (0, 96))
    assert [row["budget"] for row in rows] == [0, 96]
    assert all(rows[0][way] < rows[1][way] for way in ("tokens", *tiny_world.WAYS))
    tiny_world.thoughts_into(rows, 12, document)
    assert f"| 96 | {rows[1]['tokens']:.1f} | {100 * rows[1]['one answer']:.1f} | " in document.read_text()
    assert (tmp_path / "tiny-world-thoughts.png").stat().st_size > 1000


# --- with PyTorch -----------------------------------------------------------------------------------------------------


@pytest.fixture
def torch() -> Iterator[Any]:
    """PyTorch on one thread: its threads spin, and crawl where others want the CPUs too."""
    module = pytest.importorskip("torch", reason="PyTorch is not installed (pip install tilebeam[train])")
    threads = module.get_num_threads()
    module.set_num_threads(1)
    yield module
    module.set_num_threads(threads)


FORMS: dict[str, dict[str, Any]] = {
    "llama": {},
    "lfm2": {"family": "lfm2", "attends": (1,)},
    "qwen3moe": {"family": "qwen3moe", "experts": 4, "experts_used": 2},
}


@pytest.mark.parametrize("form", FORMS)
def test_training_learns_exports_and_loads(torch: Any, tmp_path: Path, form: str) -> None:
    """A few steps of a small model: the loss falls, and the file's logits are PyTorch's, for every kind of file."""
    from bench.tiny import learning, train
    from bench.tiny.export import export, reference_logits
    from bench.tiny.families import Shape
    from bench.tiny.model import TinyLlama, deeper, load_checkpoint, sample, save

    torch.manual_seed(0)
    module = TinyLlama(Shape(32, 2, 1, 64, **FORMS[form]))
    examples = [train.example(p) for p in arithmetic.draw_many(0, "train", 64)]
    losses: list[float] = []

    def report(_: int, facts: str) -> bool:
        losses.append(float(facts.split("loss ")[1].split(",")[0]))
        return False

    learning.learn(module, examples, learning.Recipe(tokens=25_000, batch=16, warmup=5), 0, report, every=10)
    assert losses[-1] < losses[0] - 1
    save(module, tmp_path / "m.pt")
    module = load_checkpoint(tmp_path / "m.pt")
    texts = sample(module, PROBLEMS[:3], 1.0, torch.Generator().manual_seed(1))
    assert texts == sample(module, PROBLEMS[:3], 1.0, torch.Generator().manual_seed(1))
    if form == "llama":
        assert np.array_equal(reference_logits(deeper(module, 2), TEXTS[0]), reference_logits(module, TEXTS[0]))
    for kind, most in (("f16", 1e-3), ("q8_0", 1e-2), ("q4_0", 0.5)):
        export(module, tmp_path / "m.gguf", kind, "m", "a test")
        got = logits(tmp_path / "m.gguf", "cpu", TEXTS[0])
        assert divergence(reference_logits(module, TEXTS[0]), got).mean() < most
