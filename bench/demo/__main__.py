"""What `make demo` runs: a small real model before and after a search, on your machine.

    python -m bench.demo [--large] [--quick] [--seed 1] [--model FILE] [-t N]

1. Five small functions: one greedy answer against the best of 8 by the examples in the docstring, hidden tests beside.
2. A word problem: 16 answers vote, weighted by a reward head of this repository; the page of the search is written.
3. Two clocks: 16 samples on llama.cpp's CPU backend and on Tilebeam.
4. A question of yours, where stdin is a terminal.

The model, Qwen2.5-Coder-0.5B-Instruct (Apache-2.0, 491 MB), is fetched once. Where that fails, a toy model of this
repository searches in a world of arithmetic instead (bench/tiny). --large runs the 1.5B beside it (1.1 GB).
"""

from __future__ import annotations

import argparse
import io
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout, suppress
from pathlib import Path

import tilebeam
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from tilebeam import NpuError, TilebeamError
from tilebeam.cli import console
from tilebeam.cli import main as cli
from tilebeam.outputs import Progress
from tilebeam.sandbox import need_confinement

from bench import tiny_world
from bench.demo import functions
from bench.lib import ROOT
from bench.real.sources import FILES, MODELS, fetched

PAGE = ROOT / "build" / "demo" / "votes.html"
HEAD = ROOT / "bench" / "real" / "heads" / "0.5B.gguf"
PROBLEM = (
    "Weng earns $12 an hour for babysitting. Yesterday, she just did 50 minutes of babysitting. How much did she earn?"
)
ANSWER = 10
SAMPLES = 16


def part(title: str) -> None:
    console.out().print("", Rule(title, style="bold"))


def command(words: list[str]) -> None:
    """Show one of Tilebeam's commands and run it; `TilebeamError` if it failed."""
    console.out().print("tilebeam " + shlex.join(words), style="dim", soft_wrap=True, markup=False)
    if code := cli.app(words, standalone_mode=False):
        raise TilebeamError(f"tilebeam {words[0]} ended with status {code}.")


def write_functions(models: list[Path], o: argparse.Namespace) -> None:
    names = list(functions.FUNCTIONS)[: 2 if o.quick else 5]
    part(f"1. {len(names)} functions, judged by tests that the model is not shown")
    need_confinement()
    room = {"n_ctx": 8192, "n_seq_max": functions.BUDGET, "threads": o.threads}
    with ExitStack() as stack:
        lms = [stack.enter_context(tilebeam.load(model, **room)) for model in models]
        functions.race(lms, names, o.seed, console.out())


def vote(models: list[Path], o: argparse.Namespace) -> None:
    part("2. A word problem: 16 answers, and a vote")
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    head = ["--reward-head", os.path.relpath(HEAD)] if o.model is None else []
    limit = ["-n", "32"] if o.quick else []
    words = [*voting(), *asked(models[0], o), *head, *limit, "-N", str(SAMPLES), "--html", os.path.relpath(PAGE)]
    command([*words, "-p", PROBLEM])
    console.out().print(f"right is {ANSWER}; all answers and votes, for a browser: [bold]{PAGE}", soft_wrap=True)


def asked(model: Path, o: argparse.Namespace) -> list[str]:
    return ["-m", os.path.relpath(model), "--seed", str(o.seed), *(["-t", str(o.threads)] if o.threads else [])]


def voting() -> list[str]:
    """Let answers vote, and programs in them where they can be confined."""
    with suppress(TilebeamError):
        need_confinement()
        return ["vote", "--programs"]
    return ["vote"]


def clocks(models: list[Path], o: argparse.Namespace) -> None:
    """Time the same samples on both backends, each after a warm-up, one after the other."""
    tokens = 8 if o.quick else 64
    part(f"3. Two clocks: {SAMPLES} samples of {tokens} tokens each")
    screen, rows = console.out(), {"cpu": "", "npu": ""}
    names = {"cpu": "llama.cpp's CPU backend", "npu": "Tilebeam"}
    params = tilebeam.SamplingParams(n=SAMPLES, max_tokens=tokens, ignore_eos=True, seed=o.seed)

    def table() -> Table:
        shown = Table("backend", "time")
        for device, cell in rows.items():
            shown.add_row(names[device], cell)
        return shown

    with Live(table(), console=screen, auto_refresh=False) as live:
        for device in ("cpu", "npu"):

            def tick(state: Progress, device: str = device) -> bool:
                speed = state.tokens / max(state.seconds, 1e-9)
                rows[device] = f"{state.seconds:5.1f} s, {state.tokens:5} tokens, {speed:.0f} tokens/s"
                live.update(table(), refresh=screen.is_terminal)
                return True

            with tilebeam.load(models[0], device, n_seq_max=SAMPLES, threads=o.threads) as lm:
                prompt = lm.chat_prompt([{"role": "user", "content": "Tell me a story about a lighthouse."}])
                lm.generate([prompt], tilebeam.SamplingParams(n=SAMPLES, max_tokens=2, ignore_eos=True))
                lm.generate([prompt], params, progress=tick)


def your_question(models: list[Path], o: argparse.Namespace) -> None:
    """Ask the person: questions with a number are voted on, of other texts the best is shown."""
    part("4. Your question")
    while question := input("a question, or nothing to end > ").strip():
        method = voting() if any(c.isdigit() for c in question) else ["best-of-n"]
        with suppress(TilebeamError):  # the command has said what was wrong
            command([*method, *asked(models[0], o), "-N", "8", "-p", question])


def toy(o: argparse.Namespace, folder: Path, screen: Console) -> None:
    """Search with a tiny model of the repository, guided by its process reward model, with an exact checker."""
    part("a toy of 0.5 million parameters, and searches under a reward model")
    tiny_world.write_items(folder / "expressions.jsonl", 4 if o.quick else 40, o.seed)
    words = tiny_world.command((tiny_world.references.REASONERS[1],), "q8_0", folder / "expressions.jsonl")
    words += ["--budget", "1,4" if o.quick else "1,4,16", "--seeds", "1", "-np", "16", "-o", str(folder / "tiny")]
    with redirect_stdout(io.StringIO()) as printed:
        command(words)
    text = printed.getvalue().partition("\nFigures:")[0]
    screen.print(Markdown(text) if screen.is_terminal else text, soft_wrap=True, markup=False)


def demo(o: argparse.Namespace) -> int:
    """Run all of it; how many parts failed."""
    screen = console.out()
    try:
        names = ["0.5B", "1.5B"] if o.large else ["0.5B"]
        models = [o.model] if o.model else [fetched(MODELS[name], FILES) for name in names]
    except (TilebeamError, OSError) as error:
        screen.print(f"[yellow]Without the instruct model:[/yellow] {error}", soft_wrap=True)
        with tempfile.TemporaryDirectory() as folder:
            toy(o, Path(folder), screen)
        return 0
    for model in models:
        screen.print(f"[bold]model[/bold]  {os.path.relpath(model)} ({model.stat().st_size / 1e6:.0f} MB)")
    parts: list[Callable[[list[Path], argparse.Namespace], None]] = [write_functions, vote, clocks]
    failed = 0
    for run in [*parts, *([your_question] if sys.stdin.isatty() else [])]:
        try:
            run(models, o)
        except (TilebeamError, NpuError) as error:
            tell(error)
            failed += 1
    return failed


def tell(error: Exception) -> None:
    if os.environ.get("TILEBEAM_DEBUG"):
        raise error
    console.err().print(Text.assemble(("demo: ", "bold red"), str(error)), soft_wrap=True)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="make demo DEMO_ARGS=..", description="A small model and searches.")
    p.add_argument("--large", action="store_true", help="also the 1.5B, which is fetched (1.1 GB)")
    p.add_argument("--quick", action="store_true", help="two functions, short texts")
    p.add_argument("--seed", type=int, default=1, help="of samples (default 1)")
    p.add_argument("--model", type=Path, help="another instruct model, a GGUF file; it votes without a reward head")
    p.add_argument("--threads", "-t", type=int, help="default: one per CPU")
    o = p.parse_args(argv)
    if o.model is not None and (o.large or not o.model.is_file()):
        p.error(f"--model {o.model}: " + ("--large is for the demo's own models" if o.large else "no such file"))
    return o


def main(argv: list[str] | None = None) -> int:
    """Exit status; what goes wrong is one sentence on stderr."""
    options = _arguments(argv)
    try:
        return min(demo(options), 1)
    except (TilebeamError, NpuError, OSError, ValueError) as error:
        tell(error)
        return 1
    except (KeyboardInterrupt, EOFError):
        console.err().print("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
