"""What the commands say of themselves: every option, and an example that would be understood."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from enum import Enum
from typing import Any, get_args, get_type_hints

import pytest
from tilebeam.cli import main as cli
from tilebeam.gguf import cli as repack_cli
from typer.main import get_command
from typer.testing import CliRunner

PROGRAMS = {"tilebeam": cli.app, "gguf-repack": repack_cli.app}


def commands() -> Iterator[tuple[str, Any]]:
    """Names as they are typed, and click's commands."""
    for program, app in PROGRAMS.items():
        yield from _within(program, get_command(app))


def _within(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    parts = getattr(command, "commands", None)
    if parts is None:
        yield name, command
    else:
        for own, part in parts.items():
            yield from _within(f"{name} {own}", part)


ALL = dict(commands())


@pytest.mark.parametrize("name", ALL)
def test_every_option_is_explained(name: str) -> None:
    for parameter in ALL[name].params:
        assert parameter.help or parameter.name == "help", parameter


def shown(name: str, columns: int) -> str:
    """The help of a command on a terminal of that width."""
    program, *words = name.split()
    result = CliRunner().invoke(PROGRAMS[program], [*words, "--help"], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0
    return result.stdout


def values(name: str) -> Iterator[list[str]]:
    """What the options of a command may be, for each that is one of several words."""
    for hint in get_type_hints(ALL[name].callback).values():
        for kind in (hint, *get_args(hint)):
            if isinstance(kind, type) and issubclass(kind, Enum):
                yield [str(member.value) for member in kind]


def flags(command: Any) -> set[str]:
    return {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize("name", ALL)
def test_every_flag_can_be_read_on_a_narrow_terminal(name: str, columns: int) -> None:
    """No flag and no value is cut or broken in two, in the list of options as in the text above."""
    text = shown(name, columns)
    assert "…" not in text
    for parameter in ALL[name].params:
        names = parameter.opts + parameter.secondary_opts if parameter.param_type_name == "option" else [parameter.name]
        for flag in names:
            found = re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text, re.IGNORECASE)
            assert found or parameter.metavar in text, flag
    for kind in values(name):
        assert all(re.search(rf"[<|]{re.escape(value)}[|>]", text) for value in kind)
    known = {flag for command in ALL.values() for flag in flags(command)} | {"--help", "--version"}
    assert set(re.findall(r"(?<![\w-])--[\w-]+", text)) <= known
    assert max(map(len, text.splitlines())) <= max(columns, 70)


@pytest.mark.parametrize("name", [n for n in ALL if n != "tilebeam doctor"])
def test_the_example_is_understood(name: str) -> None:
    (text,) = re.findall(r"Example: (.*?)(?:\n\n|$)", ALL[name].help.replace("\f", ""), re.DOTALL)
    words = shlex.split(text.replace("\n", " ").split(" & ")[0])
    typed = name.split()
    assert words[: len(typed)] == typed
    known = ALL[name].make_context(name, words[len(typed) :], resilient_parsing=False)
    assert known.params


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        (["eval"], ["-m", "--task"]),
        (["eval", "-m", "x"], ["--task"]),
        (["reward", "train", "--task", "x"], ["-m", "--out"]),
    ],
)
def test_all_options_that_are_missing_are_named_at_once(typed: list[str], names: list[str]) -> None:
    result = CliRunner().invoke(cli.app, typed)
    assert result.exit_code == 2
    assert re.findall(r"'(-{1,2}[a-z]+)'", result.stderr.splitlines()[-1]) == names
