"""The log of an evaluation: a JSONL file that only grows, whose every line stands for work that need not be repeated.

The first line is the header: the setting and its digest. Every further line is a finished unit. A process that is
killed while it writes leaves a torn last line, which is cut off when the log is opened again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from tilebeam.errors import TilebeamError
from tilebeam.evaluation.config import differences
from tilebeam.gguf.whole_file import naming

FORMAT = 1
Record = dict[str, Any]


class Named(Protocol):
    """What all records of a log depend on."""

    @property
    def digest(self) -> str:
        """Return the digest of all of it."""
        ...

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON, which also shows what differs."""
        ...


class Log:
    """An evaluation's log, open for one process.

    Args:
        path: the file; made if it is not there.
        setting: of the evaluation.

    Raises:
        TilebeamError: the log is of another setting (says what differs), is used by another process, or is damaged.
    """

    def __init__(self, path: Path, setting: Named) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b")  # noqa: SIM115 - it stays open
        try:
            self._lock()
            self._read(setting)
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TilebeamError(f"Another process is writing {self.path}.") from None

    def _read(self, setting: Named) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.splitlines()
        objects: list[Record] = []
        for number, line in enumerate(lines, 1):
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                found = None
            if not isinstance(found, dict) or (objects and not isinstance(found.get("unit"), str)):
                raise TilebeamError(
                    f"{self.path} line {number} is damaged: it is no record. Delete the line to run its unit again."
                )
            objects.append(found)
        if len(whole) < len(content):  # torn while it was written
            self._file.truncate(len(whole))
        header = objects[0] if objects else None
        if header is not None and (header.get("tilebeam_eval") != FORMAT or not {"digest", "setting"} <= header.keys()):
            raise TilebeamError(f"{self.path} is not a log of this version of tilebeam eval.")
        if header is None or (len(objects) == 1 and header["digest"] != setting.digest):
            # Nothing was finished: what went wrong at once may be set right by another setting.
            self._file.truncate(0)
            self._append({"tilebeam_eval": FORMAT, "digest": setting.digest, "setting": setting.as_dict()})
            return
        changed = [] if header["digest"] == setting.digest else differences(header["setting"], setting.as_dict())
        if changed:
            raise TilebeamError(
                f"{self.path} was begun with another setting: {'; '.join(changed)}. Use another --out, or the old "
                "setting."
            )
        for record in objects[1:]:
            self.records.setdefault(record["unit"], record)

    def add(self, record: Record) -> None:
        """Keep a finished unit: it is on the disk when this returns. One that is there already stays as it is."""
        if record["unit"] not in self.records:
            self._append(record)
            self.records[record["unit"]] = record

    def _append(self, record: Mapping[str, Any]) -> None:
        with naming(self.path):
            self._file.seek(0, os.SEEK_END)
            self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file, which another process may take then."""
        with naming(self.path):  # what found no room before is tried once more
            self._file.close()

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def timeless(value: Any) -> Any:
    """Copy a record without what differs from run to run: everything under a key "seconds"."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k != "seconds"}
    if isinstance(value, list):
        return [timeless(v) for v in value]
    return value
