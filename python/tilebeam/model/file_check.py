"""Looks into a model file before llama.cpp does.

A repacked file's digests, which tell bytes that rotted or were lost on the way, are compared where that is asked for:
all of the file is read then. ``gguf-repack verify`` does the same.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tilebeam import gguf as gguf_tools
from tilebeam.errors import TilebeamError
from tilebeam.model.cache_size import Cache, cache_of
from tilebeam.model.hub import missing
from tilebeam.model.lora import CheckedAdapter, read_adapters
from tilebeam.model.placement import Weights, adapted, weights_of
from tilebeam.native.repacked import RepackedFile

_MAPPED_ALIGNMENT = 32  # TENSOR_ALIGNMENT of ggml

# llama.cpp's pooling types by number.
POOLINGS = ("none", "mean", "cls", "last", "rank")


@dataclass
class CheckedFile:
    """A model file that was found sound, and what is known of it before llama.cpp sees it.

    Attributes:
        path: of the file; of a split model, of its first part.
        parts: the file, or all files of a split model.
        architecture: the real one, also of a repacked file.
        matrices: weights that are multiplied by, and which of them the device takes.
        weights: what devices must hold of it.
        cache: what llama.cpp keeps of each token.
        aligned: llama.cpp can map it.
        repacked: the tiles that it holds, None for an ordinary file.
        packed: the packed file that an ordinary one is loaded from; None: it is packed while it is loaded.
        adapters: LoRA adapters that fit it.
        pooling: how the file says that a text's hidden states become one value, a name of llama.cpp's pooling types;
            None: it does not say.
        causal: a token sees those before it only.
        n_ctx_train: tokens of a text that it was trained for, 0 if it does not say.
    """

    path: str
    parts: tuple[Path, ...]
    architecture: str
    matrices: tuple[gguf_tools.Matrix, ...]
    weights: Weights
    cache: Cache
    aligned: bool
    repacked: RepackedFile | None = None
    packed: RepackedFile | None = None
    adapters: list[CheckedAdapter] = field(default_factory=list)
    pooling: str | None = None
    causal: bool = True
    n_ctx_train: int = 0

    @property
    def tiles(self) -> RepackedFile | None:
        """The file with tiles that is mapped, whoever packed it; None: an ordinary file is read."""
        return self.repacked or self.packed

    @property
    def generates(self) -> bool:
        """True if the model writes one token after the other. Embedding models have no logits, and llama.cpp gives what
        is in the memory, or see texts in both directions."""
        return self.causal and self.architecture not in gguf_tools.WITHOUT_OUTPUT


def inspect(model: str | os.PathLike[str], verify: bool, lora: Sequence[tuple[str, float]] = ()) -> CheckedFile:
    """Read a model's header, check all that llama.cpp relies on, and the digests of a repacked file where asked for.

    Args:
        model: the file; of a split model any part.
        verify: compare the digests of a repacked file.
        lora: adapters and their scales.

    Raises:
        TilebeamError: it is no model that can be loaded; names the file and what is wrong.
    """
    path = Path(model)
    if not path.exists():
        raise TilebeamError(missing(path))
    if not path.is_file():
        raise TilebeamError(f"{path} is not a file.")
    try:
        with gguf_tools.open_gguf(path) as gguf:
            path = gguf.paths[0]  # of a split model any part may be named; llama.cpp wants the first
            real = gguf_tools.architecture_of(gguf)
            gguf_tools.check_model(gguf, real)
            matrices, weights, cache = gguf_tools.matrices_of(gguf), weights_of(gguf, real), cache_of(gguf, real)
            parts = tuple(gguf.paths)
            file = CheckedFile(str(path), parts, gguf.architecture, matrices, weights, cache, _aligned(gguf))
            pooling = gguf_tools.value_of(gguf.kv, f"{real}.pooling_type")
            if isinstance(pooling, int) and 0 < pooling < len(POOLINGS):
                file.pooling = POOLINGS[pooling]
            file.causal = gguf_tools.value_of(gguf.kv, f"{real}.attention.causal") is not False
            trained = gguf_tools.value_of(gguf.kv, f"{real}.context_length")
            file.n_ctx_train = trained if isinstance(trained, int) else 0
            file.adapters = read_adapters(lora, gguf, real)
            file.weights = adapted(file.weights, [pair for adapter in file.adapters for pair in adapter.pairs])
            if gguf.architecture != gguf_tools.ARCHITECTURE:
                return file
            if not isinstance(gguf, gguf_tools.GGUFFile):
                raise gguf_tools.GGUFError(
                    "a repacked model must be one file; join its parts with llama-gguf-split --merge, or pack the "
                    "split source again, which gives one file"
                )
            manifest = gguf_tools.read_manifest(gguf)
            if verify:
                gguf_tools.verify(path, deep=False)
    except ImportError as error:
        raise TilebeamError(str(error)) from None
    except (gguf_tools.GGUFError, OSError) as error:
        raise TilebeamError(f"{path} cannot be loaded: {error}") from None
    file.repacked, file.architecture = RepackedFile.of(manifest), manifest.architecture
    return file


def _aligned(gguf: gguf_tools.Source) -> bool:
    """Tell whether llama.cpp can map the file: it asserts that ranges of the mapping begin on a multiple of 32."""
    parts = [gguf] if isinstance(gguf, gguf_tools.GGUFFile) else gguf.parts
    return all(part.alignment % _MAPPED_ALIGNMENT == 0 for part in parts)
