"""Train a reasoner: `python -m bench.tiny.train 0.5m build/tiny/0.5m.pt` (from the repository's root).

All sizes learn from the same expressions in the same order; `thinker` writes the lines as thoughts, of which it needs
more or fewer, and then the answer. Pass@1 on validation expressions, sampled at temperature 1, is printed every 100
steps; the thinker's without thoughts, too.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path

import torch

from bench.lib.metadata import BOS, EOS

from . import arithmetic
from .learning import IGNORED, Example, Recipe, learn
from .model import SHAPES, TinyLlama, encode, sample, save
from .references import ANSWER, HYBRID, MIXTURE, THINKER, THINKERS_TERMS, asked

SEED = 1
N_EXPRESSIONS = 120_000
RECIPE = Recipe(tokens=3e6)
THINKERS_RECIPE = Recipe(tokens=7e6)
# Where they stop: the middle one solves 45 % of the validation expressions then, so that search has room. The smallest
# goes on to 30 %: from the 22 % that it has after as many steps it would never come near the others. The largest, which
# learns most from every line, stops at 64 %: after as many steps as the middle one it solves 75 %, after 1300 98 %.
# The hybrid and the mixture stop between them, at 55 %; 300 steps later they solve 73 and 80 %.
STEPS = {"0.1m": 1100, "0.5m": 800, "3.1m": 700, HYBRID: 800, MIXTURE: 700}
_EVERY = 100


def example(problem: str) -> Example:
    """Encode a problem and its solution; only the solution is learned."""
    prompt = [BOS, *encode(problem + "\n")]
    work = [*encode("\n".join(arithmetic.solution(problem) or []) + "\n"), EOS]
    return [*prompt, *work[:-1]], [IGNORED] * (len(prompt) - 1) + work


def thought_example(problem: str, rng: random.Random) -> Example:
    """Encode a problem, its solution as thoughts, and the answer. Two of three thoughts are cut somewhere: what is
    learned then is the answer alone, as well as it can be guessed there, never the cut."""
    lines = arithmetic.solution(problem) or []
    prompt, thoughts = [BOS, *encode(asked(problem))], encode("\n".join(lines) + "\n")
    cut = rng.randrange(-len(thoughts) // 2, len(thoughts))
    end = encode(ANSWER)
    if cut >= 0:
        thoughts, end = thoughts[:cut], encode("\n" + ANSWER) if rng.random() < 0.5 else end
    answer = [*encode("\n\n" + lines[-1]), EOS]
    ids = [*prompt, *thoughts, *end, *answer]
    closed = [IGNORED] * len(end) if cut >= 0 else end
    return ids[:-1], [IGNORED] * (len(prompt) - 1) + thoughts + closed + answer


def pass_at_1(model: TinyLlama, problems: list[str], prompts: list[str], seed: int) -> float:
    """Share of problems that one sample each gets right."""
    texts = sample(model, prompts, 1.0, torch.Generator().manual_seed(seed), 200)
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
    thinks = options.size == THINKER
    terms = THINKERS_TERMS if thinks else arithmetic.TERMS
    rng = random.Random(SEED)
    problems = arithmetic.draw_many(SEED, "train", N_EXPRESSIONS, terms)
    examples = [thought_example(p, rng) if thinks else example(p) for p in problems]
    random.Random(SEED).shuffle(examples)
    tokens = sum(len(ids) for ids, _ in examples)
    print(
        f"{options.size}: {model.n_params} parameters; {tokens / 1e6:.1f}M tokens in {len(examples)} examples, "
        f"drawn in {time.monotonic() - start:.0f} s",
        flush=True,
    )
    validation = arithmetic.draw_many(SEED, "validation", 300, terms)
    prompts = {"": [asked(p) if thinks else p + "\n" for p in validation]}
    if thinks:
        prompts[" without thoughts"] = [asked(p) + ANSWER for p in validation]

    def report(step: int, facts: str) -> bool:
        solved = [f"pass@1{how} {pass_at_1(model, validation, texts, SEED):.3f}" for how, texts in prompts.items()]
        save(model, options.out)
        print(f"{facts}, {', '.join(solved)}", flush=True)
        return step >= STEPS.get(options.size, math.inf)

    learn(model, examples, THINKERS_RECIPE if thinks else RECIPE, SEED, report, _EVERY)


if __name__ == "__main__":
    main()
