"""The log of an evaluation: a `GrowingFile` whose first line is the header, the setting and its digest. Every further
line is a finished unit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from tilebeam.errors import TilebeamError
from tilebeam.growing_file import GrowingFile, differences
from tilebeam.growing_file import Record as Record

FORMAT = 1


class Named(Protocol):
    """What all records of a log depend on."""

    @property
    def digest(self) -> str:
        """Return the digest of all of it."""
        ...

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON, which also shows what differs."""
        ...


class Log(GrowingFile):
    """An evaluation's log, open for one process.

    Args:
        path: the file; made if it is not there.
        setting: of the evaluation.

    Raises:
        TilebeamError: the log is of another setting (says what differs), is used by another process, or is damaged.
    """

    def __init__(self, path: Path, setting: Named) -> None:
        super().__init__(path)
        self.records: dict[str, Record] = {}
        try:
            self._read(setting)
        except BaseException:
            self.close()
            raise

    def _is_record(self, number: int, found: Any) -> bool:
        return super()._is_record(number, found) and (number == 1 or isinstance(found.get("unit"), str))

    def _read(self, setting: Named) -> None:
        header = self.lines[0] if self.lines else None
        if header is not None and (header.get("tilebeam_eval") != FORMAT or not {"digest", "setting"} <= header.keys()):
            raise TilebeamError(f"{self.path} is not a log of this version of tilebeam eval.")
        if header is None or (len(self.lines) == 1 and header["digest"] != setting.digest):
            # Nothing was finished: what went wrong at once may be set right by another setting.
            self.clear()
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
