"""A model's own texts with what a draft head learns from: hidden states of some layers, and the likeliest next tokens.
Kept in a work folder, a shard at a time, and taken up again where a run was interrupted.

NNNNN.npy   float16 [tokens, layers x n_embd]: the layers' outputs
NNNNN.npz   tokens int32 [tokens]; ids int32 and probs float16 [tokens, TOP]: the likeliest tokens behind each, with
            their probabilities; lengths and starts int64 [texts]: tokens of each text, and of its prompt. Written last.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilebeam.engine.sampler import NORM, BatchSampler, Sampler, SampleRows
from tilebeam.errors import TilebeamError
from tilebeam.gguf.whole_file import whole_file
from tilebeam.model.lm import LM
from tilebeam.native.llama import Context
from tilebeam.prompt import Prompt
from tilebeam.sampling_params import SamplingParams

TOP = 24  # of the model's likeliest tokens that are kept
_SHARD = 32  # texts
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
    lm: LM, prompts: Sequence[Prompt], folder: Path, setting: TextSetting, finished: Callable[[int], None]
) -> None:
    """Generate and read all texts that are not in the folder yet.

    Args:
        lm: with a tap of the layers: loaded with a draft head, which is not asked.
        finished: called with the texts of every shard, those that were there, too.

    Raises:
        TilebeamError: the folder has texts of another setting, or a text is longer than the context.
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


def _write(lm: LM, prompts: Sequence[Prompt], stem: Path, setting: TextSetting, first: int) -> None:
    params = [
        SamplingParams(
            temperature=0.0 if i % 2 else setting.temperature,
            top_p=0.95,
            max_tokens=setting.max_tokens,
            seed=setting.seed + first + i,
        )
        for i in range(len(prompts))
    ]
    outputs = lm.generate(list(prompts), params)
    texts = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
    with lm.raw_decode() as context:
        likeliest = Sampler(SamplingParams(temperature=0), 0, context.model.vocab)
        try:
            read = [_read(lm, context, text, setting.layers, likeliest) for text in texts]
        finally:
            likeliest.close()
    features, ids, probs = (np.concatenate(parts) for parts in zip(*read, strict=True))
    with whole_file(stem.with_suffix(".npy")) as partial, open(partial, "wb") as file:
        np.save(file, features)
    with whole_file(stem.with_suffix(".npz")) as partial, open(partial, "wb") as file:
        np.savez(
            file,
            tokens=np.concatenate([np.array(text, np.int32) for text in texts]),
            ids=ids,
            probs=probs,
            lengths=np.array([len(text) for text in texts]),
            starts=np.array([len(o.prompt_token_ids) for o in outputs]),
        )


def _read(lm: LM, context: Context, text: list[int], layers: Sequence[int], likeliest: Sampler) -> tuple[Any, Any, Any]:
    """Return the features of a text's tokens, the likeliest tokens behind each, and their probabilities."""
    draws, taps = BatchSampler(context), context.taps
    assert taps is not None
    features, ids, logits = list[Any](), list[Any](), list[Any]()
    step = min(context.max_outputs, context.n_batch, 256)
    for start in range(0, len(text), step):
        part = text[start : start + step]
        context.fill([(0, start, part, len(part))])
        taps.start(len(part))
        code = context.decode(len(part))
        taps.stop()
        lm.check_decode(code)
        rows = taps.rows(layers)
        if rows is None or not np.isfinite(rows).all():
            raise TilebeamError("The model computed hidden states that are not numbers: its weights are damaged.")
        features.append(np.clip(rows, -_MOST, _MOST).astype(np.float16))
        drawn = SampleRows([(likeliest, entry, NORM) for entry in range(len(part))])
        draws.sample(drawn)
        for entry, norm in enumerate(drawn.norms):
            best, its = draws.top(entry, TOP)
            ids.append(best)
            logits.append(np.array(its) - norm)
    context.clear()
    return np.concatenate(features), np.array(ids, np.int32), np.exp(logits).astype(np.float16)


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
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise TilebeamError(f"{path} is damaged ({error}): delete it, and the command makes it anew.") from None
        ends = np.cumsum(lengths)
        for end, length, start in zip(ends, lengths, starts, strict=True):
            part = slice(end - length, end)
            found.append(DraftText(tokens[part], features[part], ids[part], probs[part], int(start)))
    return found
