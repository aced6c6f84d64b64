"""Every bench with the shared JSON form, one after the other, and one Markdown report of them with plots.

    python -m bench.run_all [--out build/bench/report] [--quick] [--only gemm,load] [--skip serve_load]
        [--slice SECONDS] [--pass "ARGUMENTS"]

The folder gets report.md, and for each bench NAME.json (what it printed), NAME.png and, where it failed, NAME.log. The
report has what the folder holds of earlier runs, too, and is written anew after each bench; a bench that fails or runs
too long is named in it, and the others go on. Exit status 1 if any failed.

A machine that is quiet for short times only can be measured in parts: with `--slice` the benches that take many minutes
stop after that time and go on when they are called again; their rounds lie in NAME.rounds.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from tilebeam.cli import console

from bench.lib import ROOT, plots

KEYS = ("name", "baseline", "value", "unit", "ratio", "ratio_min", "ratio_max", "share_of_limit")


@dataclass(frozen=True)
class Bench:
    """One script of this folder.

    Attributes:
        name: file name without .py.
        title: of its section.
        sliced: it can be measured in slices (bench/lib/rounds.py).
        arguments: what it always gets here.
        usual: what it gets besides where --quick is not given: a part of what its document shows, which takes hours.
        room: the folder of this one that has it; "" for none.
    """

    name: str
    title: str
    sliced: bool = False
    arguments: tuple[str, ...] = ()
    usual: tuple[str, ...] = ()
    room: str = ""

    @property
    def module(self) -> str:
        """Return what `python -m` runs."""
        return ".".join(filter(None, ("bench", self.room, self.name)))


BENCHES = (
    Bench("limits", "The machine's limits"),
    Bench("gemm", "MUL_MAT alone"),
    Bench("attention", "Attention"),
    Bench("whole_model", "Whole models: prefill and decoding", sliced=True),
    Bench("families", "Every family and every type", sliced=True),
    Bench("peers", "Other engines on the same work", sliced=True),
    Bench("decode_scaling", "Decoding parallel sequences (the paper's figures 11 and 17)", sliced=True),
    Bench("latency", "Time to first token, and what decoding takes (the paper's figure 16)", sliced=True),
    Bench("best_of_n", "Best-of-N, wall time", sliced=True),
    Bench("speculation", "Guessing tokens ahead", sliced=True),
    Bench("scoring", "What rating texts costs: growing beams, and the model's own head"),
    Bench("serve_load", "The server under load"),
    Bench("workers", "More workers than this machine has CPUs, simulated"),
    Bench("load", "Loading"),
    Bench("repack", "gguf-repack"),
    Bench("devices", "A model on several devices"),
    Bench("hvx_packets", "Instruction packets on Hexagon"),
    Bench("accuracy", "Accuracy: perplexity and divergence", arguments=("--fresh",), usual=("--chunks", "8")),
    Bench("tiny_world", "The tiny world: what search finds", arguments=("--fresh",), usual=("--items", "50")),
    Bench("step_searches", "Searches by steps over the quality of their scorer", usual=("--items", "20")),
    Bench("dequant_layouts", "Dequantizing 4-bit weights from several layouts", room="papers"),
    Bench("softmax_exp", "The exponent alone of attention's softmax", room="papers"),
    Bench("attention_stages", "Attention by its steps (the paper's figures 8 and 14)", room="papers"),
)


@dataclass(frozen=True)
class How:
    """How benches are run.

    Attributes:
        quick: short runs.
        timeout: seconds after which a bench is stopped.
        slice: seconds after which a bench that can go on later ends; None: all of it.
        arguments: further ones for the benches.
    """

    quick: bool = False
    timeout: float = 3600
    slice: float | None = None
    arguments: tuple[str, ...] = ()


def parse(text: str) -> dict[str, Any]:
    """Return the one JSON object of a bench's output.

    Raises:
        ValueError: there is none, or it lacks what the shared form has.
    """
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if not lines:
        raise ValueError("it printed no JSON object")
    report: dict[str, Any] = json.loads(lines[-1])
    missing = [key for key in ("bench", "machine", "limits", "rows") if key not in report]
    missing += sorted({f"rows[].{key}" for row in report.get("rows", []) for key in KEYS if key not in row})
    if missing:
        raise ValueError(f"its JSON object lacks {', '.join(missing)}")
    return report


def run(bench: Bench, folder: Path, how: How) -> str | None:
    """Run one bench in a process of its own and keep what it prints; why that failed, or None."""
    command = [sys.executable, "-m", bench.module, "--json", *bench.arguments, *how.arguments]
    command += ["--quick"] if how.quick else bench.usual
    if how.slice is not None and bench.sliced:
        command += ["--resume", str(folder / f"{bench.name}.rounds"), "--seconds", str(how.slice)]
    log = ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=how.timeout, check=False, cwd=ROOT)
        log = done.stderr
        if done.returncode:
            raise ValueError(f"exit status {done.returncode}: {(log.strip() or 'no message').splitlines()[-1]}")
        report = parse(done.stdout)
    except (subprocess.TimeoutExpired, ValueError) as error:
        why = f"stopped after {how.timeout:.0f} s" if isinstance(error, subprocess.TimeoutExpired) else str(error)
        (folder / f"{bench.name}.log").write_text(f"{why}\n{log}", encoding="utf-8")
        return why
    when = time.strftime("%Y-%m-%d %H:%M")
    (folder / f"{bench.name}.json").write_text(json.dumps(report | {"when": when, "quick": how.quick}, indent=1))
    (folder / f"{bench.name}.log").unlink(missing_ok=True)
    plots.draw(bench.name, report["rows"], bench.title, folder / f"{bench.name}.png")
    return None


def number(value: Any) -> str:
    """Format a figure for a table, as a dash if there is none."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, int | float) else str(value)


def section(bench: Bench, folder: Path) -> Iterator[str]:
    """One bench's part of the report, from what the folder has of it."""
    log, file = folder / f"{bench.name}.log", folder / f"{bench.name}.json"
    if not log.exists() and not file.exists():
        return
    yield from ("", f"## {bench.title}", "")
    if log.exists():
        yield f"**Failed**: {log.read_text(encoding='utf-8').splitlines()[0]}. See {log.name}."
    if not file.exists():
        return
    report = json.loads(file.read_text(encoding="utf-8"))
    about = ", ".join(f"{k} {v}" for k, v in report["machine"].items())
    yield f"`{bench.module}`, {report['when']}{', short runs' * report['quick']}. {about}."
    if report["limits"]:
        yield from ("", "Limits: " + ", ".join(f"{k} {number(v)}" for k, v in report["limits"].items()) + ".")
    if report["rows"]:
        yield from ("", "| | baseline | value | unit | ratio | share of the limit |", "| --- |" + " --- |" * 5)
    for row in report["rows"]:
        share = "-" if row["share_of_limit"] is None else f"{row['share_of_limit']:.0%}"
        spread = f"{number(row['ratio'])} ({number(row['ratio_min'])} - {number(row['ratio_max'])})"
        name = str(row["name"]).replace("|", "\\|")
        yield (
            "| " + " | ".join((name, number(row["baseline"]), number(row["value"]), row["unit"], spread, share)) + " |"
        )
    if (folder / f"{bench.name}.png").exists():
        yield from ("", f"![{bench.title}]({bench.name}.png)")


def write(folder: Path) -> None:
    about = "A ratio above 1 means that Tilebeam is better; in brackets the least and the greatest of all rounds."
    lines = ["# Benches", "", about, *(line for bench in BENCHES for line in section(bench, folder))]
    (folder / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def chosen(only: str, skip: str) -> list[Bench]:
    """Return the benches of two lists of names.

    Raises:
        typer.BadParameter: a name that is no bench's.
    """
    names = [b.name for b in BENCHES]
    picked, left_out = ([n.strip() for n in text.split(",") if n.strip()] for text in (only, skip))
    unknown = sorted(set(picked + left_out) - set(names))
    if unknown:
        raise typer.BadParameter(f"no bench {', '.join(unknown)}; there are {', '.join(names)}")
    return [b for b in BENCHES if (not picked or b.name in picked) and b.name not in left_out]


def run_all(benches: Sequence[Bench], folder: Path, how: How) -> Mapping[str, str]:
    """Run them in order and keep the report up to date; why those failed that did, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    failed = {}
    with console.bar("benches") as progress:
        task = progress.add_task("", total=len(benches), note="")
        for bench in benches:
            progress.update(task, description=bench.name)
            if why := run(bench, folder, how):
                failed[bench.name] = why
            write(folder)
            progress.advance(task)
    return failed


def main(
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = ROOT / "build" / "bench" / "report",
    quick: Annotated[bool, typer.Option("--quick", help="Short runs, under a minute each.")] = False,
    only: Annotated[str, typer.Option(help="Names of benches, with commas; default: all.")] = "",
    skip: Annotated[str, typer.Option(help="Names of benches to leave out.")] = "",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which a bench is stopped.")] = 3600,
    slice: Annotated[float | None, typer.Option(min=5, help="Seconds of each long bench; call again to go on.")] = None,
    arguments: Annotated[str, typer.Option("--pass", help="Further arguments for the benches.")] = "",
) -> None:
    """Run every bench and write one report with plots."""
    benches = chosen(only, skip)
    failed = run_all(benches, out, How(quick, timeout, slice, tuple(shlex.split(arguments))))
    for name, why in failed.items():
        console.err().print(f"{name}: {why}", markup=False)
    console.out().print(f"{out / 'report.md'}: {len(benches) - len(failed)} of {len(benches)} benches", soft_wrap=True)
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
