"""What trimming a vocabulary brings: size and decode speed before and after, and whether the logits stay the same.

    gguf-trim-vocab gemma-q8_0.gguf trimmed.gguf --corpus text.txt
    python -m bench.trim_vocab gemma-q8_0.gguf trimmed.gguf text.txt --json out.json

Both files run on llama.cpp's CPU backend in one process, in turns (A B A B ...), each turn a few tokens of the same
text; speeds are of the fastest turns, the spread is that of the ratios of neighbouring turns. With -dev npu, on
Tilebeam's device. The logits of the tokens that both have must be the same bits (CPU).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import numpy as np
import tilebeam
from tilebeam.gguf.gguf_file import GGUFFile
from tilebeam.gguf.trim_vocab_tokens import read_vocabulary
from tilebeam.model.lm import LM
from tilebeam.native.llama import Context


def token_numbers(whole: Path, trimmed: Path) -> np.ndarray:
    """The old number of each token of the trimmed vocabulary."""
    with GGUFFile(whole) as a, GGUFFile(trimmed) as b:
        old = read_vocabulary(a).ids
        return np.array([old[t] for t in read_vocabulary(b).tokens])


def step(context: Context, token: int, position: int) -> np.ndarray:
    """Decode one token of sequence 0; a view of its logits."""
    context.token[0], context.pos[0], context.seq[0], context.output[0] = token, position, 0, 1
    status = context.decode(1)
    if status != 0:
        raise SystemExit(f"llama_decode failed with status {status}")
    return context.logits(0)


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("whole", type=Path)
    p.add_argument("trimmed", type=Path)
    p.add_argument("text", type=Path, help="text of the corpus; its first tokens are decoded")
    p.add_argument("-dev", "--device", choices=["cpu", "npu"], default="cpu")
    p.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--turns", type=int, default=12, help="turns of each model")
    p.add_argument("--tokens", type=int, default=16, help="tokens in a turn")
    p.add_argument("--json", type=Path, help="write all figures")
    a = p.parse_args()
    old = token_numbers(a.whole, a.trimmed)
    n = a.turns * a.tokens
    models: list[LM] = [
        tilebeam.load(f, device=a.device, n_ctx=n + 64, n_seq_max=1, threads=a.threads) for f in (a.whole, a.trimmed)
    ]
    with models[0] as whole, models[1] as trimmed:
        ids = trimmed.tokenize(a.text.read_text("utf-8", "replace")[: 16 * n])[:n]
        if len(ids) < n or whole.tokenize(a.text.read_text("utf-8", "replace")[: 16 * n])[:n] != old[ids].tolist():
            raise SystemExit(f"the first {n} tokens of {a.text} are not the same in both vocabularies")
        n_whole = whole.n_vocab
        seconds: tuple[list[float], list[float]] = ([], [])
        same = True
        for turn in range(a.turns):
            logits: list[list[np.ndarray]] = [[], []]
            for side, lm in enumerate((whole, trimmed)):
                started = time.perf_counter()
                for i in range(turn * a.tokens, (turn + 1) * a.tokens):
                    token = int(old[ids[i]]) if side == 0 else ids[i]
                    logits[side].append(step(lm._context, token, i).copy())
                seconds[side].append(time.perf_counter() - started)
            same &= all(np.array_equal(x[old], y) for x, y in zip(*logits, strict=True))
    ratios = [x / y for x, y in zip(*seconds, strict=True)]
    figures = {
        "device": a.device,
        "threads": a.threads,
        "tokens": [n_whole, len(old)],
        "bytes": [a.whole.stat().st_size, a.trimmed.stat().st_size],
        "tokens_per_second": [a.tokens / min(s) for s in seconds],
        "speedup": statistics.median(ratios),
        "speedup_quartiles": statistics.quantiles(ratios, n=4)[::2],
        "same_logits": same,
    }
    for name, value in figures.items():
        print(f"{name:18} {value}")
    if a.json:
        a.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
