"""The evaluations of `make real`: each is one `tilebeam eval`, small enough that all of them take minutes."""

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


GSM8K = ("gsm8k_test*.jsonl", "gsm8k.jsonl")
MATH = ("math*.jsonl",)
_SAMPLES = ("--temp", "0.7", "--top-p", "0.95", "--seeds", "1", "--budget", "1,4", "--unit-items", "4")
_VOTE = (("pass", 1), ("self-consistency", 4), ("pass", 4))

ROWS = (
    Row("gsm8k", "GSM8K", "0.5B", "gsm8k", GSM8K, 24, 2, _SAMPLES, _VOTE),
    Row(
        "gsm8k-larger",
        "GSM8K, the larger model once",
        "1.5B",
        "gsm8k",
        GSM8K,
        24,
        1,
        ("--temp", "0", "--seeds", "1", "--budget", "1", "--unit-items", "12", "--method", "self-consistency"),
        (("pass", 1),),
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
        (*_SAMPLES, "--method", "best-of-n"),
        (("pass", 1), ("best-of-n[logprob]", 4), ("best-of-n[examples]", 4), ("pass", 4)),
    ),
)
