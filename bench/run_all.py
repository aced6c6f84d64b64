"""Every bench with the shared JSON form, one after the other, and one Markdown report of them with plots.

    python -m bench.run_all [--out build/bench/report] [--quick] [--only gemm,load] [--skip serve_load]
        [--keep] [--slice SECONDS] [--pass "ARGUMENTS"]

The folder gets report.md, and for each bench NAME.json (what it printed), NAME.png and, where it
failed, NAME.log. The report is written anew after each bench, so that a run that is stopped keeps what it
has measured; a bench that fails or runs too long is named in the report, and the others go on. Exit status 1 if any
failed.

A machine that is quiet for short times only can be measured in parts. `--keep` leaves in the report what the folder has
from earlier runs: other benches, and rows of the same bench that were measured with other arguments (`--pass`). With
`--slice` the benches that take many minutes stop after that time and go on when they are called again; their rounds lie
in NAME.rounds.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
        """What `python -m` runs."""
        return ".".join(filter(None, ("bench", self.room, self.name)))


BENCHES = (
    Bench("limits", "The machine's limits"),
    Bench("gemm", "MUL_MAT alone"),
    Bench("attention", "Attention"),
    Bench("whole_model", "Whole models: prefill and decoding", sliced=True),
    Bench("peers", "Other engines on the same work", sliced=True),
    Bench("decode_scaling", "Decoding parallel sequences (the paper's figures 11 and 17)", sliced=True),
    Bench("latency", "Time to first token, and what decoding takes (the paper's figure 16)", sliced=True),
    Bench("best_of_n", "Best-of-N, wall time", sliced=True),
    Bench("speculation", "Guessing tokens ahead", sliced=True),
    Bench("llama_lookup", "llama_cpp.Llama's own guesses, registered and not", sliced=True),
    Bench("engine_overhead", "A step of the engine outside llama_decode"),
    Bench("graph_overhead", "A decode step beside its arithmetic"),
    Bench("scoring", "Scoring a growing beam"),
    Bench("head_cost", "A reward head on the model's own hidden states"),
    Bench("serve_load", "The server under load"),
    Bench("server_mixed", "The server under requests of several kinds"),
    Bench("load", "Loading"),
    Bench("repack", "gguf-repack"),
    Bench("trim_vocab", "gguf-trim-vocab"),
    Bench("devices", "A model on several devices"),
    Bench("polling", "The channel: round trips, and an idle model"),
    Bench("hvx_packets", "Instruction packets on Hexagon"),
    Bench("quantize_error", "What quantizing costs: errors of weights"),
    Bench("accuracy", "Accuracy: perplexity and divergence", arguments=("--fresh",), usual=("--chunks", "8")),
    Bench("tiny_world", "The tiny world: what search finds", arguments=("--fresh",), usual=("--items", "50")),
    Bench("gemma_reasoning", "gemma-3-270m on tasks", arguments=("--fresh",), usual=("--items", "20")),
    Bench("dequant_layouts", "Dequantizing 4-bit weights from several layouts", room="papers"),
    Bench("lut_gemv", "Low-bit weights by tables of partial sums", arguments=("--fast",), room="papers"),
    Bench("softmax_exp", "The exponent alone of attention's softmax", room="papers"),
    Bench("attention_stages", "Attention by its steps (the paper's figures 8 and 14)", room="papers"),
    Bench("native_kv", "Attention over K and V in the matrix unit's layout", room="papers"),
    Bench("agile_quant", "Agile-Quant: narrower activations, pruned prompts", room="papers"),
)


@dataclass
class Result:
    """What came of one bench: `report`, the object it printed, or `error`, why there is none; when and how long; and
    whether the folder has its picture."""

    bench: Bench
    when: str
    report: dict[str, Any] | None = None
    error: str = ""
    picture: bool = False


@dataclass(frozen=True)
class How:
    """How benches are run.

    Attributes:
        quick: short runs.
        timeout: seconds after which a bench is stopped.
        keep: what the folder has from earlier runs stays in the report.
        slice: seconds after which a bench that can go on later ends; None: all of it.
        arguments: further ones for the benches.
    """

    quick: bool = False
    timeout: float = 3600
    keep: bool = False
    slice: float | None = None
    arguments: tuple[str, ...] = ()


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


def run(bench: Bench, folder: Path, how: How) -> Result:
    """Run one bench in a process of its own; never raises for what that does."""
    command = [sys.executable, "-m", bench.module, "--json", *bench.arguments, *how.arguments]
    command += ["--quick"] if how.quick else bench.usual
    if how.slice is not None and bench.sliced:
        command += ["--resume", str(folder / f"{bench.name}.rounds"), "--seconds", str(how.slice)]
    picture = folder / f"{bench.name}.png"
    start = time.monotonic()
    error, report, log = "", None, ""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=how.timeout,
            check=False,
            cwd=ROOT,
        )
        log = done.stderr
        if done.returncode:
            error = f"exit status {done.returncode}: {(done.stderr.strip() or 'no message').splitlines()[-1]}"
        else:
            report = parse(done.stdout)
    except subprocess.TimeoutExpired as expired:
        log = expired.stderr.decode(errors="replace") if isinstance(expired.stderr, bytes) else expired.stderr or ""
        error = f"stopped after {how.timeout:.0f} s"
    except ValueError as wrong:
        error = str(wrong)
    when = f"{time.monotonic() - start:.0f} s"
    if report is None:
        (folder / f"{bench.name}.log").write_text(f"{error}\n{log}", encoding="utf-8")
        earlier = kept(bench, folder, how) if how.keep else None
        return replace(earlier, error=error) if earlier else Result(bench, when, error=error)
    if how.keep and (earlier := kept(bench, folder, how)) is not None and earlier.report is not None:
        report = merged(earlier.report, report)
    report["quick"] = how.quick
    (folder / f"{bench.name}.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    picture.unlink(missing_ok=True)
    drawn = plots.draw(bench.name, report["rows"], bench.title, picture)
    return Result(bench, when, report, picture=drawn)


def kept(bench: Bench, folder: Path, how: How) -> Result | None:
    """What the folder has of an earlier run; None if that is nothing, or of short runs where these are long ones."""
    file = folder / f"{bench.name}.json"
    try:
        report = parse(json.dumps(json.loads(file.read_text(encoding="utf-8"))))
    except (OSError, ValueError):
        return None
    if report.get("quick") != how.quick:
        return None
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(file.stat().st_mtime))
    return Result(bench, when, report, picture=(folder / f"{bench.name}.png").is_file())


def merged(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """This run's report with the rows of the earlier one that it has not measured; nothing of another machine's."""
    if earlier["machine"] != now["machine"]:
        return dict(now)
    rows = {row["name"]: row for row in (*earlier["rows"], *now["rows"])}
    return {**now, "limits": {**earlier["limits"], **now["limits"]}, "rows": list(rows.values())}


def number(value: Any) -> str:
    """A figure for a table; a dash where there is none."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, int | float) else str(value)


def section(result: Result) -> list[str]:
    """One bench's part of the report."""
    lines = ["", f"## {result.bench.title}", "", f"`{result.bench.module}`, {result.when}."]
    if result.error:
        lines += ["", f"**Failed**: {result.error}. See {result.bench.name}.log."]
    if result.report is None:
        return lines
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
    benches: Sequence[Bench], folder: Path, how: How, on_start: Callable[[int, Bench], None] | None = None
) -> list[Result]:
    """Run them in order and keep the report up to date.

    Returns:
        What came of these; the report may have more (`How.keep`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    listed = {b: (kept(b, folder, how) if how.keep else None) for b in (BENCHES if how.keep else benches)}
    results: list[Result] = []
    for i, bench in enumerate(benches):
        if on_start:
            on_start(i, bench)
        results.append(run(bench, folder, how))
        listed[bench] = results[-1]
        left = [b for b in benches[i + 1 :] if listed[b] is None]
        write(folder, [r for r in listed.values() if r], left, how.quick)
    return results


def main(
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = ROOT / "build" / "bench" / "report",
    quick: Annotated[bool, typer.Option("--quick", help="Short runs, under a minute each.")] = False,
    only: Annotated[str, typer.Option(help="Names of benches, with commas; default: all.")] = "",
    skip: Annotated[str, typer.Option(help="Names of benches to leave out.")] = "",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which a bench is stopped.")] = 3600,
    keep: Annotated[bool, typer.Option("--keep", help="Leave in the report what earlier runs measured.")] = False,
    slice: Annotated[
        float | None,
        typer.Option(min=5, help="Seconds of each long bench; call again to go on with it. Implies --keep."),
    ] = None,
    arguments: Annotated[str, typer.Option("--pass", help="Further arguments for the benches.")] = "",
) -> None:
    """Run every bench and write one report with plots."""
    benches = chosen(only, skip)
    how = How(quick, timeout, keep or slice is not None, slice, tuple(shlex.split(arguments)))
    with console.bar("benches") as progress:
        task = progress.add_task("", total=len(benches), note="")
        results = run_all(
            benches, out, how, lambda done, bench: progress.update(task, completed=done, description=bench.name)
        )
        progress.update(task, completed=len(benches), description="done")
    failed = [r for r in results if r.error]
    for result in failed:
        console.err().print(f"{result.bench.name}: {result.error}", markup=False)
    console.out().print(f"{out / 'report.md'}: {len(results) - len(failed)} of {len(results)} benches", soft_wrap=True)
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
