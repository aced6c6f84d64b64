"""The check, before anything is loaded, that a model fits the memory that this process can have: the system ends a
process that takes more without a word, and a container's memory is often small. And how many cells of its cache a
context gets for sliding windows.

Counted is what will be filled, as far as the file's header tells for certain, and never more: a model that fits is not
refused. Weights that are mapped from the file count nothing, for the page cache can be had back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilebeam import gguf as gguf_tools
from tilebeam._ext import Type
from tilebeam.errors import TilebeamError
from tilebeam.model.cache_size import KV_BYTES
from tilebeam.model.device_choice import listed
from tilebeam.model.file_check import CheckedFile
from tilebeam.model.load_options import CheckedOptions, LoadOptions
from tilebeam.native.executor import usable_memory

# Of the memory that this process can have, what a KV cache of full size may take where windows could do with less.
_FULL = 1 / 2
# Bytes of llama.cpp's tables for each entry of a vocabulary, at least.
_ENTRY_BYTES = 100


def check(
    file: CheckedFile,
    options: CheckedOptions,
    groups: Sequence[gguf_tools.MatrixGroup],
    texts: int,
    *,
    loaded: bool = False,
    cells: int | None = None,
    head: int = 0,
) -> int:
    """Refuse what the memory cannot hold; return the bytes that are left without swap, whatever layers have windows.

    Args:
        groups: the file's matrices as they will run.
        texts: rows of logits that a context has room for at least.
        cells: of the KV cache, in all layers at least; None: for all tokens.
        head: bytes of a draft head.
        loaded: weights and vocabulary are in the memory already.

    Raises:
        TilebeamError: the model takes more than there is; says what of it takes how much, and what helps.
    """
    weights = 0 if loaded else unmapped(file, groups)
    cached = full = rest = 0
    if file.generates:
        token = file.cache.k * KV_BYTES[options.type_k] + file.cache.v * KV_BYTES[options.type_v]
        full = int(options.n_ctx * token)
        cached = full if cells is None else int(cells * token)
        rest = texts * file.weights.n_vocab * 4 + (0 if loaded else file.cache.entries * _ENTRY_BYTES)
        # Of a layer's feed-forward network, for a prompt as long as most batches are.
        rows = min(options.n_ubatch, options.n_ctx, LoadOptions.n_batch)
        rest += 4 * rows * (file.weights.n_ff + 2 * file.weights.n_embd)
    needed, memory = weights + cached + rest + head, usable_memory()
    left = memory.with_swap
    if needed <= left:
        return min(left, memory.available) - (weights + full + rest + head)
    samples = "1 sample" if options.n_seq_max == 1 else f"{options.n_seq_max} samples"
    parts = [
        (weights, "its weights"),
        (cached, f"a KV cache of {options.n_ctx} tokens"),
        (rest, f"{'' if loaded else 'the vocabulary, '}logits and intermediate results of {samples}"),
        (head, "its draft head"),
    ]
    advice = ["choose a smaller n_ctx or n_seq_max"] if file.generates and weights < left else []
    if weights and file.repacked is None:
        advice.append(
            "take a smaller quantization, or write the file anew with `gguf-repack pack`: packed weights are mapped "
            "from the file, and take no memory of their own"
        )
    if head and needed - head <= left:
        advice.append("load it without the draft head")
    said = "; or ".join(advice) or "use a machine with more memory"
    raise TilebeamError(
        f"{file.path} needs at least {_size(needed)} of memory{' more' if loaded else ''}, and this process can have "
        f"{_size(left)}: {listed([f'{_size(size)} for {what}' for size, what in parts if size])}. "
        f"{said[0].upper()}{said[1:]}."
    )


def window_cells(
    file: CheckedFile, o: CheckedOptions, groups: Sequence[gguf_tools.MatrixGroup], texts: int
) -> int | None:
    """Return the KV cells that layers with a sliding window get: as many as llama.cpp gives them for so many texts;
    None: as many as others.

    Args:
        groups: the file's matrices as they will run, whose memory the cache cannot have.
    """
    cache = file.cache
    cells = (min(o.n_ctx, cache.window * texts + o.n_ubatch) + 255) // 256 * 256
    if not cache.window or not file.generates or o.swa_full or cells >= o.n_ctx:
        return None
    size = o.n_ctx * (cache.k * KV_BYTES[o.type_k] + cache.v * KV_BYTES[o.type_v])
    room = _FULL * (usable_memory().with_swap - unmapped(file, groups))
    return cells if o.swa_full is False or size > room else None


def unmapped(file: CheckedFile, groups: Iterable[gguf_tools.MatrixGroup]) -> int:
    """Return the bytes of weights that must be in memory: adapters, what becomes tiles; all if the file cannot be
    mapped."""
    adapters = sum(p.a.nbytes + p.b.nbytes for adapter in file.adapters for p in adapter.pairs)
    if file.tiles is not None:  # types that only a loaded model has in tiles
        return adapters + sum(g.packed_bytes for g in groups if g.packed_bytes > g.bytes)
    if not file.aligned:
        return adapters + sum(g.packed_bytes for g in groups)
    return adapters + sum(g.packed_bytes for g in groups if g.device == "npu" and Type[g.type.upper()].is_in_tiles)


def _size(n: int) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.0f} MiB"
