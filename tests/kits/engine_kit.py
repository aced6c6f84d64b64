"""Random models whose next tokens do not depend on a kernel's rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tilebeam import gguf as gguf_tools

from bench.lib.synth import SynthConfig, preset, write_model

_FLOAT = {"token_embd": "f32", "output": "f32"}


def equal_logits(path: Path, **changes: Any) -> Path:
    """A model all of whose logits are zero: what is drawn depends on the seed alone, whatever a batch looks like."""
    config = _write(path, changes)
    _replace_output(path, np.zeros((config.n_vocab, config.n_embd), np.float32))
    return path


def separate_logits(path: Path, **changes: Any) -> Path:
    """A model that prefers, by a wide margin, one token after each: the one 97 above it."""
    config = _write(path, changes)
    with gguf_tools.GGUFFile(path) as file:
        at = file.tensors["token_embd.weight"].offset
    shape = (config.n_vocab, config.n_embd)
    rows = np.fromfile(path, np.float32, config.n_vocab * config.n_embd, offset=at).reshape(shape)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    # Row j of the output is like the embedding of token j - 97.
    _replace_output(path, 3 * unit[np.roll(np.arange(config.n_vocab), 97)])
    return path


def _write(path: Path, changes: dict[str, Any]) -> SynthConfig:
    config = preset("tiny", **{"arch": "llama", "type": "f32", "types": _FLOAT, "n_layer": 2, **changes})
    write_model(path, config)
    return config


def _replace_output(path: Path, weights: np.ndarray[Any, Any]) -> None:
    with gguf_tools.GGUFFile(path) as file:
        at = file.tensors["output.weight"].offset
    with path.open("r+b") as f:
        f.seek(at)
        f.write(weights.astype(np.float32).tobytes())
