"""How many cells of its cache a context gets for sliding windows, and for how many texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilebeam.model import memory_check
from tilebeam.model.cache_size import KV_BYTES
from tilebeam.model.load_options import CheckedOptions
from tilebeam.native.executor import usable_memory

if TYPE_CHECKING:
    from tilebeam.gguf import MatrixGroup
    from tilebeam.model.file_check import CheckedFile

# Texts that may be kept for others to go on from, for each that decodes. A search by steps goes on from beams of all
# prompts; those that were forgotten meanwhile are decoded again.
KEPT = 7
# Of the memory that this process can have, what a KV cache of full size may take where windows could do with less.
_FULL = 1 / 2


def of_windows(file: CheckedFile, o: CheckedOptions, groups: Sequence[MatrixGroup], texts: int) -> int | None:
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
    room = _FULL * (usable_memory().with_swap - memory_check.unmapped(file, groups))
    return cells if o.swa_full is False or size > room else None
