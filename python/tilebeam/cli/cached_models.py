"""`tilebeam models`: the GGUF models in the cache of Hugging Face's hub."""

from __future__ import annotations

import json
import time

from tilebeam.cli import console
from tilebeam.cli.options import Json


def models(json_: Json = False) -> None:
    """List the models that -hf has downloaded: name for -hf, size, when it was used last, path. `hf cache rm` deletes.

    Example: tilebeam models
    """
    from tilebeam.model.hub import cached_models

    found = cached_models()
    if json_:
        print(json.dumps([model._asdict() for model in found], indent=2))
        return
    if not found:
        console.err().print("No models yet. Get one: tilebeam chat -hf Qwen/Qwen2.5-0.5B-Instruct-GGUF", soft_wrap=True)
        return
    widest = max(len(model.name) for model in found)
    for model in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.last_used))
        print(f"{model.name:<{widest}} {model.size / 1e6:10.1f} MB  {used}  {model.path}")
