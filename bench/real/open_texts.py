"""Which of several open texts is the best one? Choosers that know no answer, compared by a larger model's verdicts.

    python -m bench.real.open_texts --model SMALL.gguf --judge LARGE.gguf --out FOLDER [--minutes 9]

A model writes eight answers to each question of open_questions.txt, and each chooser takes one of them. A judge
compares what they took with the answer of the highest mean log-probability, in both orders, by the log-odds of its A
and B; an answer wins if the mean of both orders says so. FOLDER keeps what there is, a line per question; the same
command goes on there. Without --model and --judge it prints the table of what is kept.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tilebeam
from tilebeam.model.lm import LM
from tilebeam.search.limits import standing

Record = dict[str, Any]
Chooser = Callable[[list[Record], Record], Sequence[float]]  # of samples and what was read of them: scores
QUESTIONS = Path(__file__).with_name("open_questions.txt")
SAMPLES = 8
PARTS = ("samples", "readings", "verdicts")
KEPT = ("text", "token_ids", "finish_reason", "logprobs")
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
        seen: set[tuple[int, ...]] = set()
        fresh = []
        for i, logprob in enumerate(sample["logprobs"]):
            run = tuple(sample["token_ids"][max(0, i - 3) : i + 1])
            if run not in seen:
                fresh.append(logprob)
            seen.add(run)
        found.append(float(np.mean(fresh)))
    return found


def shared_words(samples: list[Record], _: Record) -> list[float]:
    """See `tilebeam.Consensus`."""
    outputs = [tilebeam.CompletionOutput(i, s["text"], [], "stop", 0) for i, s in enumerate(samples)]
    return tilebeam.Consensus().score("", outputs)


CHOOSERS: dict[str, Chooser] = {
    "the first": lambda s, _: [0.0] * len(s),
    "mean log-probability": mean_logprob,
    "mean log-probability without repeated 4-grams": fresh_logprob,
    "log-probability of the whole text": lambda s, _: [sum(x["logprobs"]) for x in s],
    "self-certainty": lambda _, r: [float(np.mean(c)) for c in r["certainty"]],
    "medoid of embeddings": lambda _, r: [sum(c) for c in r["cosines"]],
    "consensus: shared words": shared_words,
    "shared words x mean probability": lambda s, r: np.multiply(
        shared_words(s, r), np.exp(mean_logprob(s, r))
    ).tolist(),
    "P(good) by the model itself": lambda _, r: list(r["good"]),
    "the longest": lambda s, _: [len(x["token_ids"]) for x in s],
}


def stand(sample: Record) -> int:
    return standing(sample["finish_reason"], sample["text"])


def chosen(scores: Sequence[float], samples: list[Record], *, ordered: bool = True) -> int:
    """Return the best score's index, of equals the first; ordered: of those that stand highest by how they ended."""
    return max(range(len(samples)), key=lambda i: (stand(samples[i]) if ordered else 0, scores[i], -i))


def written(lm: LM, questions: Sequence[str], first: int) -> list[Record]:
    """Write answers to questions, the first of which has that number."""
    prompts = [lm.chat_prompt([{"role": "user", "content": q}]) for q in questions]
    drawn = tilebeam.SamplingParams(n=SAMPLES, temperature=0.8, max_tokens=200, logprobs=True)
    outputs = lm.generate(prompts, [replace(drawn, seed=100 * (first + i)) for i in range(len(questions))])
    return [
        {"question": q, "samples": [{k: c.as_dict()[k] for k in KEPT} for c in output.outputs]}
        for q, output in zip(questions, outputs, strict=True)
    ]


def read(lm: LM, record: Record) -> Record:
    """Read what the model itself tells of its answers: how far the distribution of each token is from a uniform one
    (the mean of log-ratios), how alike embeddings are, and its verdicts."""
    prompt = lm.chat_prompt([{"role": "user", "content": record["question"]}])
    found: Record = {"question": record["question"], "certainty": []}
    for sample in record["samples"]:
        ids = [*prompt.ids, *sample["token_ids"]]
        logits = lm.read([ids], [range(len(prompt.ids) - 1, len(ids) - 1)])[0].logits
        top = logits.max(axis=1, keepdims=True)
        log_sums = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1, dtype=np.float64))
        found["certainty"].append((log_sums - logits.mean(axis=1, dtype=np.float64) - np.log(lm.n_vocab)).tolist())
    texts = [s["text"] or " " for s in record["samples"]]
    vectors = lm.embed(texts).astype(np.float64)
    found["cosines"] = (vectors @ vectors.T).tolist()
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
    until = time.monotonic() + options.minutes * 60
    options.out.mkdir(parents=True, exist_ok=True)
    samples, readings, verdicts = (options.out / f"{name}.jsonl" for name in PARTS)
    questions = QUESTIONS.read_text("utf-8").splitlines()
    if options.model:
        with tilebeam.load(options.model, n_ctx=8192, n_seq_max=16) as lm:
            while (done := len(kept(samples))) < len(questions) and time.monotonic() < until:
                keep(samples, written(lm, questions[done : done + 10], done))
            while (done := len(kept(readings))) < len(kept(samples)) and time.monotonic() < until:
                keep(readings, [read(lm, kept(samples)[done])])
    if options.judge:
        with tilebeam.load(options.judge, n_ctx=8192, n_seq_max=16) as lm:
            while (done := len(kept(verdicts))) < len(kept(readings)) and time.monotonic() < until:
                keep(verdicts, [judged(lm, kept(samples)[done], kept(readings)[done])])


def table(out: Path) -> Iterator[str]:
    """Tell of each chooser its figures, with what a bootstrap over questions says of them."""
    samples, readings, verdicts = (kept(out / f"{name}.jsonl") for name in PARTS)
    draws = np.random.default_rng(0).integers(0, len(verdicts), (4000, len(verdicts)))

    def between(values: Sequence[float]) -> str:
        low, high = np.percentile(np.array(values)[draws].mean(axis=1), [2.5, 97.5])
        return f"{np.mean(values):.2f} ({low:.2f} to {high:.2f})"

    def figures(scores: Chooser, ordered: bool) -> tuple[list[Record], list[list[float]]]:
        taken, orders = [], []
        for record, reading, verdict in zip(samples, readings, verdicts, strict=False):
            best = chosen(scores(record["samples"], reading), record["samples"], ordered=ordered)
            taken.append(record["samples"][best])
            orders.append(verdict["orders"].get(str(best), [0.0, 0.0]))
        return taken, orders

    plain = np.mean(figures(CHOOSERS["the first"], True)[1], axis=1)
    yield f"{len(verdicts)} questions\n"
    yield "| chooser | tokens | cut or looping | won, lost in both orders | won | log-odds | above the first that ended |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    anyhow = ("the first", "mean log-probability")
    for name, ordered in [*((n, False) for n in anyhow), *((n, True) for n in CHOOSERS)]:
        taken, orders = figures(CHOOSERS[name], ordered)
        both = [sum(min(sign * a, sign * b) > 0 for a, b in orders) for sign in (1, -1)]
        means = np.mean(orders, axis=1)
        cells = [f"{np.mean([len(t['token_ids']) for t in taken]):.0f}", sum(stand(t) < 3 for t in taken)]
        cells += [f"{both[0]}, {both[1]}", between((np.sign(means) + 1) / 2), between(means), between(means - plain)]
        yield f"| {name}{', of those that ended' * ordered} | {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, help="GGUF file of the model that writes")
    p.add_argument("--judge", type=Path, help="GGUF file of the model that compares")
    p.add_argument("--out", type=Path, required=True, help="folder that keeps answers and verdicts")
    p.add_argument("--minutes", type=float, default=9, help="begin nothing after so many (default 9)")
    given = p.parse_args()
    go_on(given)
    print(*table(given.out), sep="\n")
