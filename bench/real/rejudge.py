"""Kept samples judged again: after a change of how answers are read, judged or rated, what differs in bench/real/logs.

    python -m bench.real.rejudge --data FOLDER [--rows gsm8k,math] [--write]

Prints how many answers, verdicts and scores of programs differ, and each verdict that does. With --write the logs have
the new ones, and evaluations go on with them; the tables in docs/results.md come from `python -m
bench.real.search_cost` then. FOLDER is that of `python -m bench.real`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tilebeam import CompletionOutput
from tilebeam.answers.normalize import merged
from tilebeam.evaluation.task_options import TaskOptions
from tilebeam.evaluation.tasks import open_task
from tilebeam.evaluation.tasks.task import Task
from tilebeam.gguf.whole_file import whole_file
from tilebeam.scoring.scorer_names import named_scorer
from tilebeam.scoring.scoring_defaults import RUN_PROGRAMS

from bench.lib.options import Parser
from bench.lib.report import start
from bench.real.__main__ import data_there, named_rows
from bench.real.search_cost import EVALUATIONS, KEPT, LOGS, OUT, Evaluation

Record = dict[str, Any]


@dataclass
class Changes:
    """What differs in a row's log.

    Attributes:
        texts, answers, verdicts, scores: how many there are, and how many of their answers, verdicts and scores differ.
        lines: each verdict that differs.
    """

    texts: int = 0
    answers: int = 0
    verdicts: int = 0
    scores: int = 0
    lines: list[str] = field(default_factory=list)


def judged(record: Record, task: Task) -> Changes:
    changes = Changes()
    items = {item.id: item for item in task.items}
    for entry in record.get("items", []):
        item = items[entry["id"]]
        texts = [x for x in entry.get("samples", [entry]) if "text" in x]  # a search has one text, samples have many
        answers = merged([task.extract(x["text"]) for x in texts], task.equal)
        for text, answer in zip(texts, answers, strict=True):
            verdict = task.verdict(item, text["text"])
            changes.texts += 1
            changes.answers += answer != text["answer"]
            if verdict != text["correct"]:
                changes.verdicts += 1
                told = f"{text['answer']!r} ({text['correct']:g}) is {answer!r} ({verdict:g}), right is {item.answer!r}"
                changes.lines.append(f"{record['unit']}, item {item.id}: {told}")
            text |= {"answer": answer, "correct": verdict}
        if RUN_PROGRAMS[0] in texts[0].get("scores", {}):
            changes.scores += rated(str(task.messages(item)[-1]["content"]), texts)
    return changes


def rated(prompt: str, texts: list[Record]) -> int:
    """Rate the programs of a question anew; how many scores differ."""
    candidates = [
        CompletionOutput(i, x["text"], [0], x["finish"], 0, cumulative_logprob=x["scores"]["logprob"])
        for i, x in enumerate(texts)
    ]
    changed = 0
    for name in RUN_PROGRAMS:
        for x, score in zip(texts, named_scorer(name).score(prompt, candidates), strict=True):
            changed += x["scores"].get(name) != score
            x["scores"][name] = score
    return changed


def rejudge(row: Evaluation, data: Path, write: bool) -> Changes:
    total = Changes()
    path = LOGS / f"{row.name}-{KEPT[0]}.xz"
    header, *records = read(path)
    known = {f.name for f in fields(TaskOptions)}  # earlier versions had more
    options = {name: value for name, value in header["setting"]["task"].items() if name in known}
    task = open_task(TaskOptions(**options | {"spec": f"{row.kind}:{data}"}))
    for record in records:
        found = judged(record, task)
        total.texts += found.texts
        total.answers += found.answers
        total.verdicts += found.verdicts
        total.scores += found.scores
        total.lines += found.lines
    if write:
        save(path, [settled(header, task.digest), *records])
        if (timed := LOGS / f"{row.name}-{KEPT[1]}.xz").exists():
            first, *rest = read(timed)
            save(timed, [settled(first, task.digest), *rest])
    return total


def settled(header: Record, task_digest: str) -> Record:
    """Make a log's first line for a task whose right answers are spelled otherwise now."""
    setting = header["setting"] | {"task_digest": task_digest}
    if RUN_PROGRAMS[0] in setting["scorers"]:
        setting["scorers"] = list(dict.fromkeys([*setting["scorers"], *RUN_PROGRAMS]))
    digest = hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()  # as `Setting.digest`
    return header | {"digest": digest, "setting": setting}


def read(path: Path) -> list[Record]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def save(path: Path, records: list[Record]) -> None:
    with whole_file(path) as partial, lzma.open(partial, "wt", preset=9, encoding="utf-8") as lines:
        lines.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def told(rows: list[Evaluation], options: argparse.Namespace) -> Iterator[str]:
    for row in rows:
        if (LOGS / f"{row.name}-{KEPT[0]}.xz").exists() and (data := data_there(row, options)) is not None:
            found = rejudge(row, data, options.write)
            differ = f"{found.answers} other answers, {found.verdicts} other verdicts, {found.scores} other scores"
            yield f"{row.name}: {found.texts} texts, {differ}"
            yield from (f"  {line}" for line in found.lines)


def main() -> None:
    p = Parser(__doc__, "has no effect")
    p.add_argument("--data", type=Path, help="folder with gsm8k_test.jsonl and math.jsonl")
    p.add_argument("--rows", help=f"comma separated, of {', '.join(e.name for e in EVALUATIONS)} (default: all)")
    p.add_argument("--write", action="store_true", help="keep the new answers and verdicts")
    p.add_argument("--out", type=Path, default=OUT, help="where HumanEval is fetched to (default: build/search-cost)")
    options = p.parse()
    wanted = named_rows(p, options.rows, [e.name for e in EVALUATIONS])
    for line in told([e for e in EVALUATIONS if e.name in wanted], options):
        print(line, flush=True)


if __name__ == "__main__":
    start(main)
