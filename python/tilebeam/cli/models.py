"""`tilebeam models`: the GGUF models in the cache of Hugging Face's hub."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from tilebeam.cli import console
from tilebeam.cli.options import Json


def models(json_: Json = False) -> None:
    """List the models that -hf has downloaded, those used last first; `hf cache rm` deletes some.

    Example: tilebeam models
    """
    from tilebeam.model.hub import cached_models

    found = cached_models()
    if json_:
        print(json.dumps([asdict(model) for model in found], indent=2))
        return
    if not found:
        console.err().print("No models yet. Get one: tilebeam chat -hf Qwen/Qwen2.5-0.5B-Instruct-GGUF", soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "MB", "last used", "path"):
        table.add_column(heading, no_wrap=True, justify="right" if heading == "MB" else "left")
    for model in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.last_used))
        table.add_row(Text(model.name), f"{model.size / 1e6:.1f}", used, Text(model.path))
    screen = console.out()
    screen.width = max(screen.width, screen.measure(table).maximum)  # a path that is cut is none
    screen.print(table, soft_wrap=True)
