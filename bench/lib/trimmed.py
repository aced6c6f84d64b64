"""What trimming a vocabulary brings: size and decode speed before and after, and whether the logits stay the same.

The model is cut down to the tokens of the text (gguf-trim-vocab). Both files decode the text's first tokens in one
process, in turns, on both devices. The logits of the tokens that both have must be the same but for roundings:
llama.cpp has another kernel for a matrix whose rows are no multiple of 8. "same_bits" says whether they are the same
bits.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tilebeam
from tilebeam.gguf.gguf_file import GGUFFile
from tilebeam.gguf.trim_vocab import trim_vocab
from tilebeam.gguf.trim_vocab_tokens import read_vocabulary
from tilebeam.model.lm import LM

from bench.lib import CACHE, report

CLOSE = 1e-3  # of logits that differ by the roundings of another kernel


def rows_of(whole: Path, text: str, rounds: int, tokens: int, threads: int) -> Iterator[dict[str, Any]]:
    """Trim and compare, with so many tokens in a turn.

    Raises:
        RuntimeError: the logits differ, or the text is too short.
    """
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        corpus, trimmed = Path(folder) / "corpus.txt", Path(folder) / "trimmed.gguf"
        corpus.write_text(text, encoding="utf-8")
        trim_vocab(whole, trimmed, corpus=[corpus], overwrite=True)
        before, after = (path.stat().st_size / 1e6 for path in (whole, trimmed))
        yield report.figures("size", round(before, 3), round(after, 3), "MB", [before / after], None)
        with GGUFFile(whole) as a, GGUFFile(trimmed) as b:
            numbers = read_vocabulary(a).ids
            old = np.array([numbers[t] for t in read_vocabulary(b).tokens])  # of each token that is left
        for device in ("cpu", "npu"):
            yield _compared((whole, trimmed), old, text, device, (rounds, tokens, threads))  # type: ignore[arg-type]


def _compared(
    files: tuple[Path, Path], old: Any, text: str, device: Literal["cpu", "npu"], how: tuple[int, int, int]
) -> dict[str, Any]:
    rounds, count, threads = how
    pairs, same, n = report.Pairs([], []), True, rounds * count
    options: dict[str, Any] = {"n_ctx": n + 64, "n_seq_max": 1, "threads": threads}
    with tilebeam.load(files[0], device, **options) as a, tilebeam.load(files[1], device, **options) as b:
        ids = b.tokenize(text[: 16 * n])[:n]
        if len(ids) < n or a.tokenize(text[: 16 * n])[:n] != old[ids].tolist():
            raise RuntimeError(f"the first {n} tokens of the text are not the same in both vocabularies")
        for first in range(0, n, count):
            logits = []
            for lm, tokens, seconds in ((a, old[ids], pairs.baseline), (b, np.array(ids), pairs.ours)):
                started = time.perf_counter()
                logits.append([_step(lm, int(tokens[i]), i) for i in range(first, first + count)])
                seconds.append(time.perf_counter() - started)
            both = [(x[old], y) for x, y in zip(*logits, strict=True)]
            if not all(np.allclose(x, y, rtol=0, atol=CLOSE) for x, y in both):
                raise RuntimeError(f"the two files' logits differ on {device}")
            same = same and all(np.array_equal(x, y) for x, y in both)
    return report.row(f"decode, {device}", pairs, count, "tokens/s", tokens=len(old), same_bits=same)


def _step(lm: LM, token: int, position: int) -> Any:
    """Decode one token of sequence 0; its logits."""
    c = lm._context
    c.token[0], c.pos[0], c.seq[0], c.output[0] = token, position, 0, 1
    lm.check_decode(c.decode(1))
    return c.logits(0).copy()
