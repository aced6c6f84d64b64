"""The order in which llama.cpp computes the tokens of a batch where the model has recurrent layers: a graph has equally
many tokens of each of its sequences, side by side (llama_batch_allocr::split_equal of llama-batch.cpp). Logits and
states behind the final norm come in the batch's order again, but not what layers put out on the way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def places(seq: Sequence[int], n_ubatch: int, *, rising: bool, alone: bool) -> npt.NDArray[np.int64]:
    """Return for each entry of a batch how many are computed before it, int64 [entries].

    Args:
        seq: the entries' sequences, one each.
        n_ubatch: tokens of a graph, at most.
        rising: sequences are in one graph only if each has the number behind the last one's (models without attention).
        alone: each sequence has graphs of its own (hidden states behind the final norm are wanted).
    """
    left = dict[int, list[int]]()
    for entry, id in enumerate(seq):
        left.setdefault(id, []).append(entry)
    order = list[int]()
    while left:
        chosen = dict[int, None]()
        last = -1
        for entry in sorted(entry for entries in left.values() for entry in entries):
            id = seq[entry]
            if id in chosen or (chosen and (alone or (rising and id != last + 1))):
                continue
            chosen[id], last = None, id
            if len(chosen) > n_ubatch:
                break
        count = min(max(1, n_ubatch // len(chosen)), *(len(left[id]) for id in chosen))
        for id in chosen:
            order += left[id][:count]
            del left[id][:count]
        left = {id: entries for id, entries in left.items() if entries}
    found = np.empty(len(seq), np.int64)
    found[order] = np.arange(len(seq))
    return found
