"""`tilebeam cache`: the packed files that loads keep for the next one."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer
from rich.table import Table

from tilebeam.cli import console
from tilebeam.cli.options import Json


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Delete them all.")] = False,
    json_: Json = False,
) -> None:
    """List the packed files that --packed-cache keeps, or delete them.

    Example: tilebeam cache --clear
    """
    from tilebeam.model import packed_cache

    files, freed = packed_cache.kept(), packed_cache.clear() if clear else 0
    if json_:
        listed = [{"path": str(file.path), "bytes": file.size, "used": file.used} for file in files]
        print(json.dumps({"folder": str(packed_cache.folder()), "files": listed, "deleted": clear}, indent=2))
    elif clear:
        console.out().print(f"deleted {len(files)} packed files, {freed / 2**20:.0f} MiB")
    else:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name in ("packed file", "MiB", "last used"):
            table.add_column(name, justify="right" if name == "MiB" else "left")
        for file in files:
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(file.used))
            table.add_row(file.path.name, f"{file.size / 2**20:.0f}", used)
        if files:
            console.out().print(table)
        total = sum(file.size for file in files) / 2**20
        console.out().print(f"{len(files)} files, {total:.0f} MiB in {packed_cache.folder()}", soft_wrap=True)
