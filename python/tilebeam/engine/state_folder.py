"""A folder with the KV cells of many texts, which outlive the process that read them.

Each text is a file of its own (see saved_state.py), named by what made its cells and by its tokens: models share a
folder, a text that is there already is not written again, and a writer that is killed leaves all others as they were.
What is no regular file is not touched.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tilebeam.engine.kv_cache import PrefixCache, Sequence, common_prefix
from tilebeam.engine.saved_state import VERSION, DamagedState, SavedState, tokens_in
from tilebeam.errors import TilebeamError
from tilebeam.gguf.whole_file import remove_leftovers

# Bytes of a folder's files where nothing else is said.
STATE_LIMIT = 4 << 30
# Texts with fewer tokens that no other text has are read anew as fast.
LEAST = 32
_TICK = 10_000_000  # nanoseconds that every file system tells apart
_NAME = re.compile(r"([0-9a-f]{16})-[0-9a-f]{16}\.state")


class StateFolder:
    """The texts of one model in a folder.

    Args:
        path: the folder, made if it is missing.
        made_by: what makes the cells: the model, its kind of cache, and the llama.cpp, whose bytes of a sequence
            another release may read wrongly.
        skipped: told of files that cannot be used, and why; damaged ones are deleted.

    Raises:
        TilebeamError: it cannot be made or written to.
    """

    def __init__(self, path: str | os.PathLike[str], made_by: str, skipped: Callable[[str], None]) -> None:
        self.path = state_folder(path)
        self._maker = _digest(f"{made_by} {VERSION}".encode())
        self._skipped = skipped

    def write(self, texts: list[tuple[list[int], Callable[[], npt.NDArray[np.uint8]]]], limit: int) -> int:
        """Write texts, and delete the oldest files of the folder beyond a limit.

        Args:
            texts: tokens and what gives their cells; the most recently used first.
            limit: bytes of all files.

        Returns:
            How many of the texts are in the folder then.

        Raises:
            TilebeamError: a file cannot be written.
        """
        now, room, kept = time.time_ns(), limit, set[Path]()
        for i, (tokens, cells) in enumerate(texts):
            path, when = self._file(tokens), (now - i * _TICK, now - i * _TICK)
            try:
                if not _is_file(path):
                    continue  # `_own` tells of it
                os.utime(path, ns=when)  # it is there, and was used
            except FileNotFoundError:
                state = SavedState(self._maker, np.asarray(tokens, np.int32), cells())
                if (size := state.tokens.nbytes + state.cells.nbytes) > room:
                    continue
                self._delete_oldest(limit - size, kept)
                state.write(path)
                with contextlib.suppress(FileNotFoundError):  # another process tidies up
                    os.utime(path, ns=when)
            with contextlib.suppress(FileNotFoundError):
                room -= path.stat().st_size
            kept.add(path)
        self._tidy([tokens for tokens, _ in texts], kept, limit)
        return sum(path.exists() for path in kept)

    def _tidy(self, texts: list[list[int]], kept: set[Path], limit: int) -> None:
        """Delete what is contained in other texts, or too much."""
        for path, tokens in self._own():
            if path not in kept and any(common_prefix(tokens, text) == len(tokens) for text in texts):
                path.unlink(missing_ok=True)
        self._delete_oldest(limit, set())
        remove_leftovers(self.path, _NAME.pattern)

    def _delete_oldest(self, limit: int, spared: set[Path]) -> None:
        """Delete the files of all models that were used longest ago, until the others have at most so many bytes."""
        with contextlib.suppress(FileNotFoundError):  # another process tidies up
            paths = [path for path in self.path.iterdir() if _NAME.fullmatch(path.name)]
            files = [(path.stat(), path) for path in paths if _is_file(path)]
            total = sum(about.st_size for about, _ in files)
            for about, path in sorted(files, key=lambda file: file[0].st_mtime_ns):
                if total > limit and path not in spared:
                    path.unlink(missing_ok=True)
                    total -= about.st_size

    def read(self, tokens: int, texts: int) -> Iterator[SavedState]:
        """Read the texts used last, as many as there is room for, the one used last in the end.

        Args:
            tokens, texts: room.
        """
        chosen: list[Path] = []
        for path, ids in self._own():
            if len(ids) <= tokens and len(chosen) < texts:
                chosen.append(path)
                tokens -= len(ids)
        for path in reversed(chosen):
            try:
                state = SavedState.read(path)
                if state.maker != self._maker or path != self._file(state.tokens.tolist()):
                    raise DamagedState(f"{path} holds another text or another model's.")
            except TilebeamError as error:
                self._skip(path, error)
                continue
            yield state

    def _own(self) -> Iterator[tuple[Path, list[int]]]:
        """Yield this model's files with their tokens, the one used last first."""
        found = []
        for path in self.path.iterdir():
            if (name := _NAME.fullmatch(path.name)) and name[1] == self._maker:
                with contextlib.suppress(FileNotFoundError):
                    if _is_file(path):
                        found.append((path.stat().st_mtime_ns, path))
                    else:
                        self._skipped(f"{path} is not a regular file: delete it.")
        for _, path in sorted(found, reverse=True):
            try:
                tokens = tokens_in(path)
            except TilebeamError as error:
                self._skip(path, error)
                continue
            yield path, tokens

    def _skip(self, path: Path, error: TilebeamError) -> None:
        """Tell of a file that cannot be used, and make its name free for one that can."""
        if isinstance(error, DamagedState):
            path.unlink(missing_ok=True)
            error = DamagedState(f"{error} It was deleted.")
        self._skipped(str(error))

    def _file(self, tokens: list[int]) -> Path:
        return self.path / f"{self._maker}-{_digest(np.asarray(tokens, np.int32).tobytes())}.state"


def state_folder(path: str | os.PathLike[str]) -> Path:
    """Return a folder for saved texts, made if it is missing: for this user only, as it tells what was asked.

    Raises:
        TilebeamError: it cannot be made or written to.
    """
    folder = Path(path)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise TilebeamError(f"{path} cannot be made a folder: {error.strerror or error}.") from None
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise TilebeamError(f"{path} is a folder that cannot be written to.")
    return folder


def worth_saving(kv: PrefixCache) -> list[Sequence]:
    """Return the kept texts that no other one holds nearly whole, the most recently used first. Of texts with
    snapshots, which a file does not have, the beginning up to the last chosen one becomes a text of its own, as far as
    there are sequences."""
    for seq in reversed(kv.cached):
        length = max((n for n, s in seq.snapshots.items() if n < len(seq) and not s.passing), default=0)
        if length and kv.free_ids and all(seq.tokens[:length] != other.tokens for other in kv.cached):
            fork = kv.open_from(seq, length)
            (kv.retire if len(fork) else kv.close)(fork)
    chosen: list[Sequence] = []
    for seq in sorted(kv.cached, key=len, reverse=True):
        shared = max((kv.will_fork(c, len(c), common_prefix(c.tokens, seq.tokens)) for c in chosen), default=0)
        if len(seq) - min(shared, len(seq)) >= LEAST:
            chosen.append(seq)
    return [seq for seq in reversed(kv.cached) if seq in chosen]


def _is_file(path: Path) -> bool:
    """Return whether this is a regular file, and no link to one.

    Raises:
        FileNotFoundError: it is nothing.
    """
    return stat.S_ISREG(path.lstat().st_mode)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
