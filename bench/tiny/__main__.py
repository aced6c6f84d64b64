"""All of the tiny world anew: `python -m bench.tiny`, from the repository's root.

Trains the reasoners one after the other, then the reward model on their samples, and writes the GGUF files and the
reference logits into bench/tiny/models. Checkpoints and logs lie in build/tiny; what lies there already is not trained
again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from .export import KINDS, export, reference_logits
from .model import SHAPES, load_checkpoint
from .references import LOGITS, MODELS, PRM, TEXTS, as_read

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
}


def train(work: Path, python: str = sys.executable) -> None:
    """Train what is not there; each in a process of its own, its log beside its checkpoint."""
    work.mkdir(parents=True, exist_ok=True)
    reasoners = [work / f"{size}.pt" for size in SHAPES]
    jobs = {path: ["bench.tiny.train", path.stem, str(path)] for path in reasoners}
    for name, start, options in STAGES:
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
    references: dict[str, Any] = {}
    for name, wanted in kinds.items():
        model = load_checkpoint(work / f"{name}.pt")
        what = "Process reward model (tag ?, labels + and -)" if name == PRM else "Reasoner"
        for kind in wanted:
            path = out / f"{name}-{kind}.gguf"
            export(model, path, kind, f"tiny arithmetic {name}", f"{what}, {model.n_params} parameters")
            print(f"{path}: {path.stat().st_size} bytes")
        for i, text in enumerate(TEXTS):
            references[f"{name}/{i}"] = reference_logits(model, as_read(name, text))
    np.savez_compressed(out / LOGITS.name, **references)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "tiny", help="checkpoints and logs")
    parser.add_argument("--out", type=Path, default=MODELS, help="GGUF files")
    parser.add_argument("--all-kinds", action="store_true", help="every model as F16, Q8_0 and Q4_0")
    options = parser.parse_args()
    train(options.work)
    kinds = dict.fromkeys(IN_REPOSITORY, tuple(KINDS)) if options.all_kinds else IN_REPOSITORY
    write_models(options.work, options.out, kinds)


if __name__ == "__main__":
    main()
