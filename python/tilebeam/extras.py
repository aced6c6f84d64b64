"""How to install what an optional part of Tilebeam needs."""

from __future__ import annotations

import re


def how_to_install(extra: str) -> str:
    """Return the command that installs the packages of an extra, by their own names: it works from a checkout as from a
    wheel, and no package index has to know the name Tilebeam."""
    found = _packages(extra)
    return "pip install " + " ".join(f"'{name}'" for name in found or [f".[{extra}]"])


def _packages(extra: str) -> list[str]:
    from importlib import metadata

    found = []
    try:
        requirements = metadata.requires("tilebeam") or []
    except metadata.PackageNotFoundError:  # a source tree on the path
        requirements = []
    for needed in requirements:
        name, _, marker = (part.strip() for part in needed.partition(";"))
        if re.fullmatch(rf"extra\s*==\s*['\"]{extra}['\"]", marker):
            within = re.fullmatch(r"tilebeam\[(\w+)\]", name)
            found += _packages(within[1]) if within else [name]
    return found
