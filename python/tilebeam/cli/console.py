"""Consoles, progress bars, and errors as one sentence, for all commands.

Results go to stdout, everything else (progress, notes, errors) to stderr, so that output can be piped.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from tilebeam.errors import CacheWarning, PlacementWarning, TilebeamError

if TYPE_CHECKING:
    from tilebeam.model.lm import LM
    from tilebeam.outputs import Progress as Generation
    from tilebeam.scoring.own_reward import OwnReward
    from tilebeam.scoring.reward_model import RewardModel

P = ParamSpec("P")
R = TypeVar("R")

# Width of output that nobody watches (a pipe, a log): wide enough for tables, narrow enough to read.
_PIPE_WIDTH = 100
# Arguments that sentences of the library name, and what the command line calls them.
_OPTIONS = {
    "n_ctx": "-c",
    "n_seq_max": "-np",
    "n_batch": "-b",
    "n_ubatch": "-ub",
    "max_tokens": "-n",
    "n_gpu_layers": "-ngl",
    "device": "--device",
    "memory_limit": "--memory-limit",
    "cache_ram": "--cache-ram",
    "packed_cache": "--packed-cache",
    "swa_full": "--swa-full",
    "type_k": "-ctk",
    "type_v": "-ctv",
    "overwrite": "--force",
}
# Between lines of progress where no bar can be drawn.
_SECONDS_BETWEEN_LINES = 10.0
# By how fast it went so long ago the time that is left is told; a step may take minutes.
_SECONDS_OF_SPEED = 1800.0


def out() -> Console:
    """Return the console for results."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, soft_wrap=False, highlight=False)


def err() -> Console:
    """Return the console for everything else."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else _PIPE_WIDTH, highlight=False)


def print_markdown(lines: Iterable[str]) -> None:
    """Show Markdown on a terminal; write it as it is into a pipe."""
    from rich.markdown import Markdown

    screen, text = out(), "\n".join(lines)
    if screen.is_terminal:
        screen.print(Markdown(text))
    else:
        print(text)


def fail(sentence: str) -> NoReturn:
    """Print one sentence to stderr and leave with exit status 1."""
    console = err()
    said = as_options(" ".join(sentence.split()).removeprefix("tilebeam: "))
    console.print(Text.assemble(("tilebeam: ", "bold red"), said), soft_wrap=True)
    raise typer.Exit(1)


def as_options(sentence: str) -> str:
    """Rewrite what a sentence of the library says of arguments: for the shell they are options."""

    def option(match: re.Match[str]) -> str:
        return f"{_OPTIONS[match[1]]} {match[3]}" if match[3] not in (None, "True") else _OPTIONS[match[1]]

    # device and overwrite are words, too: only before a value
    names = "|".join(name if "_" in name else f"{name}(?==)" for name in _OPTIONS)
    return re.sub(rf'(?<![\w.-])({names})(?:=("?)([\w-]+)\2)?(?![\w=])', option, sentence)


def sentences(command: Callable[P, R]) -> Callable[P, R]:
    """Turn the exceptions of a command into one sentence and exit status 1; TILEBEAM_DEBUG=1 shows the traceback.
    Tilebeam's warnings become a sentence, too."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with _warnings_as_sentences():
                result = command(*args, **kwargs)
                sys.stdout.flush()  # at exit its error would have no sentence
                return result
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            err().print("interrupted")
            raise typer.Exit(130) from None
        except Exception as error:
            if os.environ.get("TILEBEAM_DEBUG"):
                raise
            fail(_sentence(error))

    return run


@contextmanager
def _warnings_as_sentences() -> Iterator[None]:
    """Print `PlacementWarning` and `CacheWarning` without the line of code that they came from, within this block."""
    with warnings.catch_warnings():
        former = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if not issubclass(category, PlacementWarning | CacheWarning):
                former(message, category, *where, **more)
                return
            err().print(Text.assemble(("tilebeam: ", "bold yellow"), as_options(str(message))), soft_wrap=True)

        warnings.showwarning = show
        yield


def _sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        from tilebeam.gguf.whole_file import end_output, os_error

        end_output(error)
        return f"{os_error(error)}."
    if isinstance(error, (TilebeamError, OSError, ValueError, ImportError)) and str(error):
        return str(error).replace("load the model with a larger n_ctx", "give more of it with -c")
    return f"Unexpected {type(error).__name__}: {error}. TILEBEAM_DEBUG=1 shows where."


class _Lines(Progress):
    """Progress where nobody's terminal can draw a bar: a line now and then.

    Args:
        what: how lines begin.
        every_part: a line also whenever the description changes.
    """

    def __init__(self, what: str, console: Console, every_part: bool) -> None:
        super().__init__(console=console, disable=True, speed_estimate_period=_SECONDS_OF_SPEED)
        self._what = what
        self._every_part = every_part
        self._part = ""
        self._said = time.monotonic()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Do what a bar does, or print a line."""
        super().update(task_id, **changes)
        self._say(self._tasks[task_id])

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Do what a bar does, or print a line."""
        super().advance(task_id, advance)
        self._say(self._tasks[task_id])

    def _say(self, task: Task) -> None:
        new = self._every_part and task.description != self._part
        now = time.monotonic()
        if not new and now - self._said < _SECONDS_BETWEEN_LINES:
            return
        self._said, self._part = now, task.description
        count = f"{task.completed:g}/{task.total:g}" if task.total is not None else f"{task.completed:g}"
        left = "" if task.time_remaining is None else f"{timedelta(seconds=round(task.time_remaining))} left"
        words = [self._what, task.description, count, left, str(task.fields.get("note", ""))]
        self.console.print(" ".join(filter(None, words)), style="dim", markup=False, soft_wrap=True)


def bar(what: str, *, every_part: bool = False) -> Progress:
    """Make a progress bar on stderr that vanishes when done; where stderr is no terminal, it prints a line every ten
    seconds.

    Args:
        what: how it begins.
        every_part: where there are lines: one also at the beginning of each part (task description).
    """
    console = err()
    if not console.is_terminal:
        return _Lines(what, console, every_part)
    return Progress(
        TextColumn(f"{what} {{task.description}}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        transient=True,
        speed_estimate_period=_SECONDS_OF_SPEED,
        redirect_stdout=sys.stdout.isatty(),  # a piped stdout must not end up on the bar's console
    )


@contextmanager
def generating(what: str, total: int) -> Iterator[Callable[[Generation], bool]]:
    """Show a bar over samples; yields a progress hook for `LM.generate` and for searches, which shows tokens per
    second."""
    with bar(what) as progress:
        task = progress.add_task("", total=total, note="")

        def hook(state: Generation) -> bool:
            speed = state.tokens / state.seconds if state.seconds > 0 else 0.0
            note = f"{state.running} running, {state.tokens} tokens, {speed:.1f} t/s"
            progress.update(task, completed=state.finished, total=state.total, note=note)
            return True

        yield hook


@contextmanager
def loading(path: str) -> Iterator[Callable[[float], None] | None]:
    """Show a bar while a model loads, on a terminal; yields what to call with the share that is done."""
    console = err()
    if not console.is_terminal:
        yield None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"loading {os.path.basename(path)}", total=1.0)
        yield lambda share: bar.update(task, completed=share)


def about(lm: LM) -> str:
    """Describe a loaded model in a line."""
    from tilebeam.model.device_choice import summary

    info = lm.info
    how = [f"{info.threads} thread{'s' * (info.threads > 1)}", info.kernels.upper().replace("AVX512", "AVX-512 ")]
    how += [info.executor] if info.executor not in (None, "thread") else []
    if len(info.layers) > 1:
        how.append(f"layers {'+'.join(map(str, info.layers))} on {len(info.layers)} devices")
    how += [summary(info.matrices)] if info.device == "npu" and info.device_share < 1 else []
    where = f"{'tilebeam' if info.device == 'npu' else 'cpu (stock)'}: {', '.join(filter(None, how))}"
    form = " (repacked)" if info.repacked else ""
    form += "".join(f" + {path}" if scale == 1 else f" + {path} x {scale:g}" for path, scale in info.lora)
    return f"{lm.description}{form}, {where}, {info.n_ctx} cells, {info.n_seq_max} slot{'s' * (info.n_seq_max > 1)}"


def about_reward(scorer: RewardModel | OwnReward) -> str:
    """Describe a loaded reward model in a line."""
    return f"{about(scorer.lm)}; {scorer.about}"
