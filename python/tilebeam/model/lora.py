"""LoRA adapters of a load: which files with which scales, checked against the model before llama.cpp sees them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from tilebeam import gguf as gguf_tools
from tilebeam.checks import is_finite
from tilebeam.errors import TilebeamError, gguf_errors

Path = str | os.PathLike[str]
Lora = Path | tuple[Path, float]


@dataclass(frozen=True)
class CheckedAdapter:
    """A LoRA adapter that fits the model.

    Attributes:
        path: its file.
        scale: what its change is multiplied with.
        pairs: its matrices.
    """

    path: str
    scale: float
    pairs: tuple[gguf_tools.Pair, ...]


def files_and_scales(lora: Lora | Sequence[Lora]) -> list[tuple[str, float]]:
    """Bring the `lora` argument of `tilebeam.load` into one form.

    Raises:
        TilebeamError: it is none.
    """
    one = isinstance(lora, tuple) and len(lora) == 2 and not isinstance(lora[1], str | os.PathLike | tuple)
    entries: Sequence[object] = [lora] if one or not isinstance(lora, list | tuple) else lora
    found = []
    for entry in entries:
        path, scale = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, 1.0)
        if not isinstance(path, str | os.PathLike) or not is_finite(scale):
            raise TilebeamError(f"lora takes files, or pairs (file, scale), not {entry!r}.")
        found.append((os.fsdecode(path), float(scale)))
    return found


def read_adapters(
    lora: Sequence[tuple[str, float]], model: gguf_tools.Source, architecture: str
) -> list[CheckedAdapter]:
    """Read the adapters for a model whose file is open.

    Raises:
        TilebeamError: a file cannot be read or does not fit; names it and says why.
    """
    adapters = []
    for path, scale in lora:
        if not os.path.exists(path):
            raise TilebeamError(f"The LoRA adapter {path} does not exist.")
        with gguf_errors("A LoRA adapter cannot be applied"), gguf_tools.GGUFFile(path) as f:
            pairs = gguf_tools.check_adapter(f, model, architecture)
        adapters.append(CheckedAdapter(path, scale, tuple(pairs)))
    return adapters
