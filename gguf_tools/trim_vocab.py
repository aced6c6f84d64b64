"""Cuts a model's vocabulary down to what a corpus needs: smaller embedding and output matrices, faster decoding.

As the vocabulary trimming of mobile inference services, but so that the model stays a drop-in: special tokens, bytes
and everything that kept tokens are made of stay (trim_vocab_tokens.py), rows of the two matrices are copied as they
are, whatever their type, and the file is put in place only after llama.cpp has cut the corpus with it and got its text
back. Logits of the tokens that are left are the source's, bit for bit where the matrix multiplication treats rows
alike.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from . import gguf_write as w
from .errors import GGUFError
from .gguf_file import ARRAY, STRING, UINT32, KeyValue, TensorInfo
from .model_check import check_model
from .repack import replaced, require_ordinary
from .split import Source, open_gguf
from .trim_vocab_llama import Ids, LlamaTokenizer, require_loadable
from .trim_vocab_tokens import PREFIX, Kept, Vocabulary, array_parts, close, keep_list, read_vocabulary, strings

# progress(what is done, units done, units in all); units are bytes
Progress = Callable[[str, int, int], None]

MULTIPLE = 32  # of kept tokens: the output matrix then fits tiles, and the CPU backend's interleaved rows
CORPUS_PIECE = 1 << 18  # bytes that are tokenized at once, about
CHECKED = 1 << 23  # bytes of the corpus that the trimmed tokenizer must reproduce
COPY_BYTES = 1 << 24
HF_JSON = "tokenizer.huggingface.json"
INT32 = 5  # GGUF value type
INTEGERS = (0, 1, 2, 3, 4, 5, 10, 11)
# Tensors with one row (or element) for each token.
PER_TOKEN = ("token_embd.weight", "output.weight", "output.bias", "per_layer_token_embd.weight")
PER_TOKEN_ENDS = (".nextn.embed_tokens.weight", ".nextn.shared_head_head.weight")


@dataclass(frozen=True)
class TrimReport:
    """The result of trimming: sizes in bytes, tokens by why they were kept, and the corpus before and after."""

    path: Path | None  # None: nothing was written
    source_size: int
    size: int
    n_vocab: int
    n_kept: int
    kept_special: int
    kept_corpus: int
    kept_listed: int
    kept_intermediate: int
    kept_filled: int
    n_merges: int
    n_merges_kept: int
    corpus_bytes: int
    corpus_tokens: int
    corpus_covered: float  # share of the corpus' tokens that are kept
    checked_tokens: int  # of the corpus as the source cuts it
    checked_tokens_after: int  # of the same text as the trimmed tokenizer cuts it
    notes: tuple[str, ...]


def corpus_pieces(paths: Sequence[str | os.PathLike[str]]) -> Iterator[bytes]:
    """Read the text of files in pieces that end at the ends of lines; bytes that are not UTF-8 replaced."""
    for path in paths:
        with Path(path).open("rb") as f:
            while piece := f.read(CORPUS_PIECE):
                piece += f.readline(CORPUS_PIECE)
                yield piece.decode("utf-8", "replace").encode()


@dataclass(frozen=True)
class _Counted:
    counts: Counter[int]
    n_bytes: int
    sample: list[tuple[bytes, Ids]]  # the first pieces, for the check


def _count(tokenizer: LlamaTokenizer, paths: Sequence[str | os.PathLike[str]], progress: Progress | None) -> _Counted:
    total = sum(Path(p).stat().st_size for p in paths)
    counts: Counter[int] = Counter()
    sample: list[tuple[bytes, Ids]] = []
    done = 0
    for piece in corpus_pieces(paths):
        ids = tokenizer(piece)
        values, n = np.unique(ids, return_counts=True)
        counts.update(dict(zip(values.tolist(), n.tolist(), strict=True)))
        if done < CHECKED:
            sample.append((piece, ids))
        done += len(piece)
        if progress:
            progress("count", min(done, total), total)
    return _Counted(counts, done, sample)


# ---- metadata


def _select(kv: KeyValue, keep: Sequence[int]) -> bytes:
    """Make an array's record with only some of its elements."""
    kind, count, at = array_parts(kv)
    head = kv.raw[: kv.body] + struct.pack("<IQ", kind, len(keep))
    if kind == STRING:
        items = strings(kv)
        return head + b"".join(struct.pack("<Q", len(items[i])) + items[i] for i in keep)
    size = (len(kv.raw) - at) // count
    elements = np.frombuffer(kv.raw, np.uint8, offset=at).reshape(count, size)
    return head + elements[np.asarray(keep, np.int64)].tobytes()


def _renumber(f: Source, v: Vocabulary, kept: Kept) -> dict[str, bytes]:
    """Make new records for all metadata that has a token's number or one entry for each token."""
    n = len(v.tokens)
    new = {old: i for i, old in enumerate(kept.tokens)}
    changed: dict[str, bytes] = {}
    for key, kv in f.kv.items():
        if key == PREFIX + "merges":
            changed[key] = _select(kv, kept.merges)
        elif key == PREFIX + "suppress_tokens" and kv.type == ARRAY and array_parts(kv)[0] == INT32:
            ids = [new[i] for i in kv.value if i in new]
            changed[key] = kv.raw[: kv.body] + struct.pack(f"<IQ{len(ids)}i", INT32, len(ids), *ids)
        elif key.startswith(PREFIX) and kv.type == ARRAY and array_parts(kv)[1] == n:
            changed[key] = _select(kv, kept.tokens)
        elif (special := _special_id(kv, n)) is not None:
            changed[key] = _scalar(kv, new[special])
        elif key == f"{f.architecture}.vocab_size" and kv.value == n:
            changed[key] = _scalar(kv, len(kept.tokens))
    return changed


def _scalar(kv: KeyValue, value: int) -> bytes:
    """Make an integer's record with another value."""
    if kv.type == UINT32:
        return w.kv_u32(kv.key, value)
    return kv.raw[: kv.body] + value.to_bytes(len(kv.raw) - kv.body, "little", signed=True)


def _special_id(kv: KeyValue, n: int) -> int | None:
    """Return the token that a key such as tokenizer.ggml.eos_token_id names; None of other keys, and where it is no
    token."""
    if not (kv.key.startswith(PREFIX) and kv.key.endswith("_token_id") and kv.type in INTEGERS):
        return None
    value = int(kv.value)
    return value if 0 <= value < n else None


# ---- tensors


def _per_token(f: Source, n: int) -> set[str]:
    """Return names of the tensors to cut.

    Raises:
        GGUFError: a tensor's size is not the vocabulary's though it should be, or the other way round.
    """
    cut = set()
    for t in f.tensors.values():
        if t.name in PER_TOKEN or t.name.endswith(PER_TOKEN_ENDS):
            if t.ne[-1] != n:
                raise GGUFError(f"{f.path}: tensor {t.name!r} is for {t.ne[-1]} tokens, the vocabulary has {n}")
            cut.add(t.name)
        elif not t.name.startswith("blk.") and n in t.ne:
            raise GGUFError(f"{f.path}: tensor {t.name!r} {list(t.ne)} depends on the vocabulary in an unknown way")
    if "token_embd.weight" not in cut:
        raise GGUFError(f"{f.path} has no token embeddings to cut")
    return cut


def _copy(f: Source, t: TensorInfo, out: BinaryIO, at: int, rows: npt.NDArray[np.bool_] | None) -> Iterator[int]:
    """Copy a tensor's bytes, or of its entries for each token only those in ``rows``; yields bytes read."""
    entry = 1 if rows is None else t.nbytes // t.ne[-1]
    n = t.nbytes // entry
    step = min(n, max(1, COPY_BYTES // entry))
    buffer = np.empty(step * entry, np.uint8)
    out.seek(at)
    for first in range(0, n, step):
        data = buffer[: min(step, n - first) * entry]
        f.read_tensor(t, first * entry, data)
        if rows is None:
            out.write(data.data)
        else:
            out.write(data.reshape(-1, entry)[rows[first : first + step]].data)
        yield len(data)


# ---- the whole


def trim_vocab(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    corpus: Sequence[str | os.PathLike[str]],
    min_count: int = 1,
    keep_tokens: str | os.PathLike[str] | None = None,
    drop_unused: bool = False,
    dry_run: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> TrimReport:
    """Write ``src`` to ``dst`` with only the tokens that special texts, bytes and a corpus need.

    Any text whose tokens are all kept is cut as before; other text is cut into smaller pieces, down to bytes. The
    number of tokens is filled up to a multiple of 32.

    Args:
        corpus: text files (UTF-8).
        min_count: drop tokens that the corpus has less often. Above 1 the corpus itself may be cut anew.
        keep_tokens: a file of further tokens to keep, one a line.
        drop_unused: also drop control tokens named "unused", which no template uses.
        dry_run: only report what would be done.
        overwrite: replace ``dst`` if it exists.
        progress: called with ("count" | "write", bytes done, bytes in all).

    Raises:
        GGUFError: the model is damaged, repacked, of a kind whose tokenizer or tensors are not understood, or there
            is nothing to drop; or the trimmed tokenizer would not give the corpus back.
        OSError: reading or writing failed; FileExistsError: ``dst`` exists. In any case ``dst`` is as it was.
    """
    if min_count < 1:
        raise ValueError("min_count is at least 1")
    if not corpus:
        raise GGUFError("a corpus is required: its tokens are kept")
    with open_gguf(src) as f:
        require_ordinary(f)
        check_model(f, f.architecture)
        if not dry_run:
            w.check_output(Path(dst), [*f.paths, *map(Path, corpus)], overwrite)  # reading the corpus may take long
        v = read_vocabulary(f)
        n = len(v.tokens)
        cut = _per_token(f, n)
        if any(name.startswith("blk.") for name in f.tensors):  # else a table of embeddings alone
            require_loadable(f.paths[0])
        with closing(LlamaTokenizer(f.paths[0])) as tokenizer:
            counted = _count(tokenizer, corpus, progress)
            chosen = _choose(f, v, counted, min_count, keep_tokens, drop_unused)
            kept, n_kept = chosen.kept, len(chosen.kept.tokens)
            records = [r for r in replaced(f, _renumber(f, v, kept)) if not _is_key(r, HF_JSON)]
            shapes = [(t.name, t.type, (*t.ne[:-1], n_kept) if t.name in cut else t.ne) for t in f.tensors.values()]
            head, offsets, size = w.header(f.version, records, shapes, f.alignment)
            after = 0
            if not dry_run:
                sources = [*f.paths, *map(Path, corpus)]
                with w.complete_file(Path(dst), size, sources=sources, overwrite=overwrite) as out:
                    _write(f, out, head, offsets, kept, n, cut, progress)
                    f.require_unchanged()
                    after = _check(out, tokenizer, counted, kept, n)
    total, tokens = counted.counts.total(), set(kept.tokens)
    return TrimReport(
        path=None if dry_run else Path(dst),
        source_size=f.size,
        size=size,
        n_vocab=n,
        n_kept=n_kept,
        kept_special=chosen.special,
        kept_corpus=chosen.corpus,
        kept_listed=chosen.listed,
        kept_intermediate=kept.intermediate,
        kept_filled=kept.filled,
        n_merges=len(v.merges),
        n_merges_kept=len(kept.merges),
        corpus_bytes=counted.n_bytes,
        corpus_tokens=total,
        corpus_covered=sum(count for i, count in counted.counts.items() if i in tokens) / total if total else 1.0,
        checked_tokens=sum(len(ids) for _, ids in counted.sample),
        checked_tokens_after=after,
        notes=tuple(_notes(f, counted)),
    )


@dataclass(frozen=True)
class _Chosen:
    """Tokens to keep, and how many of them for which reason."""

    kept: Kept
    special: int
    corpus: int
    listed: int


def _choose(
    f: Source,
    v: Vocabulary,
    counted: _Counted,
    min_count: int,
    keep_tokens: str | os.PathLike[str] | None,
    drop_unused: bool,
) -> _Chosen:
    n = len(v.tokens)
    special = {*v.essential(drop_unused), *(i for kv in f.kv.values() if (i := _special_id(kv, n)) is not None)}
    used = {i for i, count in counted.counts.items() if count >= min_count} - special
    listed: set[int] = set()
    if keep_tokens is not None:
        lines = Path(keep_tokens).read_text("utf-8-sig", "surrogateescape").split("\n")
        listed = {*keep_list(v, lines, str(keep_tokens))} - special - used
    kept = close(v, special | used | listed, MULTIPLE)
    if len(kept.tokens) >= n:
        raise GGUFError(f"{f.path}: all {n} tokens are needed: nothing to drop")
    return _Chosen(kept, len(special), len(used), len(listed))


def _is_key(record: bytes, key: str) -> bool:
    raw = key.encode()
    return record[: 8 + len(raw)] == struct.pack("<Q", len(raw)) + raw


def _notes(f: Source, counted: _Counted) -> list[str]:
    notes = ["Token numbers change: adapters, draft models and saved states of the source do not fit this file."]
    if HF_JSON in f.kv:
        notes.append(f"{HF_JSON} describes the whole vocabulary and was left out.")
    if not counted.counts:
        notes.append("The corpus is empty: only special tokens and bytes are kept.")
    return notes


def _write(
    f: Source,
    out: BinaryIO,
    head: bytes,
    offsets: Sequence[int],
    kept: Kept,
    n: int,
    cut: set[str],
    progress: Progress | None,
) -> None:
    rows, total, done = kept.mask(n), sum(t.nbytes for t in f.tensors.values()), 0
    out.write(head)
    for t, at in zip(f.tensors.values(), offsets, strict=True):
        for read in _copy(f, t, out, at, rows if t.name in cut else None):
            done += read
            if progress:
                progress("write", done, total)
    out.flush()


def _check(out: BinaryIO, tokenizer: LlamaTokenizer, counted: _Counted, kept: Kept, n: int) -> int:
    """Send the corpus through the trimmed tokenizer: the same text must come back, and the same tokens where all are
    kept.

    Returns:
        How many tokens it takes.
    """
    new = np.full(n, -1, np.int32)
    new[kept.tokens] = np.arange(len(kept.tokens), dtype=np.int32)
    after = 0
    with closing(LlamaTokenizer(f"/proc/self/fd/{out.fileno()}")) as trimmed:
        for piece, ids in counted.sample:
            got = trimmed(piece)
            after += len(got)
            renumbered = new[ids]
            if (renumbered >= 0).all():
                same = np.array_equal(got, renumbered)
            else:
                same = trimmed.text(got) == tokenizer.text(ids)
            if not same:
                raise GGUFError(
                    "the trimmed tokenizer cuts the corpus differently from the source's: nothing was written"
                )
    return after


def as_json(report: TrimReport) -> dict[str, Any]:
    """Convert a report for scripts."""
    out: dict[str, Any] = {**report.__dict__, "path": None if report.path is None else str(report.path)}
    return {**out, "notes": list(report.notes)}
