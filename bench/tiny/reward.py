"""Train the process reward model: `python -m bench.tiny.reward build/tiny/prm.pt build/tiny/0.1m.pt ..`.

It begins as one of the reasoners (`--start`) and reads solutions that all of them sampled for training expressions, and
right ones. It learns to expect "+" behind the tag at the end of every line that the exact checker calls right, "-"
behind the others: the kind of reward model that `tilebeam.TokenReward` reads. Besides it goes on learning to write the
right lines themselves, as a reasoner does; what it expects a line to be is what it judges the line by. `--check` in
place of `--start` trains nothing and says how right a reward model is on the validation lines of the reasoners given.

    problem newline, line newline ?, line newline ?, ..
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tilebeam.evaluation.ranking import auroc

from bench.lib.metadata import BOS, EOS

from . import arithmetic
from .learning import IGNORED, Example, Recipe, learn
from .model import CHARACTERS, FIRST_CHARACTER, N_VOCAB, TinyLlama, deeper, encode, load_checkpoint, sample, save
from .references import BAD, GOOD, TAG
from .train import SEED

_TAG, _GOOD, _BAD, _NEWLINE = encode(TAG + GOOD + BAD + "\n")
_WRONG = FIRST_CHARACTER + len(CHARACTERS)  # a token of its own, <unused0>, for "something is wrong"
RECIPE = Recipe(tokens=2e6)
N_TRAIN, N_TEST = 4_000, 300  # expressions; each is sampled `DRAWS` times by every reasoner
N_SOLVED = 18_000  # expressions with right solutions
EMPHASIS = 4.0  # weight of "+" and "-" as targets
DRAWS = 3

Labelled = tuple[str, str, list[bool]]  # problem, solution, and of every line whether it is right


def labelled(models: Sequence[TinyLlama], split: arithmetic.Split, count: int, draws: int) -> list[Labelled]:
    """Sample solutions of a set's expressions, all different, with the exact checker's verdicts."""
    problems = arithmetic.draw_many(SEED + 1, split, count)
    found: dict[tuple[str, str], None] = {}
    for i, model in enumerate(models):
        for draw in range(draws):
            seed = torch.Generator().manual_seed(1000 * i + draw)
            texts = sample(model, [p + "\n" for p in problems], 1.0, seed)
            found.update(dict.fromkeys(zip(problems, texts, strict=True)))
    return [(p, text, arithmetic.check_lines(p, lines_of(text))) for p, text in found if text.strip("\n")]


def lines_of(text: str) -> list[str]:
    """Return the lines of a solution; a newline at its end ends the last one."""
    return text.removesuffix("\n").split("\n")


def solved(split: arithmetic.Split, count: int) -> list[Labelled]:
    found = []
    for problem in arithmetic.draw_many(SEED + 2, split, count):
        lines = arithmetic.solution(problem) or []
        found.append((problem, "\n".join(lines) + "\n", [True] * len(lines)))
    return found


def example(problem: str, text: str, verdicts: Sequence[bool], marks: bool = False) -> Example:
    """Return what the reward model reads. It learns the labels, and the characters of right lines: the first one where
    the line before ends, in front of the tag, just where a reasoner expects it.

    Args:
        marks: from the first wrong character on, learn at every character that something is wrong, which the label
            sums up.
    """
    lines = lines_of(text)
    ids, targets = [BOS, *encode(problem), _NEWLINE], [IGNORED] * (len(problem) + 2)
    before, end = problem, len(ids) - 1  # where the line before ends
    for i, (line, good) in enumerate(zip(lines, verdicts, strict=True)):
        whole = [*encode(line), *([_NEWLINE] if i + 1 < len(lines) or text.endswith("\n") else [])]
        broken = i > 0 and not verdicts[i - 1]
        right = len(whole) if good else 0 if broken else _right_characters(before, line)
        wrong = _WRONG if marks else IGNORED
        learned = right if good or marks else 0
        if learned:
            targets[end] = whole[0]
        ids += whole
        targets += [
            following if j + 1 < learned else IGNORED if j < right else wrong
            for j, following in enumerate([*whole[1:], EOS])
        ]
        end = len(ids) - 1
        ids.append(_TAG)
        targets.append(_GOOD if good else _BAD)
        before = line
    if verdicts[-1] and arithmetic.answer(text) is not None:
        targets[end] = EOS
    return ids, targets


def _right_characters(before: str, line: str) -> int:
    """Count the characters of a wrong line that begin some right one."""
    starts = [line[:n] for n in range(1, len(line) + 1)]
    return max(
        (n for right in arithmetic.successors(before) for n, s in enumerate(starts, 1) if right.startswith(s)),
        default=0,
    )


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
        for at, (token, target) in enumerate(zip(ids, targets, strict=True)):
            if token == _TAG:
                scores.append(float(margin[at].sigmoid()))
                labels.append(target == _GOOD)
    model.train(was_training)
    return scores, labels


def ratings(model: TinyLlama, tests: Mapping[str, Sequence[Example]]) -> str:
    """Say how right a reward model is on the labelled lines of each reasoner, in words."""
    parts = []
    for name, test in tests.items():
        scores, truths = step_scores(model, test)
        share = sum((s > 0.5) == good for s, good in zip(scores, truths, strict=True)) / len(scores)
        area = auroc(scores, truths)
        parts.append(f"{name}: accuracy {share:.3f} (right: {sum(truths) / len(truths):.3f}), AUC {area:.3f}")
    return f"validation steps of {'; '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("reasoners", type=Path, nargs="+")
    begins = parser.add_mutually_exclusive_group(required=True)
    begins.add_argument("--start", type=Path, help="the checkpoint that the reward model begins as")
    begins.add_argument("--check", action="store_true", help="train nothing: say how right OUT is on these reasoners")
    parser.add_argument("--more-layers", type=int, default=0, help="behind its last one")
    parser.add_argument("--marks", action="store_true", help="learn at every character what is wrong")
    parser.add_argument("--expressions", type=int, default=N_TRAIN, help="sampled by every reasoner")
    parser.add_argument("--tokens", type=float, default=RECIPE.tokens)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    reasoners = [load_checkpoint(path) for path in options.reasoners]
    tests = {
        path.stem: [example(*s) for s in labelled([model], "validation", N_TEST, 1)]
        for path, model in zip(options.reasoners, reasoners, strict=True)
    }
    if options.check:
        print(ratings(load_checkpoint(options.out), tests))
        return
    train = [example(*s, options.marks) for s in labelled(reasoners, "train", options.expressions, DRAWS)]
    sampled = [
        target == _GOOD for ids, targets in train for token, target in zip(ids, targets, strict=True) if token == _TAG
    ]
    train += [example(*s) for s in solved("train", N_SOLVED)]
    random.Random(SEED).shuffle(train)
    print(
        f"{sum(len(ids) for ids, _ in train) / 1e6:.2f}M tokens in {len(train)} solutions; "
        f"{sum(sampled) / len(sampled):.1%} of {len(sampled)} sampled lines are right",
        flush=True,
    )
    model = deeper(load_checkpoint(options.start), options.more_layers)

    def report(_: int, facts: str) -> bool:
        save(model, options.out)
        print(f"{facts}; {ratings(model, tests)}", flush=True)
        return False

    weight = torch.ones(N_VOCAB)
    weight[[_GOOD, _BAD]] = EMPHASIS
    recipe = replace(RECIPE, tokens=options.tokens)
    learn(model, train, recipe, SEED, report, 100, weight)


if __name__ == "__main__":
    main()
