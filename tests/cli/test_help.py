"""What the commands say of themselves: every option, and an example that would be understood."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from tilebeam.cli import main as cli
from tilebeam.gguf import cli as repack_cli
from tilebeam.gguf import trim_vocab_cli
from typer.main import get_command

PROGRAMS = {"tilebeam": cli.app, "gguf-repack": repack_cli.app, "gguf-trim-vocab": trim_vocab_cli.app}


def commands() -> Iterator[tuple[str, Any]]:
    """Names as they are typed, and click's commands."""
    for program, app in PROGRAMS.items():
        command = get_command(app)
        parts = getattr(command, "commands", None)
        if parts is None:
            yield program, command
        else:
            yield from ((f"{program} {name}", part) for name, part in parts.items())


ALL = dict(commands())


@pytest.mark.parametrize("name", ALL)
def test_every_option_is_explained(name: str) -> None:
    for parameter in ALL[name].params:
        assert parameter.help or parameter.name == "help", parameter


@pytest.mark.parametrize("name", [n for n in ALL if n != "tilebeam doctor"])
def test_the_example_is_understood(name: str) -> None:
    (text,) = re.findall(r"Example: (.*?)(?:\n\n|$)", ALL[name].help.replace("\f", ""), re.DOTALL)
    words = shlex.split(text.replace("\n", " ").split(" & ")[0])
    typed = name.split()
    assert words[: len(typed)] == typed
    known = ALL[name].make_context(name, words[len(typed) :], resilient_parsing=False)
    assert known.params
