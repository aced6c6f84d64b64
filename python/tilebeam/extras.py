"""How to install what an optional part of Tilebeam needs."""

from __future__ import annotations

import re
from typing import Any

from tilebeam.errors import TilebeamError


def how_to_install(extra: str) -> str:
    """Return the command that installs the packages of an extra, by their own names: it works from a checkout as from a
    wheel, and no package index has to know the name Tilebeam."""
    return "pip install " + " ".join(f"'{name}'" for name in _packages(extra) or [f".[{extra}]"])


def pytorch(what: str) -> Any:
    """Return PyTorch, which trains something.

    Raises:
        TilebeamError: it is not installed.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise TilebeamError(f"{what} are trained with PyTorch: {how_to_install('train')}") from None
    return torch


def _packages(extra: str) -> list[str]:
    from importlib import metadata

    found = []
    try:
        every = metadata.requires("tilebeam") or []
    except metadata.PackageNotFoundError:  # a source tree on the path
        every = []
    for needed in every:
        name, _, marker = (part.strip() for part in needed.partition(";"))
        if re.fullmatch(rf"extra\s*==\s*['\"]{extra}['\"]", marker):
            found.append(name)
    return found
