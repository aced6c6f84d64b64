"""Every bench with the shared JSON form, one after the other, and one Markdown report of them with plots.

    python bench/run_all.py [--out build/bench/report] [--quick] [--only gemm,load] [--skip serve_load]

The folder gets report.md, and for each bench NAME.json (what it printed), NAME.png and, where it failed, NAME.log. The
report is written anew after each bench, so that a run that is stopped keeps what it has measured; a bench that fails or
runs too long is named in the report, and the others go on. Exit status 1 if any failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

from tilebeam import console

ROOT = Path(__file__).resolve().parent.parent
KEYS = ("name", "baseline", "value", "unit", "ratio", "ratio_min", "ratio_max", "share_of_limit")


@dataclass(frozen=True)
class Bench:
    """One script of this folder.

    Attributes:
        name: file name without .py.
        title: of its section.
        plots: it draws its own picture, with --plot.
    """

    name: str
    title: str
    plots: bool = False


BENCHES = (
    Bench("limits", "The machine's limits"),
    Bench("gemm", "MUL_MAT alone"),
    Bench("dequant_layouts", "Layouts of 4-bit weights (the paper's figure 15)"),
    Bench("softmax_exp", "The exponent of attention's softmax (the paper's figure 14)"),
    Bench("attention", "Attention"),
    Bench("decode_scaling", "Decoding parallel sequences (the paper's figures 11 and 17)", plots=True),
    Bench("best_of_n", "Best-of-N, wall time"),
    Bench("engine_overhead", "A step of the engine outside llama_decode"),
    Bench("graph_overhead", "A decode step beside its arithmetic"),
    Bench("scoring", "Scoring a growing beam"),
    Bench("serve_load", "The server under load"),
    Bench("load", "Loading"),
    Bench("repack", "gguf-repack"),
    Bench("devices", "A model on several devices"),
    Bench("hvx_packets", "Instruction packets on Hexagon"),
)


@dataclass
class Result:
    """What came of one bench: `report`, the object it printed, or `error`, why there is none."""

    bench: Bench
    seconds: float
    report: dict[str, Any] | None = None
    error: str = ""
    picture: bool = False


def parse(text: str) -> dict[str, Any]:
    """The one JSON object of a bench's output.

    Raises:
        ValueError: there is none, or it lacks what the shared form has.
    """
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if not lines:
        raise ValueError("it printed no JSON object")
    report = json.loads(lines[-1])
    missing = [key for key in ("bench", "machine", "limits", "rows") if key not in report]
    missing += sorted({f"rows[].{key}" for row in report.get("rows", []) for key in KEYS if key not in row})
    if missing:
        raise ValueError(f"its JSON object lacks {', '.join(missing)}")
    return dict(report)


def run(bench: Bench, folder: Path, quick: bool, timeout: float) -> Result:
    """Run one bench in a process of its own; never raises for what that does."""
    command = [sys.executable, str(ROOT / "bench" / f"{bench.name}.py"), "--json"]
    command += ["--quick"] if quick else []
    picture = folder / f"{bench.name}.png"
    picture.unlink(missing_ok=True)
    if bench.plots:
        command += ["--plot", str(picture)]
    path = os.pathsep.join(p for p in (str(ROOT / "python"), str(ROOT), os.environ.get("PYTHONPATH")) if p)
    start = time.monotonic()
    error, report, log = "", None, ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, check=False, env=os.environ | {"PYTHONPATH": path}
        )
        log = done.stderr
        if done.returncode:
            error = f"exit status {done.returncode}: {(done.stderr.strip() or 'no message').splitlines()[-1]}"
        else:
            report = parse(done.stdout)
    except subprocess.TimeoutExpired as expired:
        log = expired.stderr.decode(errors="replace") if isinstance(expired.stderr, bytes) else expired.stderr or ""
        error = f"stopped after {timeout:.0f} s"
    except ValueError as wrong:
        error = str(wrong)
    if error:
        (folder / f"{bench.name}.log").write_text(f"{error}\n{log}", encoding="utf-8")
    elif report is not None:
        (folder / f"{bench.name}.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
        if not bench.plots and report["rows"]:
            plot(bench.title, report["rows"], picture)
    return Result(bench, time.monotonic() - start, report, error, picture.is_file())


def plot(title: str, rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The ratios of a bench as bars with their spread; 1 is the baseline."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.3 * len(rows)))
    ratios = [row["ratio"] for row in rows]
    spread = [
        [max(0.0, row["ratio"] - row["ratio_min"]) for row in rows],
        [max(0.0, row["ratio_max"] - row["ratio"]) for row in rows],
    ]
    axes.barh(range(len(rows)), ratios, xerr=spread, color="#4878a8", ecolor="#333333", capsize=2)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("ratio to the baseline (above 1: Tilebeam is better)")
    axes.set_title(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def number(value: Any) -> str:
    """A figure for a table; a dash where there is none."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, int | float) else str(value)


def section(result: Result) -> list[str]:
    """One bench's part of the report."""
    lines = ["", f"## {result.bench.title}", "", f"`bench/{result.bench.name}.py`, {result.seconds:.0f} s."]
    if result.report is None:
        return [*lines, "", f"**Failed**: {result.error}. See {result.bench.name}.log."]
    if result.report["limits"]:
        lines += ["", "Limits: " + ", ".join(f"{k} {number(v)}" for k, v in result.report["limits"].items()) + "."]
    if result.report["rows"]:
        lines += [
            "",
            "| | baseline | value | unit | ratio | share of the limit |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
    for row in result.report["rows"]:
        share = "-" if row["share_of_limit"] is None else f"{row['share_of_limit']:.0%}"
        spread = f"{number(row['ratio'])} ({number(row['ratio_min'])} - {number(row['ratio_max'])})"
        name = str(row["name"]).replace("|", "\\|")
        cells = (name, number(row["baseline"]), number(row["value"]), row["unit"], spread, share)
        lines.append("| " + " | ".join(cells) + " |")
    if result.picture:
        lines += ["", f"![{result.bench.title}]({result.bench.name}.png)"]
    return lines


def write(folder: Path, results: Sequence[Result], left: Sequence[Bench], quick: bool) -> Path:
    """report.md of what there is so far."""
    machine: Mapping[str, Any] = next((r.report["machine"] for r in results if r.report), {})
    about = ", ".join(f"{k} {v}" for k, v in machine.items())
    lines = ["# Benches", "", f"{time.strftime('%Y-%m-%d %H:%M')}. {about}."]
    lines.append("Short runs (--quick): ratios only roughly." if quick else "Medians of interleaved runs.")
    lines.append("A ratio above 1 means that Tilebeam is better; in brackets the least and the greatest of all rounds.")
    if left:
        lines += ["", "Not run yet: " + ", ".join(b.name for b in left) + "."]
    for result in results:
        lines += section(result)
    path = folder / "report.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def chosen(only: str, skip: str) -> list[Bench]:
    """The benches of two lists of names.

    Raises:
        typer.BadParameter: a name that is no bench's.
    """
    names = [b.name for b in BENCHES]
    picked, left_out = ([n.strip() for n in text.split(",") if n.strip()] for text in (only, skip))
    unknown = sorted(set(picked + left_out) - set(names))
    if unknown:
        raise typer.BadParameter(f"no bench {', '.join(unknown)}; there are {', '.join(names)}")
    return [b for b in BENCHES if (not picked or b.name in picked) and b.name not in left_out]


def run_all(
    benches: Sequence[Bench],
    folder: Path,
    quick: bool,
    timeout: float,
    on_start: Callable[[int, Bench], None] | None = None,
) -> list[Result]:
    """Run them in order and keep the report up to date."""
    folder.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for i, bench in enumerate(benches):
        if on_start:
            on_start(i, bench)
        results.append(run(bench, folder, quick, timeout))
        write(folder, results, benches[i + 1 :], quick)
    return results


def main(
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = ROOT / "build" / "bench" / "report",
    quick: Annotated[bool, typer.Option("--quick", help="Short runs, under a minute each.")] = False,
    only: Annotated[str, typer.Option(help="Names of benches, with commas; default: all.")] = "",
    skip: Annotated[str, typer.Option(help="Names of benches to leave out.")] = "",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which a bench is stopped.")] = 3600,
) -> None:
    """Run every bench and write one report with plots."""
    benches = chosen(only, skip)
    with console.bar("benches") as progress:
        task = progress.add_task("", total=len(benches), note="")
        results = run_all(
            benches,
            out,
            quick,
            timeout,
            lambda done, bench: progress.update(task, completed=done, description=bench.name),
        )
        progress.update(task, completed=len(benches), description="done")
    failed = [r for r in results if r.report is None]
    for result in failed:
        console.err().print(f"{result.bench.name}: {result.error}", markup=False)
    console.out().print(f"{out / 'report.md'}: {len(results) - len(failed)} of {len(results)} benches", soft_wrap=True)
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
