"""Logs: JSONL files that only grow, whose every line stands for work that need not be repeated.

A process that is killed while it writes leaves a torn last line, which is cut off when the file is opened again. The
first line of an evaluation's log is the header: the setting and its digest. Every further line is a finished unit.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilebeam.errors import TilebeamError
from tilebeam.evaluation.config import Named, differences
from tilebeam.gguf.closing import Closing
from tilebeam.gguf.whole_file import naming

FORMAT = 1
Record = dict[str, Any]


class GrowingFile(Closing):
    """A file of records, open for one process.

    Args:
        path: the file; made, with its folder, if it is not there.
        key: all lines but the first must have a text under it; None: they need not.
        anew: what it holds is dropped.

    Attributes:
        lines: what it held when it was opened.
        torn: a line that was not written to its end was cut off.

    Raises:
        TilebeamError: the file is used by another process, is damaged, or is a device.
    """

    def __init__(self, path: Path, key: str | None = None, *, anew: bool = False) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a device may never end
            raise TilebeamError(f"{path} is not a regular file.")
        self._file = open(path, "a+b")  # noqa: SIM115 - it stays open
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if anew:
                self._file.truncate(0)
            self.lines, self.torn = self._read(key)
        except BaseException as error:
            self._file.close()
            if isinstance(error, BlockingIOError):
                raise TilebeamError(f"Another process is writing {self.path}.") from None
            raise

    def _read(self, key: str | None) -> tuple[list[Record], bool]:
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        objects: list[Record] = []
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                found = None
            if not isinstance(found, dict) or (objects and key and not isinstance(found.get(key), str)):
                raise TilebeamError(
                    f"{self.path} line {number} is damaged: it is no record. Delete the line to run its part again."
                )
            objects.append(found)
        self._file.truncate(len(whole))
        return objects, len(whole) < len(content)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record: it is on the disk when this returns."""
        with naming(self.path):
            self._file.seek(0, os.SEEK_END)
            line = json.dumps(record, ensure_ascii=False)
            self._file.write(line.encode(errors="backslashreplace") + b"\n")  # half of a pair, as JSON escapes it
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file, which another process may take then."""
        with naming(self.path):  # what found no room before is tried once more
            self._file.close()


class Log(GrowingFile):
    """An evaluation's log, open for one process.

    Args:
        path: the file; made if it is not there.
        setting: of the evaluation.

    Raises:
        TilebeamError: the log is of another setting (says what differs), is used by another process, or is damaged.
    """

    def __init__(self, path: Path, setting: Named) -> None:
        super().__init__(path, "unit")
        try:
            self.records: dict[str, Record] = {}
            self._begin(setting)
        except BaseException:
            self.close()
            raise

    def _begin(self, setting: Named) -> None:
        header = self.lines[0] if self.lines else None
        told = header and isinstance(header.get("setting"), dict) and "digest" in header
        if header is not None and (header.get("tilebeam_eval") != FORMAT or not told):
            raise TilebeamError(f"{self.path} is not a log of this version of tilebeam eval.")
        if header is None or (len(self.lines) == 1 and header["digest"] != setting.digest):
            # Nothing was finished: what went wrong at once may be set right by another setting.
            self._file.truncate(0)
            self.append({"tilebeam_eval": FORMAT, "digest": setting.digest, "setting": setting.as_dict()})
            return
        changed = [] if header["digest"] == setting.digest else differences(header["setting"], setting.as_dict())
        if changed:
            raise TilebeamError(
                f"{self.path} was begun with another setting: {'; '.join(changed)}. Use another --out, or the old "
                "setting."
            )
        for record in self.lines[1:]:
            self.records.setdefault(record["unit"], record)

    def add(self, record: Record) -> None:
        """Keep a finished unit: it is on the disk when this returns. One that is there already stays as it is."""
        if record["unit"] not in self.records:
            self.append(record)
            self.records[record["unit"]] = record


def timeless(value: Any) -> Any:
    """Copy a record without what differs from run to run: everything under a key "seconds"."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k != "seconds"}
    if isinstance(value, list):
        return [timeless(v) for v in value]
    return value
