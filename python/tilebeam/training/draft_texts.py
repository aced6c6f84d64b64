"""A model's own texts with what a draft head learns from: hidden states of some layers, and the likeliest next tokens.
Kept in a work folder, a shard at a time, and taken up again where a run was interrupted.

NNNNN.npy   float16 [tokens, layers x n_embd]: the layers' outputs
NNNNN.npz   tokens int32 [tokens]; ids int32 and probs float16 [tokens, TOP]: the likeliest tokens behind each, with
            their probabilities; lengths and starts int64 [texts]: tokens of each text, and of its prompt. Written last.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tilebeam.engine.sampler import NORM, BatchSampler, Sampler, SampleRows
from tilebeam.errors import TilebeamError
from tilebeam.gguf.whole_file import whole_file
from tilebeam.model.lm import LM
from tilebeam.native.llama import BatchPiece, Context
from tilebeam.sampling_params import SamplingParams

TOP = 24  # of the model's likeliest tokens that are kept
_SHARD = 128  # texts
_MOST = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class TextSetting:
    """All that the texts depend on.

    Attributes:
        model: the file's fingerprint; prompts: a digest of them, in their order.
        layers: whose outputs are kept, from 0.
        max_tokens: of a text behind its prompt; temperature: of every second text, the others are greedy.
    """

    model: str
    prompts: str
    layers: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class DraftText:
    """A text, its arrays as in a shard; `start`: tokens of its prompt."""

    tokens: npt.NDArray[np.int32]
    features: npt.NDArray[np.float16]
    ids: npt.NDArray[np.int32]
    probs: npt.NDArray[np.float16]
    start: int


def collect(
    lm: LM, prompts: Sequence[list[int]], folder: Path, setting: TextSetting, finished: Callable[[int], None]
) -> None:
    """Have the model write all texts that are not in the folder yet.

    Args:
        lm: with a tap of the layers: loaded with a draft head, which is not asked.
        prompts: their tokens; with `setting.max_tokens` more they fit into the context.
        finished: called with the texts of every shard, those that were there, too.

    Raises:
        TilebeamError: the folder has texts of another setting, or the model is damaged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    about = json.dumps(asdict(setting), indent=1).encode()
    described = folder / "setting.json"
    if described.exists() and described.read_bytes() != about:
        raise TilebeamError(f"{folder} has texts of another model, or of other prompts or options: use another --work.")
    with whole_file(described) as partial:
        partial.write_bytes(about)
    lm.use_drafter(None)
    context = lm._context
    following, context.follower = context.follower, None
    try:
        for first in range(0, len(prompts), _SHARD):
            part = prompts[first : first + _SHARD]
            stem = folder / f"{first // _SHARD:05d}"
            if not stem.with_suffix(".npz").exists():
                _write(lm, part, stem, setting, first)
            finished(len(part))
    finally:
        context.follower = following


@dataclass
class _Growing:
    """A text that is being written; `most`: tokens that it may have; `done`: those that were decoded. Its rows are
    those of a `DraftText`."""

    tokens: list[int]
    start: int
    most: int
    sampler: Sampler
    done: int = 0
    features: list[npt.NDArray[np.float16]] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    logs: list[npt.NDArray[np.float64]] = field(default_factory=list)


def _write(lm: LM, prompts: Sequence[list[int]], stem: Path, setting: TextSetting, first: int) -> None:
    with lm.raw_decode() as context:
        texts = []
        for i, prompt in enumerate(prompts, first):
            params = SamplingParams(temperature=0.0 if i % 2 else setting.temperature, top_p=0.95)
            sampler = Sampler(params, setting.seed + i, context.model.vocab)
            texts.append(_Growing(list(prompt), len(prompt), len(prompt) + setting.max_tokens, sampler))
        try:
            _grow(lm, context, texts, setting.layers)
        finally:
            for text in texts:
                text.sampler.close()
    lengths = [len(text.tokens) for text in texts]
    # Nothing is known of a text's last token, which was not decoded, nor which tokens the model found likeliest within
    # its prompt.
    features = np.zeros((sum(lengths), texts[0].features[0].shape[1]), np.float16)
    ids, probs = (np.zeros((sum(lengths), TOP), dtype) for dtype in (np.int32, np.float16))
    for text, end in zip(texts, np.cumsum(lengths).tolist(), strict=True):
        features[end - len(text.tokens) : end - 1] = np.concatenate(text.features)
        ids[end - 1 - len(text.ids) : end - 1] = text.ids
        probs[end - 1 - len(text.ids) : end - 1] = np.exp(text.logs)
    with whole_file(stem.with_suffix(".npy")) as partial, open(partial, "wb") as file:
        np.save(file, features)
    with whole_file(stem.with_suffix(".npz")) as partial, open(partial, "wb") as file:
        np.savez(
            file,
            tokens=np.concatenate([np.array(text.tokens, np.int32) for text in texts]),
            ids=ids,
            probs=probs,
            lengths=np.array(lengths),
            starts=np.array([text.start for text in texts]),
        )


def _grow(lm: LM, context: Context, texts: Sequence[_Growing], layers: Sequence[int]) -> None:
    """Have the model write texts, as many at a time as the context has room for, and keep what its steps computed."""
    draws, ends = BatchSampler(context), set(context.model.vocab.ends)
    waiting, running, free = deque(texts), dict[int, _Growing](), set(range(context.n_seq_max))
    room = lm.n_ctx
    while waiting or running:
        while waiting and free and room >= waiting[0].most:
            text = waiting.popleft()
            running[free.pop()] = text
            room -= text.most
        pieces = _pieces(running, context.n_batch)
        features, end = _features(lm, context, pieces, layers), 0
        drawing = list[tuple[int, int]]()
        for seq, _, part, whole in pieces:
            text, end = running[seq], end + len(part)
            text.features.append(features[end - len(part) : end])
            text.done += len(part)
            if whole:
                drawing.append((seq, end - 1))
        drawn = SampleRows([(running[seq].sampler, entry, NORM) for seq, entry in drawing])
        draws.sample(drawn)
        for (seq, entry), token, norm in zip(drawing, drawn.tokens.tolist(), drawn.norms, strict=True):
            if token < 0:
                raise TilebeamError("The model computed logits that are not numbers: its weights are damaged.")
            text = running[seq]
            best, logits = draws.top(entry, TOP)
            text.ids.append(best)
            text.logs.append(np.array(logits) - norm)
            text.tokens.append(token)
            if token in ends or len(text.tokens) == text.most:
                context.drop(seq)
                free.add(seq)
                room += text.most
                del running[seq]


def _pieces(running: Mapping[int, _Growing], n_batch: int) -> list[BatchPiece]:
    """Return what the next batch has of each text; a long prompt is read in parts."""
    pieces = list[BatchPiece]()
    for seq, text in running.items():
        if part := text.tokens[text.done : text.done + n_batch]:
            pieces.append((seq, text.done, part, int(text.done + len(part) == len(text.tokens))))
            n_batch -= len(part)
    return pieces


def _features(lm: LM, context: Context, pieces: Sequence[BatchPiece], layers: Sequence[int]) -> npt.NDArray[np.float16]:
    """Decode a batch, and return the layers' outputs, float16 [tokens, layers x n_embd]."""
    taps, n = context.taps, sum(len(part) for _, _, part, _ in pieces)
    assert taps is not None
    context.fill(pieces)
    with taps.copying(n):
        code = context.decode(n)
    lm.check_decode(code)
    rows = taps.rows(layers)
    if rows is None or not np.isfinite(rows).all():
        raise TilebeamError("The model computed hidden states that are not numbers: its weights are damaged.")
    return np.clip(rows, -_MOST, _MOST).astype(np.float16)


def texts_of(folder: Path) -> list[DraftText]:
    """Return all texts of a folder, the features mapped from their files.

    Raises:
        TilebeamError: a shard is damaged.
    """
    found = []
    for path in sorted(folder.glob("[0-9]*.npz")):
        try:
            features = np.load(path.with_suffix(".npy"), mmap_mode="r")
            with np.load(path) as shard:
                tokens, ids, probs, lengths, starts = (
                    shard[name] for name in ("tokens", "ids", "probs", "lengths", "starts")
                )
            if not len(features) == len(tokens) == len(ids) == len(probs) == lengths.sum():
                raise ValueError("its parts differ in length")
        except Exception as error:  # numpy raises all kinds of them
            raise TilebeamError(f"{path} is damaged ({error}): delete it, and the command makes it anew.") from None
        ends = np.cumsum(lengths)
        for end, length, start in zip(ends, lengths, starts, strict=True):
            part = slice(end - length, end)
            found.append(DraftText(tokens[part], features[part], ids[part], probs[part], int(start)))
    return found
