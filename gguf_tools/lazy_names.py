"""Packages whose names are imported on first use, as their stubs list them.

A line ``from .module import name as name`` of a package's ``__init__.pyi`` is all that a public name needs: type
checkers and editors read it, and so does `lazy_names`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_names(scope: dict[str, Any]) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make ``__getattr__``, ``__dir__`` and ``__all__`` of a package.

    Args:
        scope: its ``globals()``, which names that were asked for are added to.
    """
    package: str = scope["__name__"]
    with open(f"{scope['__file__']}i", encoding="utf-8") as stub:
        home = {words[-1]: words[1] for line in stub if (words := line.split())[:1] == ["from"]}

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = scope[name] = getattr(import_module(home[name], package), name)
        return value

    return get, lambda: sorted({*scope, *home}), sorted(home)
