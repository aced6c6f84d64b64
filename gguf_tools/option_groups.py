"""Groups of options of typer's commands.

A group is a dataclass whose fields are declared as options, or are groups themselves. A command takes it as one
parameter and gets it filled in:

    @grouped
    def beam(search: SearchOptions, width: int = option(4, "--beam-width", min=1, help="..")) -> None: ...
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

R = TypeVar("R")


def option(default: Any, *names: str, **about: Any) -> Any:
    """Declare an option where its default stands, of a group's field or of a parameter of a `grouped` command.

    Args:
        default: what it is if it is not given.
        names, about: as of `typer.Option`; without names it is called like the field.
    """
    return dataclasses.field(default=default, metadata={"option": typer.Option(*names, **about)})


def grouped(command: Callable[..., R]) -> Callable[..., R]:
    """Let a command take groups: typer sees their fields as options, the command gets the dataclasses."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    options: dict[str, inspect.Parameter] = {}
    for parameter in inspect.signature(command).parameters.values():
        own = [_parameter(parameter.name, hints[parameter.name], parameter.default)]
        for found in _options(groups[parameter.name]) if parameter.name in groups else own:
            if found.name in options:
                raise TypeError(f"{command.__name__} has two options {found.name}.")
            options[found.name] = found

    @functools.wraps(command)
    def run(**given: Any) -> R:
        for name, group in groups.items():
            given[name] = _filled(group, given)
        return command(**given)

    run.__signature__ = inspect.Signature(list(options.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: found.annotation for name, found in options.items()}
    return run


def _options(group: Any) -> list[inspect.Parameter]:
    """List the options of a group and of the groups in it."""
    hints = get_type_hints(group, include_extras=True)
    found: list[inspect.Parameter] = []
    for field in dataclasses.fields(group):
        if dataclasses.is_dataclass(hints[field.name]):
            found += _options(hints[field.name])
        else:
            found.append(_parameter(field.name, hints[field.name], field))
    return found


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    """Return what typer sees of an option; the default may be what `option` returns."""
    if isinstance(default, dataclasses.Field):
        declared = default.metadata.get("option")
        kind = kind if declared is None else Annotated[kind, declared]
        default = inspect.Parameter.empty if default.default is dataclasses.MISSING else default.default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _filled(group: Any, given: dict[str, Any]) -> Any:
    """Make the group of the options that are given, which are taken away."""
    hints = get_type_hints(group, include_extras=True)
    values = {
        f.name: _filled(hints[f.name], given) if dataclasses.is_dataclass(hints[f.name]) else given.pop(f.name)
        for f in dataclasses.fields(group)
    }
    return group(**values)
