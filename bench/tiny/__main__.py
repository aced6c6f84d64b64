"""All of the tiny world anew: `python -m bench.tiny`, from the repository's root.

Trains the reasoners one after the other, then the reward model on their samples, and writes the GGUF files and the
reference logits into bench/tiny/models. Checkpoints and logs lie in build/tiny; what lies there already is not trained
again. A model named in the command is made alone: `python -m bench.tiny thinker`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .export import KINDS, export, reference_logits
from .model import SHAPES, load_checkpoint
from .references import HYBRID, LOGITS, MIXTURE, MODELS, PRM, REASONERS, TEXTS, THINKER, as_read

ROOT = Path(__file__).resolve().parents[2]
# The reward model's stages: name, what it begins as, how it is trained.
_MARKS = ("--marks", "--expressions", "2000", "--tokens")
STAGES = (
    ("prm-base", "0.5m", ()),
    ("prm-deeper", "prm-base", ("--more-layers", "2", *_MARKS, "0.9e6")),
    ("prm-longer", "prm-deeper", (*_MARKS, "3.2e6")),
    (PRM, "prm-longer", ("--marks", "--expressions", "8000", "--tokens", "6e6")),
)
IN_REPOSITORY = {  # what the tests need; the other kinds come out of `--all-kinds`
    **dict.fromkeys(SHAPES, ("q8_0", "q4_0")),
    "0.5m": ("f16", "q8_0", "q4_0"),
    PRM: ("q8_0", "q4_0"),
    **dict.fromkeys((HYBRID, MIXTURE, THINKER), ("q8_0",)),
}


def train(work: Path, wanted: Sequence[str], python: str = sys.executable) -> None:
    """Train what is not there; each in a process of its own, its log beside its checkpoint."""
    work.mkdir(parents=True, exist_ok=True)
    reasoners = [work / f"{size}.pt" for size in REASONERS]
    sizes = [size for size in SHAPES if size in wanted or (PRM in wanted and size in REASONERS)]
    jobs = {path: ["bench.tiny.train", path.stem, str(path)] for path in (work / f"{size}.pt" for size in sizes)}
    for name, start, options in STAGES if PRM in wanted else ():
        path = work / f"{name}.pt"
        began = ["--start", str(work / f"{start}.pt")]
        jobs[path] = ["bench.tiny.reward", str(path), *map(str, reasoners), *began, *options]
    for path, command in jobs.items():
        if path.exists():
            print(f"{path} is there.")
            continue
        print(f"{path.name}: see {path.with_suffix('.log')}", flush=True)
        partial = path.with_suffix(".partial")
        command = [str(partial) if part == str(path) else part for part in command]
        with path.with_suffix(".log").open("w") as log:
            subprocess.run([python, "-u", "-m", *command], check=True, stdout=log, stderr=log, cwd=ROOT)
        partial.replace(path)


def write_models(work: Path, out: Path, kinds: dict[str, tuple[str, ...]]) -> None:
    """GGUF files of the checkpoints, and the reference logits."""
    out.mkdir(parents=True, exist_ok=True)
    references: dict[str, Any] = dict(np.load(LOGITS)) if LOGITS.exists() else {}
    for name, wanted in kinds.items():
        model = load_checkpoint(work / f"{name}.pt")
        what = "Process reward model (tag ?, labels + and -)" if name == PRM else "Reasoner"
        for kind in wanted:
            path = out / f"{name}-{kind}.gguf"
            about = f"tiny arithmetic {name}", f"{what}, {model.n_params} parameters"
            export(model, path, kind, *about, chats=name == THINKER)
            print(f"{path}: {path.stat().st_size} bytes")
        for i, text in enumerate(TEXTS):
            references[f"{name}/{i}"] = reference_logits(model, as_read(name, text))
    np.savez_compressed(out / LOGITS.name, **references)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(IN_REPOSITORY)} (default: all)")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "tiny", help="checkpoints and logs")
    parser.add_argument("--out", type=Path, default=MODELS, help="GGUF files")
    parser.add_argument("--all-kinds", action="store_true", help="every model as F16, Q8_0 and Q4_0")
    options = parser.parse_args()
    wanted = options.models or list(IN_REPOSITORY)
    if unknown := set(wanted) - set(IN_REPOSITORY):
        parser.error(f"no model is called {', '.join(sorted(unknown))}")
    train(options.work, wanted)
    kinds = {name: tuple(KINDS) if options.all_kinds else IN_REPOSITORY[name] for name in wanted}
    write_models(options.work, options.out, kinds)


if __name__ == "__main__":
    main()
