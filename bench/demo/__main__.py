"""What `make demo` runs: three of Tilebeam's commands, printed so that you can type them yourself.

    python -m bench.demo [--problems 12] [-N 16] [--device npu] [--seed S] [--quick]

A real model on fresh arithmetic problems: one greedy answer against the best of N and votes of N; a tiny model whose
searches a process reward model guides, with an exact checker (bench/tiny); and throughput beside the stock backend.
"""

from __future__ import annotations

import argparse
import io
import os
import secrets
import shlex
import sys
import tempfile
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from rich.markdown import Markdown
from rich.rule import Rule
from rich.text import Text
from tilebeam import NpuError, TilebeamError
from tilebeam.cli import console
from tilebeam.cli import main as cli

from bench import tiny_world
from bench.demo import model as demo_model
from bench.lib import ROOT

# reasoning-gym's "products": two or three one-digit factors. Frozen on a pilot of 30 problems with 16 samples each; on
# 30 others the Q4_K_M file has pass@1 28 %, majority@16 33 %, likeliest@16 37 %, best@16 60 %. A base model takes no
# instructions, so prompts begin with solved examples.
TASK = (
    *("--task", "reasoning-gym:products?min_terms=2&max_terms=3&min_digits=1&max_digits=1"),
    *("--question", "([0-9][0-9 *]*[0-9])", "--template", "{question} =", "--shot-answer", " {answer}\\n"),
    *(
        "--shots",
        "24",
        "--shot-seed",
        "777",
        "--stop",
        "\\n",
        "-n",
        "12",
        "--temp",
        "0.8",
        "--top-k",
        "40",
        "--top-p",
        "1",
    ),
    *("--method", "greedy,best-of-n,self-consistency", "--scorer", "logprob,verifier"),
)


def run(title: str, words: list[str]) -> None:
    """Show one of Tilebeam's commands and run it; of an evaluation's report, the accuracy.

    Raises:
        TilebeamError: it failed.
    """
    screen = console.out()
    screen.print(Rule(title, style="bold"))
    screen.print("tilebeam " + shlex.join(words), style="dim", soft_wrap=True, markup=False, highlight=False)
    with redirect_stdout(io.StringIO()) if words[0] == "eval" else nullcontext() as printed:
        code = cli.app(words, standalone_mode=False)
    if code:
        raise TilebeamError(f"tilebeam {words[0]} ended with status {code}.")
    if printed is not None:
        text = printed.getvalue().partition("\nFigures:")[0]
        screen.print(Markdown(text) if screen.is_terminal else text, soft_wrap=True, markup=False)


def demo(o: argparse.Namespace, folder: Path) -> None:
    """Run all of it; `folder` is for what evaluations leave."""
    screen = console.out()
    model = demo_model.obtain(o.cache, screen, random=o.random_model)
    file = os.path.relpath(model.path)
    screen.print(
        f"[bold]model[/bold]  {model.name}: {model.made_of}; {file} ({model.path.stat().st_size / 1e6:.0f} MB)"
    )
    threads = ["-t", str(o.threads)] if o.threads else []
    common = ["--device", o.device, "--seeds", "1", "-np", str(max(16, o.n)), *threads]
    drawn = ["--items", str(o.problems), "--item-seed", str(o.seed), "--budget", f"1,{o.n}"]
    products = ["eval", "-m", f"model={file}", *TASK, *drawn, "-c", "4096", *common, "-o", str(folder / "products")]
    run(f"{o.problems} fresh problems, {o.n} samples of each", products)
    if not model.trained:
        screen.print("[yellow]The model is random: these answers are noise.[/yellow]")
    items = folder / "expressions.jsonl"
    tiny_world.write_items(items, 4 if o.quick else 40, o.seed)
    reasoner = tiny_world.references.REASONERS[1]
    tiny = ["--budget", "1,4" if o.quick else "1,4,16", *common, "-o", str(folder / "tiny")]
    run("search with a process reward model", [*tiny_world.command((reasoner,), "q8_0", items), *tiny])
    n_gen, repetitions = ("16", "2") if o.quick else ("32", "5")
    sequences = ",".join(map(str, sorted({1, o.n})))
    run("decoding", ["bench", "-m", file, "-p", "0", "-n", n_gen, "-npl", sequences, "-r", repetitions, *threads])


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="demo.py", description="Search with a small real model, and its throughput.")
    p.add_argument("--problems", type=int, help="fresh problems (default 12; 10 with --quick)")
    p.add_argument("-N", "--n-samples", dest="n", type=int, default=16, help="candidates per problem (default 16)")
    p.add_argument("--device", choices=("npu", "cpu"), default="npu", help="where the search runs")
    p.add_argument("--threads", "-t", type=int, help="default: one per CPU")
    p.add_argument("--seed", type=int, help="repeat a run (default: new problems every time)")
    p.add_argument("--quick", action="store_true", help="fewer problems, shorter measurement")
    p.add_argument("--cache", type=Path, default=ROOT / "build" / "demo", help="where model files are kept")
    p.add_argument("--random-model", action="store_true", help="use the random model even if gemma-3-270m is there")
    o = p.parse_args(argv)
    o.problems = o.problems if o.problems is not None else 10 if o.quick else 12
    if not 1 <= o.problems <= 200:
        p.error("--problems must be between 1 and 200")
    if not 2 <= o.n <= 256:
        p.error("-N must be between 2 and 256")
    if o.seed is None:
        o.seed = secrets.randbelow(10**6)
    return o


def main(argv: list[str] | None = None) -> int:
    """Exit status; what goes wrong is one sentence on stderr."""
    options = _arguments(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            demo(options, Path(folder))
    except (TilebeamError, NpuError, OSError, ValueError) as error:
        if os.environ.get("TILEBEAM_DEBUG"):
            raise
        console.err().print(Text.assemble(("demo: ", "bold red"), str(error)), soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.err().print("interrupted")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
