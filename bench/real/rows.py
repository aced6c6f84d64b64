"""What `make real` runs: evaluations, each one `tilebeam eval`, and one text, all small enough to take minutes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One evaluation.

    Attributes:
        name: of its folder.
        title: for people.
        model: one of `bench.real.sources.MODELS`.
        kind: of the task, as --task has it.
        files: names that the data file may have in the folder of data, patterns; () for HumanEval, which is fetched.
        items: how many; quick: with --quick.
        options: of `tilebeam eval` besides.
        shown: series and budgets in the summary.
        learn: names of a file of problems from which a reward head is trained first, if it is there.
    """

    name: str
    title: str
    model: str
    kind: str
    files: tuple[str, ...]
    items: int
    quick: int
    options: tuple[str, ...]
    shown: tuple[tuple[str, int], ...]
    learn: tuple[str, ...] = ()


GSM8K = ("gsm8k_test*.jsonl", "gsm8k.jsonl")
MATH = ("math*.jsonl",)
DRAWN = ("--temp", "0.7", "--top-p", "0.95")
_SAMPLES = (*DRAWN, "--seeds", "1", "--budget", "1,4", "--unit-items", "4")
_VOTE = (("greedy", 1), ("pass", 1), ("self-consistency", 4), ("pass", 4))
# Samples of a reward head's problems: --items 2 or so would have none that is right.
LEARNING = ("--items", "36", "--samples", "4", "--seed", "1", *DRAWN)
LEARNED = (("best-of-n[head]", 4), ("self-consistency[head]", 4))

ROWS = (
    Row("gsm8k", "GSM8K", "0.5B", "gsm8k", GSM8K, 24, 2, _SAMPLES, _VOTE, learn=("gsm8k_train*.jsonl",)),
    Row(
        "gsm8k-larger",
        "GSM8K, the larger model",
        "1.5B",
        "gsm8k",
        GSM8K,
        24,
        1,
        ("--method", "greedy", "--unit-items", "12"),
        (("greedy", 1),),
    ),
    Row("math", "MATH", "0.5B", "math", MATH, 8, 1, (*_SAMPLES, "-n", "512"), _VOTE),
    Row(
        "humaneval",
        "HumanEval",
        "0.5B",
        "humaneval",
        (),
        16,
        2,
        (*_SAMPLES, "--method", "greedy,best-of-n"),
        (("greedy", 1), ("pass", 1), ("best-of-n[logprob]", 4), ("best-of-n[examples]", 4), ("pass", 4)),
    ),
)


@dataclass(frozen=True)
class Text:
    """A text that a model reads on the NPU and on the stock backend: perplexity of both, and what lies between them.

    Attributes:
        name, title, model, files: as of `Row`.
        windows: of 512 tokens; quick: with --quick.
    """

    name: str
    title: str
    model: str
    files: tuple[str, ...]
    windows: int
    quick: int


TEXT = Text("text", "WikiText-2", "0.5B", ("wiki.test*", "wikitext*"), 12, 1)


@dataclass(frozen=True)
class Guessing:
    """Chat prompts with guesses by a draft head of the repository, beside look-up and plain decoding: one
    `bench.speculation`.

    Attributes:
        name, title, model: as of `Row`.
        head: file in bench/real/heads.
        items: prompts; quick: with --quick.
    """

    name: str
    title: str
    model: str
    head: str
    items: int
    quick: int


GUESSING = Guessing("draft-head", "Chat, one sequence, greedy", "0.5B", "0.5B-draft.gguf", 10, 1)
