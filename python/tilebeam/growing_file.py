"""A file of JSON lines that only grows, each of which stands for work that need not be repeated.

A process that is killed while it writes leaves a torn last line, which is cut off when the file is opened again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from tilebeam.errors import TilebeamError
from tilebeam.gguf.whole_file import naming

Record = dict[str, Any]


class GrowingFile:
    """The file, open for one process.

    Args:
        path: the file; made, with its folder, if it is not there.
        afresh: what is in it is thrown away.

    Attributes:
        lines: what it held when it was opened.
        torn: a line that was not written to its end was cut off.

    Raises:
        TilebeamError: another process is writing it, or a line is no JSON object.
    """

    def __init__(self, path: Path, *, afresh: bool = False) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b")  # noqa: SIM115 - it stays open
        try:
            self._lock()
            if afresh:
                self._file.truncate(0)
            self._file.seek(0)
            content = self._file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self.lines = [self._line(number, line) for number, line in enumerate(whole.splitlines(), 1)]
            self.torn = len(whole) < len(content)
            if self.torn:
                self._file.truncate(len(whole))
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TilebeamError(f"Another process is writing {self.path}.") from None

    def _line(self, number: int, line: bytes) -> Record:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not self._is_record(number, found):
            raise TilebeamError(
                f"{self.path} line {number} is damaged: it is no record. Delete the line to run its part again."
            )
        return cast(Record, found)

    def _is_record(self, number: int, found: Any) -> bool:  # noqa: ARG002
        return isinstance(found, dict)

    def clear(self) -> None:
        """Throw away what is in it."""
        self._file.truncate(0)
        self.lines = []

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a line: it is on the disk when this returns.

        Raises:
            OSError: with the file's name, also where there is no room.
        """
        with naming(self.path):
            self._file.seek(0, os.SEEK_END)
            self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file, which another process may take then."""
        with naming(self.path):  # what found no room before is tried once more
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Tell what keeps a file that was begun with the old setting from going on with the new one, one phrase each.

    Methods that were added do not: they add units and change none.
    """
    found: list[str] = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b and not (key == "methods" and set(a or ()) <= set(b or ())):
            found.append(f"{prefix}{key} was {json.dumps(a)}, is {json.dumps(b)}")
    return found
