"""Commands of tilebeam, run in this process."""

from __future__ import annotations

import json
from typing import Any

from tilebeam.cli import main as cli
from typer.testing import CliRunner


class Ran:
    """What a command printed, and its exit code."""

    def __init__(self, *arguments: object, stdin: str | None = None) -> None:
        result = CliRunner().invoke(cli.app, [str(a) for a in arguments], input=stdin)
        self.code, self.out, self.err = result.exit_code, result.stdout, result.stderr
        self.exception = result.exception

    def fails_with(self, *words: str, code: int = 1) -> None:
        """One sentence, before a model is loaded; of a usage error only the words."""
        assert self.code == code, (self.out, self.err)
        assert self.exception is None or isinstance(self.exception, SystemExit)
        assert "Traceback" not in self.out + self.err
        for word in words:
            assert word in self.err, self.err
        if code == 1:
            assert self.err.startswith("tilebeam: ")
            assert self.err.count("\n") == 1
            assert self.out == ""


def ok(*arguments: object, stdin: str | None = None) -> Ran:
    ran = Ran(*arguments, stdin=stdin)
    assert ran.code == 0, (ran.out, ran.err, ran.exception)
    return ran


def record(*arguments: object) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(ok(*arguments, "--json").out)
    return result
