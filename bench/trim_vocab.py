"""What trimming a vocabulary brings: size and decode speed before and after, and whether the logits stay the same.

    python -m bench.trim_vocab [-m WHOLE.gguf] [-f TEXT] [--json] [--quick]

The model is cut down to the tokens of the text (gguf-trim-vocab). Both files decode the text's first tokens in one
process, in turns (A B A B ..), on llama.cpp's CPU backend and on Tilebeam's device. The logits of the tokens that both
have must be the same but for roundings, or the bench fails; "same_bits" says whether they are the same bits. (llama.cpp
has another kernel for a matrix whose rows are no multiple of 8.) Without -m it is gemma-3-270m in Q4_K_M (--quick: a
small random model), without -f Python's language reference.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tilebeam
from tilebeam.gguf.gguf_file import GGUFFile
from tilebeam.gguf.trim_vocab import trim_vocab
from tilebeam.gguf.trim_vocab_tokens import read_vocabulary
from tilebeam.native.llama import Context

from bench.lib import CACHE, gemma, models, report
from bench.lib.options import Parser

CLOSE = 1e-3  # of logits that differ by the roundings of another kernel


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
        raise RuntimeError(f"llama_decode failed with status {status}")
    return context.logits(0)


def compare(whole: Path, trimmed: Path, text: str, device: str, args: Any) -> dict[str, Any]:
    """Decode the same tokens with both; a row of the report.

    Raises:
        RuntimeError: the logits differ, or the text is too short.
    """
    old, n = token_numbers(whole, trimmed), args.rounds * args.n_gen
    pairs, same = report.Pairs([], []), True
    options = {"device": device, "n_ctx": n + 64, "n_seq_max": 1, "threads": args.threads}
    with tilebeam.load(whole, **options) as a, tilebeam.load(trimmed, **options) as b:
        ids = b.tokenize(text[: 16 * n])[:n]
        if len(ids) < n or a.tokenize(text[: 16 * n])[:n] != old[ids].tolist():
            raise RuntimeError(f"the first {n} tokens of the text are not the same in both vocabularies")
        for turn in range(args.rounds):
            logits: list[list[np.ndarray]] = [[], []]
            for side, (lm, tokens) in enumerate(((a, old[ids]), (b, np.array(ids)))):
                seconds = pairs.ours if side else pairs.baseline
                started = time.perf_counter()
                for i in range(turn * args.n_gen, (turn + 1) * args.n_gen):
                    logits[side].append(step(lm._context, int(tokens[i]), i).copy())
                seconds.append(time.perf_counter() - started)
            both = [(x[old], y) for x, y in zip(*logits, strict=True)]
            if not all(np.allclose(x, y, rtol=0, atol=CLOSE) for x, y in both):
                raise RuntimeError(f"the two files' logits differ on {device}")
            same = same and all(np.array_equal(x, y) for x, y in both)
    return report.row(f"decode, {device}", pairs, args.n_gen, "tokens/s", tokens=len(old), same_bits=same)


def main() -> None:
    """Trim, measure and print."""
    p = Parser(__doc__, "a small model, fewer and shorter turns")
    p.add_model("GGUF file, not repacked", "gemma-3-270m")
    p.add_argument("-f", "--file", type=Path, help="text (default: Python's language reference)")
    p.add_threads()
    p.add_count("-n", "--n-gen", usual=16, quick=4, what="tokens in a turn")
    p.add_rounds(12, 3)
    args = p.parse()
    whole = args.model or (models.synthetic("small", "q8_0") if args.quick else gemma.model())
    text = args.file.read_text("utf-8", "replace") if args.file else gemma.text()
    CACHE.mkdir(parents=True, exist_ok=True)
    rows = report.Rows("trim_vocab", args.json)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        corpus, trimmed = Path(folder) / "corpus.txt", Path(folder) / "trimmed.gguf"
        corpus.write_text(text, encoding="utf-8")
        trim_vocab(whole, trimmed, corpus=[corpus], overwrite=True)
        before, after = (path.stat().st_size / 1e6 for path in (whole, trimmed))
        rows.add(report.figures("size", round(before, 3), round(after, 3), "MB", [before / after], None))
        for device in ("cpu", "npu"):
            rows.add(compare(whole, trimmed, text, device, args))
    rows.finish()


if __name__ == "__main__":
    report.start(main)
