"""Looks into a model file before llama.cpp does, and remembers which files were found sound: a file is read through
once and not at every load.

A record is an empty file, named after everything that tells one state of a file from another: device, inode, size,
times of the last change of its contents and of its inode (which no program can set), what was checked, and the version
of the checks. Writing to a model file changes its record's name. Bytes that rot on the disk are not noticed: for those
there is ``verify="always"`` and ``gguf-repack verify``.

Records are kept in ``$XDG_CACHE_HOME/tilebeam/checked`` (``~/.cache/tilebeam/checked``). They count only if that folder
is the user's own and nobody else may write to it. Deleting them is always safe. Where they cannot be kept, a process
still remembers its own.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tilebeam.errors import TilebeamError
from tilebeam.model.cache_size import Cache, cache_of
from tilebeam.model.hub import missing
from tilebeam.model.load_options import Verify
from tilebeam.model.lora import CheckedAdapter, read_adapters
from tilebeam.model.placement import Weights, adapted, weights_of
from tilebeam.native.repacked import RepackedFile

if TYPE_CHECKING:
    from tilebeam.gguf import Matrix, Source

_MAPPED_ALIGNMENT = 32  # TENSOR_ALIGNMENT of ggml
_VERSION = 1  # of what the checks mean: another number makes all records void
_MOST = 512  # records kept; the oldest go first
# A file that was written to this recently may be written to again without its times changing: clocks have ticks.
_SETTLED_NS = 2_000_000_000

# llama.cpp's pooling types by number.
POOLINGS = ("none", "mean", "cls", "last", "rank")

_here: set[str] = set()  # found sound by this process


# --- the file ---------------------------------------------------------------------------------------------------------


@dataclass
class CheckedFile:
    """A model file that was found sound, and what is known of it before llama.cpp sees it.

    Attributes:
        path: of the file; of a split model, of its first part.
        architecture: the real one, also of a repacked file.
        matrices: weights that are multiplied by, and which of them the device takes.
        weights: what devices must hold of it.
        cache: what llama.cpp keeps of each token.
        aligned: llama.cpp can map it.
        repacked: the tiles that it holds, None for an ordinary file.
        adapters: LoRA adapters that fit it.
        pooling: how the file says that a text's hidden states become one value, a name of llama.cpp's pooling types;
            None: it does not say.
        causal: a token sees those before it only.
        n_ctx_train: tokens of a text that it was trained for, 0 if it does not say.
    """

    path: str
    architecture: str
    matrices: tuple[Matrix, ...]
    weights: Weights
    cache: Cache
    aligned: bool
    repacked: RepackedFile | None = None
    adapters: list[CheckedAdapter] = field(default_factory=list)
    pooling: str | None = None
    causal: bool = True
    n_ctx_train: int = 0

    @property
    def generates(self) -> bool:
        """True if the model writes one token after the other. Embedding models have no logits, and llama.cpp gives what
        is in the memory, or see texts in both directions."""
        from tilebeam.gguf import WITHOUT_OUTPUT

        return self.causal and self.architecture not in WITHOUT_OUTPUT


def inspect(model: str | os.PathLike[str], verify: Verify, lora: Sequence[tuple[str, float]] = ()) -> CheckedFile:
    """Read a model's header, check all that llama.cpp relies on, and the digests of a repacked file if it is time.

    Args:
        model: the file; of a split model any part.
        verify: when to compare digests, see `tilebeam.load`.
        lora: adapters and their scales.

    Raises:
        TilebeamError: it is no model that can be loaded; names the file and what is wrong.
    """
    path = Path(model)
    if not path.exists():
        raise TilebeamError(missing(path))
    if not path.is_file():
        raise TilebeamError(f"{path} is not a file.")
    from tilebeam import gguf as gguf_tools

    try:
        with gguf_tools.open_gguf(path) as gguf:
            path = gguf.paths[0]  # of a split model any part may be named; llama.cpp wants the first
            state = State.of(gguf.fd)
            real = gguf_tools.architecture_of(gguf)
            with _once(path, state, "vocabulary", verify) as needed:
                gguf_tools.check_model(gguf, real, vocabulary=needed)
            matrices, weights, cache = gguf_tools.matrices_of(gguf), weights_of(gguf, real), cache_of(gguf, real)
            file = CheckedFile(str(path), gguf.architecture, matrices, weights, cache, _aligned(gguf))
            file.pooling, file.causal = _pooling(gguf, real), _value(gguf, f"{real}.attention.causal") is not False
            trained = _value(gguf, f"{real}.context_length")
            file.n_ctx_train = trained if isinstance(trained, int) else 0
            file.adapters = read_adapters(lora, gguf, real)
            file.weights = adapted(file.weights, [pair for adapter in file.adapters for pair in adapter.pairs])
            if gguf.architecture != gguf_tools.ARCHITECTURE:
                return file
            if not isinstance(gguf, gguf_tools.GGUFFile):
                raise gguf_tools.GGUFError(
                    "a repacked model must be one file; join its parts with llama-gguf-split --merge, or pack the "
                    "split source again, which gives one file"
                )
            manifest = gguf_tools.read_manifest(gguf)
            if verify != "never":
                with _once(path, state, "digests", verify) as needed:
                    if needed:
                        gguf_tools.verify(path, deep=False)
    except ImportError as error:
        raise TilebeamError(str(error)) from None
    except (gguf_tools.GGUFError, OSError) as error:
        raise TilebeamError(f"{path} cannot be loaded: {error}") from None
    file.repacked, file.architecture = RepackedFile.of(manifest), manifest.architecture
    return file


def _value(gguf: Source, key: str) -> object:
    found = gguf.kv.get(key)
    return None if found is None else found.value


def _pooling(gguf: Source, architecture: str) -> str | None:
    number = _value(gguf, f"{architecture}.pooling_type")
    return POOLINGS[number] if isinstance(number, int) and 0 < number < len(POOLINGS) else None


@contextmanager
def _once(path: Path, state: State, check: str, verify: Verify) -> Iterator[bool]:
    """Wrap a check of the file at `path`: yield whether it is needed, and remember that it was passed."""
    needed = verify == "always" or not known(state, check)
    yield needed
    if needed:
        remember(state, path, check)


def _aligned(gguf: Source) -> bool:
    """Tell whether llama.cpp can map the file: it asserts that ranges of the mapping begin on a multiple of 32."""
    from tilebeam.gguf import GGUFFile

    parts = [gguf] if isinstance(gguf, GGUFFile) else gguf.parts
    return all(part.alignment % _MAPPED_ALIGNMENT == 0 for part in parts)


# --- records ----------------------------------------------------------------------------------------------------------


def folder() -> Path:
    """Return the folder of this user's records."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base if os.path.isabs(base) else Path.home() / ".cache") / "tilebeam" / "checked"


@dataclass(frozen=True)
class State:
    """The marks that tell one state of a file from another, and when they were looked at."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int
    seen_ns: int

    @classmethod
    def of(cls, file_or_path: int | str | os.PathLike[str]) -> State:
        """Return the present state of an open file, or of the one that has this path."""
        seen = time.time_ns()
        file = os.stat(file_or_path)
        return cls(file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns, file.st_ctime_ns, seen)

    def record(self, check: str) -> str:
        """Name the record that this file passed a check."""
        fields = (_VERSION, check, self.device, self.inode, self.size, self.modified_ns, self.changed_ns)
        return hashlib.sha256(repr(fields).encode()).hexdigest()[:40]

    @property
    def settled(self) -> bool:
        """True if the last change is old enough for a further one to show in the times."""
        return self.seen_ns - max(self.modified_ns, self.changed_ns) >= _SETTLED_NS


def _trusted(path: Path) -> bool:
    """Return whether it is a folder that only this user can write to."""
    try:
        own = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(own.st_mode) and own.st_uid == os.geteuid() and not own.st_mode & 0o022


def known(file: State, check: str) -> bool:
    """Return whether the file in this state passed that check before."""
    name = file.record(check)
    try:
        return name in _here or (_trusted(folder()) and (folder() / name).is_file())
    except (OSError, RuntimeError):  # no home
        return False


def remember(before: State, path: str | os.PathLike[str], check: str) -> None:
    """Record that the file that was in this state before passed that check; do nothing unless `path` is it, in the same
    state."""
    name = before.record(check)
    try:
        if name != State.of(path).record(check):
            return
    except OSError:
        return
    _here.add(name)
    if not before.settled:
        return
    try:
        records = folder()
        records.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _trusted(records):
            (records / name).touch(mode=0o600)
            _prune(records)
    except (OSError, RuntimeError):
        return  # a read-only home, a full disk: the next process checks again


def _prune(records: Path) -> None:
    by_age = sorted((entry.stat().st_mtime_ns, entry.path) for entry in os.scandir(records))
    for _, record in by_age[: max(0, len(by_age) - _MOST)]:
        os.unlink(record)
