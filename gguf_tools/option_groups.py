"""Groups of options of typer's commands.

A group is a dataclass whose fields are declared as options, or are groups themselves. A command takes it as one
parameter and gets it filled in:

    @grouped
    def beam(search: SearchOptions, width: Annotated[int, typer.Option(..)] = 4) -> None: ...
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

R = TypeVar("R")


def grouped(command: Callable[..., R]) -> Callable[..., R]:
    """Let a command take groups: typer sees their fields as options, the command gets the dataclasses."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    options: dict[str, inspect.Parameter] = {}
    for parameter in inspect.signature(command).parameters.values():
        own = [parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)]
        for option in _options(groups[parameter.name]) if parameter.name in groups else own:
            if option.name in options:
                raise TypeError(f"{command.__name__} has two options {option.name}.")
            options[option.name] = option

    @functools.wraps(command)
    def run(**given: Any) -> R:
        for name, group in groups.items():
            given[name] = _filled(group, given)
        return command(**given)

    run.__signature__ = inspect.Signature(list(options.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: option.annotation for name, option in options.items()}
    return run


def _options(group: Any) -> list[inspect.Parameter]:
    """List the options of a group and of the groups in it."""
    hints = get_type_hints(group, include_extras=True)
    found: list[inspect.Parameter] = []
    for field in dataclasses.fields(group):
        if dataclasses.is_dataclass(hints[field.name]):
            found += _options(hints[field.name])
            continue
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        found.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name])
        )
    return found


def _filled(group: Any, given: dict[str, Any]) -> Any:
    """Make the group of the options that are given, which are taken away."""
    hints = get_type_hints(group, include_extras=True)
    values = {
        f.name: _filled(hints[f.name], given) if dataclasses.is_dataclass(hints[f.name]) else given.pop(f.name)
        for f in dataclasses.fields(group)
    }
    return group(**values)
