"""Train the process reward model: `python -m bench.tiny.reward build/tiny/prm.pt build/tiny/0.1m.pt ..`.

It begins as one of the reasoners (the first checkpoint named `--start`), reads solutions that all of them sampled for
training expressions, and learns to expect "+" behind the tag at the end of every line that the exact checker calls
right, "-" behind the others: the kind of reward model that `tilebeam.TokenReward` reads.

    problem newline, line newline ?, line newline ?, ..
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from . import arithmetic
from .learning import IGNORED, Example, Recipe, learn
from .model import BOS, TinyLlama, encode, load_checkpoint, sample, save
from .references import BAD, GOOD, TAG
from .train import SEED

_TAG, _GOOD, _BAD = encode(TAG + GOOD + BAD)
RECIPE = Recipe(tokens=1.2e6, rate=2e-3)
N_TRAIN, N_TEST = 4_000, 300  # expressions; each is sampled `DRAWS` times by every reasoner
DRAWS = 3

Labelled = tuple[str, str, list[bool]]  # problem, solution, and of every line whether it is right


def labelled(models: Sequence[TinyLlama], split: arithmetic.Split, count: int, draws: int) -> list[Labelled]:
    """Sampled solutions of a set's expressions, all different, with the exact checker's verdicts."""
    problems = arithmetic.draw_many(SEED + 1, split, count)
    found: dict[tuple[str, str], None] = {}
    for i, model in enumerate(models):
        for draw in range(draws):
            seed = torch.Generator().manual_seed(1000 * i + draw)
            found.update(dict.fromkeys(zip(problems, sample(model, problems, 1.0, seed), strict=True)))
    return [(p, text, arithmetic.check_lines(p, lines_of(text))) for p, text in found if text.strip("\n")]


def lines_of(text: str) -> list[str]:
    """The lines of a solution; a newline at its end ends the last one."""
    return text.removesuffix("\n").split("\n")


def example(problem: str, text: str, verdicts: Sequence[bool]) -> Example:
    """What the reward model reads; only the labels are learned."""
    ids = [BOS, *encode(problem + "\n")]
    targets = [IGNORED] * len(ids)
    steps = [line + "\n" for line in lines_of(text)]
    if not text.endswith("\n"):
        steps[-1] = steps[-1].removesuffix("\n")
    for step, good in zip(steps, verdicts, strict=True):
        ids += [*encode(step), _TAG]
        targets += [IGNORED] * len(step) + [_GOOD if good else _BAD]
    return ids, targets


@torch.no_grad()
def step_scores(model: TinyLlama, examples: Sequence[Example]) -> tuple[list[float], list[bool]]:
    """P(good) / (P(good) + P(bad)) of every labelled step, and the labels."""
    was_training = model.training
    model.eval()
    scores: list[float] = []
    labels: list[bool] = []
    for ids, targets in examples:
        logits = model(torch.tensor([ids]))[0]
        margin = logits[:, _GOOD] - logits[:, _BAD]
        for at, target in enumerate(targets):
            if target != IGNORED:
                scores.append(float(margin[at].sigmoid()))
                labels.append(target == _GOOD)
    model.train(was_training)
    return scores, labels


def accuracy(scores: Sequence[float], labels: Sequence[bool]) -> float:
    """Share of steps on whose side of one half the label lies."""
    return sum((s > 0.5) == good for s, good in zip(scores, labels, strict=True)) / len(scores)


def auc(scores: Sequence[float], labels: Sequence[bool]) -> float:
    """Probability that a right step is rated above a wrong one (area under the ROC curve); ties count half."""
    order = sorted(range(len(scores)), key=lambda i: scores[i])
    ranks = [0.0] * len(order)
    at = 0
    while at < len(order):
        end = at
        while end < len(order) and scores[order[end]] == scores[order[at]]:
            end += 1
        for i in order[at:end]:
            ranks[i] = (at + 1 + end) / 2
        at = end
    good = sum(labels)
    above = sum(r for r, label in zip(ranks, labels, strict=True) if label) - good * (good + 1) / 2
    return above / (good * (len(labels) - good))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("reasoners", type=Path, nargs="+")
    parser.add_argument("--start", type=Path, required=True, help="the checkpoint that the reward model begins as")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    reasoners = [load_checkpoint(path) for path in options.reasoners]
    train = [example(*s) for s in labelled(reasoners, "train", N_TRAIN, DRAWS)]
    random.Random(SEED).shuffle(train)
    tests = [[example(*s) for s in labelled([m], "test", N_TEST, 1)] for m in reasoners]
    labels = [t for _, targets in train for t in targets if t != IGNORED]
    print(
        f"{sum(len(ids) for ids, _ in train) / 1e6:.2f}M tokens in {len(train)} solutions; "
        f"{labels.count(_GOOD) / len(labels):.1%} of {len(labels)} lines are right",
        flush=True,
    )
    model = load_checkpoint(options.start)

    def report(facts: str) -> bool:
        save(model, options.out)
        parts = []
        for path, test in zip(options.reasoners, tests, strict=True):
            scores, truths = step_scores(model, test)
            share, area = accuracy(scores, truths), auc(scores, truths)
            parts.append(f"{path.stem}: accuracy {share:.3f} (right: {sum(truths) / len(truths):.3f}), AUC {area:.3f}")
        print(f"{facts}; test steps of {'; '.join(parts)}", flush=True)
        return False

    learn(model, train, RECIPE, SEED, report)


if __name__ == "__main__":
    main()
