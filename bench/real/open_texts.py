"""Which of several open texts is the best one? Choosers that know no answer, compared by a larger model's verdicts.

    python -m bench.real.open_texts --model SMALL.gguf --judge LARGE.gguf --out FOLDER

A model writes eight answers to each question of open_questions.txt, and each chooser takes one of them. A judge
compares what they took with the answer of the highest mean log-probability, in both orders, by the log-odds of its A
and B; an answer wins if the mean of both orders says so. FOLDER keeps what there is, a line per question; the same
command goes on there. Then tables of what is kept follow: there, and, of questions with right answers, in logs/.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tilebeam
from tilebeam.model.lm import LM
from tilebeam.search.limits import ENDED, best_index, standing

from bench.real import rejudge, search_cost

Record = dict[str, Any]
Chooser = Callable[[list[Record], Record], Sequence[float]]  # of samples and what was read of them: scores
QUESTIONS = Path(__file__).with_name("open_questions.txt")
SAMPLES = 8
PARTS = ("samples", "readings", "verdicts")
KEPT = ("text", "token_ids", "finish_reason", "logprobs", "certainties")
GOOD = (
    "Here is a question and a proposed answer.\n\nQuestion:\n{prompt}\n\nProposed answer:\n{answer}\n\n"
    "Is this a good answer? Reply with Yes or No."
)
PAIR = (
    "Here are a question and two answers.\n\nQuestion:\n{question}\n\nAnswer A:\n{first}\n\nAnswer B:\n{second}\n\n"
    "Which is the better answer to the question? Reply with A or B."
)


def mean_logprob(samples: list[Record], _: Record) -> list[float]:
    return [float(np.mean(s["logprobs"])) for s in samples]


def fresh_logprob(samples: list[Record], _: Record) -> list[float]:
    """Leave out tokens that end four in a row which the text had before."""
    found = []
    for sample in samples:
        ids = sample["token_ids"]
        fresh = {tuple(ids[max(0, i - 3) : i + 1]): p for i, p in reversed([*enumerate(sample["logprobs"])])}
        found.append(float(np.mean([*fresh.values()])))
    return found


def shared_words(samples: list[Record], _: Record) -> list[float]:
    """See `tilebeam.Consensus`."""
    outputs = [tilebeam.CompletionOutput(i, s["text"], [], "stop", 0) for i, s in enumerate(samples)]
    return tilebeam.Consensus().score("", outputs)


CHOOSERS: dict[str, Chooser] = {
    "the first": lambda s, _: [0.0] * len(s),
    "mean log-probability": mean_logprob,
    "mean log-probability without repeated 4-grams": fresh_logprob,
    "self-certainty": lambda s, _: [float(np.mean(x["certainties"])) for x in s],
    "medoid of embeddings": lambda _, r: [sum(c) for c in r["cosines"]],
    "consensus: shared words": shared_words,
    "shared words x mean probability": lambda s, r: np.multiply(
        shared_words(s, r), np.exp(mean_logprob(s, r))
    ).tolist(),
    "P(good) by the model itself": lambda _, r: list(r["good"]),
    "the longest": lambda s, _: [len(x["token_ids"]) for x in s],
}


def chosen(scores: Sequence[float], samples: list[Record], *, ordered: bool = True) -> int:
    """Return the best score's index, of equals the first; ordered: of those that stand highest by how they ended."""
    ends = [standing(s["finish_reason"], s["text"]) if ordered else 0 for s in samples]
    return best_index(ends, scores)


def written(lm: LM, questions: Sequence[str], first: int) -> list[Record]:
    """Write answers to questions, the first of which has that number."""
    prompts = [lm.chat_prompt([{"role": "user", "content": q}]) for q in questions]
    drawn = tilebeam.SamplingParams(n=SAMPLES, temperature=0.8, max_tokens=200, logprobs=True, statistics=True)
    outputs = lm.generate(prompts, [replace(drawn, seed=100 * (first + i)) for i in range(len(questions))])
    return [
        {"question": q, "samples": [{k: c.as_dict()[k] for k in KEPT} for c in output.outputs]}
        for q, output in zip(questions, outputs, strict=True)
    ]


def read(lm: LM, record: Record) -> Record:
    """Read what the model itself tells of its answers: how alike embeddings are, and its verdicts."""
    texts = [s["text"] or " " for s in record["samples"]]
    vectors = lm.embed(texts).astype(np.float64)
    found: Record = {"question": record["question"], "cosines": (vectors @ vectors.T).tolist()}
    outputs = [tilebeam.CompletionOutput(i, text, [], "stop", 0) for i, text in enumerate(texts)]
    judge = tilebeam.LLMJudge(lm, chat=True, template=GOOD)
    return found | {"good": judge.score(tilebeam.Prompt(record["question"]), outputs)}


def judged(lm: LM, record: Record, reading: Record) -> Record:
    """Ask how much better what choosers took is than what mean log-probability took: log-odds behind it and before."""
    question, samples = record["question"], record["samples"]
    best = chosen(mean_logprob(samples, {}), samples, ordered=False)
    taken = {0} | {chosen(f(samples, reading), samples) for f in CHOOSERS.values()}
    others = sorted(i for i in taken if samples[i]["text"] != samples[best]["text"])
    pairs = [(best, i) for i in others] + [(i, best) for i in others]
    asked = [PAIR.format(question=question, first=samples[a]["text"], second=samples[b]["text"]) for a, b in pairs]
    prompts = [lm.chat_prompt([{"role": "user", "content": a}]) for a in asked]
    labels = [lm.tokenize(label, add_special=False)[0] for label in "AB"]
    odds = [float(r.logits[0, 1] - r.logits[0, 0]) for r in lm.read(prompts, [[-1]] * len(prompts), labels)]
    return {"question": question, "orders": {i: [odds[n], -odds[n + len(others)]] for n, i in enumerate(others)}}


def kept(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def keep(path: Path, records: Sequence[Record]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in records)


def go_on(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    samples, readings, verdicts = (options.out / f"{name}.jsonl" for name in PARTS)
    questions = QUESTIONS.read_text("utf-8").splitlines()
    if options.model:
        with tilebeam.load(options.model, n_ctx=8192, n_seq_max=16) as lm:
            while (done := len(kept(samples))) < len(questions):
                keep(samples, written(lm, questions[done : done + 10], done))
            for record in kept(samples)[len(kept(readings)) :]:
                keep(readings, [read(lm, record)])
    if options.judge:
        with tilebeam.load(options.judge, n_ctx=8192, n_seq_max=16) as lm:
            for record, reading in [*zip(kept(samples), kept(readings), strict=True)][len(kept(verdicts)) :]:
                keep(verdicts, [judged(lm, record, reading)])


def between(values: Sequence[float]) -> str:
    """Write a mean, and where a bootstrap over questions has 95 % of its means."""
    draws = np.random.default_rng(0).integers(0, len(values), (4000, len(values)))
    low, high = np.percentile(np.array(values)[draws].mean(axis=1), [2.5, 97.5])
    return f"{np.mean(values):.3f} ({low:.3f} to {high:.3f})"


def open_table(out: Path) -> Iterator[str]:
    """Tell how each chooser does by the verdicts: log-odds in the mean of both orders, against two others."""
    samples, readings, verdicts = (kept(out / f"{name}.jsonl") for name in PARTS)
    texts, first = [r["samples"] for r in samples], None
    yield "| chooser | tokens | cut or looping | won, lost in both orders | won | log-odds | above the first"
    for name, ordered in [*((n, True) for n in CHOOSERS), ("the first", False), ("mean log-probability", False)]:
        scores = [CHOOSERS[name](*given) for given in zip(texts, readings, strict=True)]
        best = [chosen(*given, ordered=ordered) for given in zip(scores, texts, strict=True)]
        taken = [group[i] for group, i in zip(texts, best, strict=True)]
        orders = [verdict["orders"].get(str(i), [0.0, 0.0]) for verdict, i in zip(verdicts, best, strict=True)]
        both = ", ".join(str(sum(min(sign * a, sign * b) > 0 for a, b in orders)) for sign in (1, -1))
        odds = np.mean(orders, axis=1)
        first = odds if first is None else first
        told = [between(values) for values in ((np.sign(odds) + 1) / 2, odds, odds - first)]
        bad = sum(standing(t["finish_reason"], t["text"]) < ENDED for t in taken)
        length = np.mean([len(t["token_ids"]) for t in taken])
        yield f"| {name}{', however they ended' * (not ordered)} | {length:.0f} | {bad} | {both} | {' | '.join(told)}"


def answer_table(log: Path) -> Iterator[str]:
    """Tell how often what was chosen of a question's first samples is right."""
    items = [item for record in rejudge.read(log) for item in record.get("items", []) if "samples" in item]
    groups = [[s | {"finish_reason": s["finish"]} for s in item["samples"][:SAMPLES]] for item in items]
    rates = {"mean log-probability": lambda s: [x["scores"]["logprob"] for x in s]}
    rates["consensus"] = lambda s: shared_words(s, {})
    yield f"{log.name}: {len(groups)} questions, any sample {np.mean([s['correct'] for g in groups for s in g]):.3f}"
    for name, ordered in (("mean log-probability", False), ("mean log-probability", True), ("consensus", True)):
        right = [g[chosen(rates[name](g), g, ordered=ordered)]["correct"] for g in groups]
        yield f"| {name}{', however they ended' * (not ordered)} | {between(right)}"


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, help="GGUF file of the model that writes")
    p.add_argument("--judge", type=Path, help="GGUF file of the model that compares")
    p.add_argument("--out", type=Path, required=True, help="folder that keeps answers and verdicts")
    given = p.parse_args()
    go_on(given)
    print(*open_table(given.out), sep="\n")
    for log in ("gsm8k", "humaneval", "math"):
        print(*answer_table(search_cost.LOGS / f"{log}-log.jsonl.xz"), sep="\n")
