"""Help of the commands as plain text: flags are never cut or broken in two, however narrow the terminal.

Options with a panel of their own (typer's `rich_help_panel`) get a heading. What an option says of itself is typer's.
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

WIDEST = 100  # columns; longer lines are hard to read
_NAMES = 30  # columns of an option's names and values; longer ones get a line of their own
_NARROWEST = 50
_MANY = 20  # options, of which the _FIRST that matter come first
_FIRST = 8

Row = tuple[str, str]


def help_of(command: Any, ctx: Any) -> str:
    """Write the whole help of a command or group, without a line break at the end.

    Args:
        command: typer's (click's) command.
        ctx: its context.
    """
    width = max(_NARROWEST, min(WIDEST, shutil.get_terminal_size().columns))
    lines = _wrapped(f"Usage: {ctx.command_path} {' '.join(command.collect_usage_pieces(ctx))}", width, "", "  ")
    text = inspect.cleandoc(command.help or "").partition("\f")[0]
    for paragraph in filter(None, text.split("\n\n")):
        lines += ["", *_wrapped(paragraph, width, "  ", "  ")]
    for heading, rows in _sections(command, ctx):
        lines += ["", f"{heading}:", *_table(rows, width)]
    return "\n".join(lines)


def _sections(command: Any, ctx: Any) -> Iterator[tuple[str, list[Row]]]:
    """Return headings, and what is listed below them."""
    sections: dict[str, list[Row]] = {"Arguments": [], "Options": []}
    parameters = command.get_params(ctx)
    first: list[Any] = []
    if len(parameters) > _MANY:
        ordered = (p for flag in command.first for p in parameters if flag in p.opts)
        first = list(dict.fromkeys(ordered))[:_FIRST]
    for parameter in (*first, *(p for p in parameters if p not in first)):
        row = parameter.get_help_record(ctx)
        if row is None:
            continue
        kind = "Arguments" if parameter.param_type_name == "argument" else "Further options" if first else "Options"
        heading = "Options" if parameter in first else getattr(parameter, "rich_help_panel", None) or kind
        sections.setdefault(heading, []).append(row)
    sections["Further options"] = sections.pop("Further options", [])  # the last
    for name, part in getattr(command, "commands", {}).items():
        if not part.hidden:
            heading = getattr(part, "rich_help_panel", None) or "Commands"
            sections.setdefault(heading, []).append((name, part.get_short_help_str(limit=1000)))
    return ((heading, rows) for heading, rows in sections.items() if rows)


def _table(rows: list[Row], width: int) -> list[str]:
    column = min(_NAMES, max(len(names) for names, _ in rows)) + 4
    lines = []
    for names, meaning in rows:
        text = _wrapped(meaning, width, " " * column, " " * column)
        if len(names) + 4 <= column and text:
            text[0] = f"  {names}".ljust(column) + text[0][column:]
            lines += text
        else:
            lines += [*_wrapped(names, width, "  ", "      "), *text]
    return lines


def _wrapped(text: str, width: int, first: str, other: str) -> list[str]:
    """Return lines of at most `width` columns, broken at spaces only."""
    return textwrap.wrap(
        " ".join(text.split()),
        width,
        initial_indent=first,
        subsequent_indent=other,
        break_on_hyphens=False,
        break_long_words=False,
    )


_given: ContextVar[dict[str, Any]] = ContextVar("given")


def options_given() -> dict[str, Any]:
    """Return the name of the command that runs under "command", and the values of all its options, defaults included,
    under their long flags."""
    return _given.get()


class PlainCommand(TyperCommand):
    """A command with this help.

    Attributes:
        first: options that matter first, by a flag of each: where a command has many, its help begins with eight.
    """

    first: Sequence[str] = ()

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        options = {max(p.opts, key=len): ctx.params[p.name] for p in self.params if p.name in ctx.params}
        _given.set({"command": ctx.info_name} | options)
        return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options; all that are missing are named at once."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if type(error).__name__ == "MissingParameter":  # which typer does not export
                known, _, _ = self.make_parser(ctx).parse_args(given)
                if len(missing := self.missing(known)) > 1:
                    error.param_hint = " and ".join(map(repr, missing))
            raise

    def missing(self, known: dict[str, Any]) -> list[str]:
        """Name what is required and not among the options that were given."""
        return [p.metavar or p.opts[-1] for p in self.params if p.required and known.get(p.name) is None]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        formatter.write(help_of(self, ctx) + "\n")


class PlainGroup(TyperGroup):
    """A group of commands with this help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        formatter.write(help_of(self, ctx) + "\n")


class App(typer.Typer):
    """A typer application with this help, and usage errors without boxes.

    Args:
        command_class: of its commands.
        settings: typer's.
    """

    def __init__(self, command_class: type[PlainCommand] = PlainCommand, **settings: Any) -> None:
        self._command_class = command_class
        super().__init__(
            cls=PlainGroup,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"]},
            **settings,
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        """Register a command, as typer's decorator does."""
        return super().command(name, cls=self._command_class, **settings)
