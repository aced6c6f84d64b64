"""Train a reasoner: `python -m bench.tiny.train 0.5m build/tiny/0.5m.pt` (from the repository's root).

All sizes learn from the same expressions in the same order. Pass@1 on validation expressions, sampled at temperature
1, is printed every 100 steps.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch

from bench.lib.metadata import BOS, EOS

from . import arithmetic
from .learning import IGNORED, Example, Recipe, learn
from .model import SHAPES, TinyLlama, encode, sample, save

SEED = 1
N_EXPRESSIONS = 120_000
RECIPE = Recipe(tokens=3e6)
# Where they stop: the middle one solves 45 % of the validation expressions then, so that search has room. The smallest
# goes on to 30 %: from the 22 % that it has after as many steps it would never come near the others. The largest, which
# learns most from every line, stops at 64 %: after as many steps as the middle one it solves 75 %, after 1300 98 %.
STEPS = {"0.1m": 1100, "0.5m": 800, "3.1m": 700}
_EVERY = 100


def example(problem: str) -> Example:
    """Encode a problem and its solution; only the solution is learned."""
    prompt = [BOS, *encode(problem + "\n")]
    work = [*encode("\n".join(arithmetic.solution(problem) or []) + "\n"), EOS]
    return [*prompt, *work[:-1]], [IGNORED] * (len(prompt) - 1) + work


def pass_at_1(model: TinyLlama, problems: list[str], seed: int) -> float:
    """Share of problems that one sample each gets right."""
    texts = sample(model, problems, 1.0, torch.Generator().manual_seed(seed))
    return sum(map(arithmetic.is_right, problems, texts)) / len(problems)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    model = TinyLlama(SHAPES[options.size])
    start = time.monotonic()
    examples = [example(p) for p in arithmetic.draw_many(SEED, "train", N_EXPRESSIONS)]
    random.Random(SEED).shuffle(examples)
    tokens = sum(len(ids) for ids, _ in examples)
    print(
        f"{options.size}: {model.n_params} parameters; {tokens / 1e6:.1f}M tokens in {len(examples)} examples, "
        f"drawn in {time.monotonic() - start:.0f} s",
        flush=True,
    )
    validation = arithmetic.draw_many(SEED, "validation", 300)

    def report(step: int, facts: str) -> bool:
        solved = pass_at_1(model, validation, SEED)
        save(model, options.out)
        print(f"{facts}, pass@1 {solved:.3f}", flush=True)
        return step >= STEPS[options.size]

    learn(model, examples, RECIPE, SEED, report, _EVERY)


if __name__ == "__main__":
    main()
