"""Coverage-guided fuzzing of the GGUF reader and the packer, by atheris (libFuzzer for Python; pip install atheris).

    export PYTHONPATH=tests/kits
    python tests/fuzz/repack.py NEW_CORPUS tests/fuzz/gguf_corpus -max_total_time=1800      look for new inputs
    python tests/fuzz/repack.py --minimize NEW_CORPUS                                       keep few of them

New inputs go to NEW_CORPUS; all other arguments are libFuzzer's. A finding ends the run and is written to the current
folder as crash-*, timeout-* or oom-*. ``--minimize`` chooses the smallest inputs that together reach every line of
gguf_tools that the corpus reaches and writes them into tests/fuzz/gguf_corpus, which test_gguf_fuzz.py replays.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "gguf_corpus"

# libFuzzer's own defaults allow 20 minutes and 2 GiB; a GGUF of 64 KiB must need next to nothing.
LIMITS = ["-max_len=65536", "-timeout=20", "-rss_limit_mb=1024", "-len_control=0"]


def fuzz(arguments: list[str]) -> None:
    """Run libFuzzer until it finds something or is told to stop."""
    import atheris

    with atheris.instrument_imports(include=["tilebeam.gguf"]):
        import gguf_fuzz
    folder = gguf_fuzz.scratch()

    def one(data: bytes) -> None:
        gguf_fuzz.check(data, Path(folder.name))

    if not CORPUS.is_dir() and not any(Path(a).is_dir() and any(Path(a).iterdir()) for a in arguments):
        for i, seed in enumerate(gguf_fuzz.seeds()):
            (Path(arguments[0]) / f"seed-{i}").write_bytes(seed)
    atheris.Setup([sys.argv[0], *LIMITS, *arguments], one)
    atheris.Fuzz()


def lines_of(data: bytes, folder: Path) -> set[tuple[str, int]]:
    """Lines of tilebeam.gguf that an input reaches."""
    import gguf_fuzz

    reached: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        if "tilebeam/gguf/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            reached.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    sys.settrace(trace)
    threading.settrace(trace)  # for those that the packer starts
    try:
        result = gguf_fuzz.check(data, folder)
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    return reached | {(result, 0)}


def minimize(folders: list[str]) -> None:
    """A small corpus with the same coverage: greedily, the input with the most new lines for its size."""
    import gguf_fuzz

    files = [p for folder in (CORPUS, *map(Path, folders)) if folder.is_dir() for p in folder.iterdir()]
    contents = {p.read_bytes() for p in files} | set(gguf_fuzz.seeds())
    with gguf_fuzz.scratch() as name:
        reach = {data: lines_of(data, Path(name)) for data in sorted(contents, key=len)}
    missing, chosen = set().union(*reach.values()), []
    while missing:
        best = max(reach, key=lambda d: (len(reach[d] & missing), -len(d)))
        chosen.append(best)
        missing -= reach[best]
    CORPUS.mkdir(exist_ok=True)
    for old in CORPUS.iterdir():
        old.unlink()
    for data in chosen:
        (CORPUS / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    print(f"{len(chosen)} of {len(contents)} inputs kept, {sum(map(len, chosen))} bytes")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--minimize"]:
        minimize(sys.argv[2:])
    else:
        fuzz(sys.argv[1:])
