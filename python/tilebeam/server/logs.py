"""What the server tells its operator: a line at the end of each request, and what becomes of models, as text or JSON.

Fields of a request are noted where they are known, by whatever works for it; nothing of a prompt or an answer is.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from contextvars import ContextVar
from typing import Any, Literal, TextIO

LogFormat = Literal["text", "json"]

_PLAIN = re.compile(r"[!#-~]+")  # a value that needs no quotes

log = logging.getLogger("tilebeam.server")

_noted: ContextVar[dict[str, Any]] = ContextVar("noted")


def begin_notes() -> dict[str, Any]:
    """Return the fields of a request that begins in this task, to which `note` adds."""
    fields: dict[str, Any] = {}
    _noted.set(fields)
    return fields


def note(**fields: Any) -> None:
    """Add fields to the line of the request that is running; without one they are dropped."""
    _noted.get({}).update(fields)


def tell(message: str, **fields: Any) -> None:
    """Log an event with fields, which are members of its JSON."""
    log.info(message, extra={"fields": fields})


class LogLines(logging.Formatter):
    """One line for each record, but for tracebacks in texts.

    Args:
        form: text, or a JSON object.
    """

    def __init__(self, form: LogFormat) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        """Write a record."""
        fields: dict[str, Any] = getattr(record, "fields", {})
        if self._form == "json":
            when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
            told = {"time": when, "level": record.levelname.lower(), "message": record.getMessage(), **fields}
            if record.exc_info:
                told["traceback"] = self.formatException(record.exc_info)
            return json.dumps(told, ensure_ascii=False)
        written = " ".join(f"{k}={v if _PLAIN.fullmatch(str(v)) else json.dumps(v)}" for k, v in fields.items())
        return super().format(record) + (f" {written}" if written else "")


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what is stderr at the time: a program that holds the server may exchange it."""

    @property
    def stream(self) -> TextIO:
        """Return stderr."""
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None:
        pass


def log_to_stderr(form: LogFormat, level: int) -> None:
    """Have what is logged written to stderr: the server's own from a level on, of others warnings and errors."""
    handler = _Stderr()
    handler.setFormatter(LogLines(form))
    root = logging.getLogger()
    root.handlers = [*(old for old in root.handlers if not isinstance(old.formatter, LogLines)), handler]
    log.setLevel(level)
