"""Random models whose next tokens do not depend on a kernel's rounding, and a drafter that knows them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt
import pytest
from graph_watch import Watch, array, name_of
from tilebeam import LM, RequestOutput
from tilebeam import gguf as gguf_tools
from tilebeam.engine.drafter import Drafter
from tilebeam.engine.engine import Engine
from tilebeam.engine.kv_cache import KvCache, PrefixCache
from tilebeam.engine.request import Sample
from tilebeam.native.llama import Context, log_router
from tilebeam.text_state import TextState

from bench.lib.synth import SynthConfig, preset, write_model

# Of load: where rows of a batch come out the same, but for last bits, whatever else is in it.
EXACT: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "flash_attn": False}
_FLOAT = {"token_embd": "f32", "output": "f32"}


def empty_state(n_embd: int) -> TextState:
    """The state of a text without tokens."""
    zeros = np.zeros(n_embd, np.float32)
    return TextState(0, zeros, zeros, zeros)


def equal_logits(path: Path, **changes: Any) -> Path:
    """A model all of whose logits are zero: what is drawn depends on the seed alone, whatever a batch looks like."""
    config = _write(path, changes)
    _replace_output(path, np.zeros((config.n_vocab, config.n_embd), np.float32))
    return path


def separate_logits(path: Path, **changes: Any) -> Path:
    """A model that prefers, by a wide margin, one token after each: the one 97 above it."""
    config = _write(path, changes)
    with gguf_tools.GGUFFile(path) as file:
        at = file.tensors["token_embd.weight"].offset
    shape = (config.n_vocab, config.n_embd)
    rows = np.fromfile(path, np.float32, config.n_vocab * config.n_embd, offset=at).reshape(shape)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    # Row j of the output is like the embedding of token j - 97.
    _replace_output(path, 3 * unit[np.roll(np.arange(config.n_vocab), 97)])
    return path


def _write(path: Path, changes: dict[str, Any]) -> SynthConfig:
    config = preset("tiny", **{"arch": "llama", "type": "f32", "types": _FLOAT, "n_layer": 2, **changes})
    write_model(path, config)
    return config


def _replace_output(path: Path, weights: np.ndarray[Any, Any]) -> None:
    with gguf_tools.GGUFFile(path) as file:
        at = file.tensors["output.weight"].offset
    with path.open("r+b") as f:
        f.seek(at)
        f.write(weights.astype(np.float32).tobytes())


class ScriptedDrafter(Drafter):
    """Knows the samples of calls that were made before, and proposes what comes in them, or something else.

    Args:
        outputs: of the calls. A sample is known by its prompt and its index; of others nothing is proposed.
        mode: "right": 4 tokens that come; "long": all of them; "wrong": 4 others; "partly": of 4 some right, as the
            position has it; "empty": none; "turns": one of the others after the other.

    Attributes:
        asked: how many proposals were wanted.
    """

    def __init__(self, outputs: list[RequestOutput], mode: str) -> None:
        self._known = {(tuple(o.prompt_token_ids), s.index): s.token_ids for o in outputs for s in o.outputs}
        self._mode = mode
        self.asked = 0

    def propose(self, asked: Sequence[tuple[Sample, int]], rows: int) -> list[list[int]]:
        assert 1 <= len(asked) <= rows
        return [self._guess(sample) for sample, _ in asked]

    def _guess(self, sample: Sample) -> list[int]:
        self.asked += 1
        at = len(sample.tokens)
        coming = self._known.get((tuple(sample.request.prompt_ids), sample.index), [])[at:]
        turn = (at + sample.index) % 4
        mode = ("right", "wrong", "partly", "empty")[turn] if self._mode == "turns" else self._mode
        if mode == "long":
            return coming
        if mode == "empty":
            return []
        right = {"right": 4, "wrong": 0, "partly": turn}[mode]
        return coming[:right] + [(t + 1) % 500 for t in coming[right:4]]


class Count:
    """Batches of a model, and the tokens in them."""

    def __init__(self, lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches = self.tokens = 0
        real = lm.engine.context.decode

        def decode(n: int) -> int:
            self.batches += 1
            self.tokens += n
            return real(n)

        monkeypatch.setattr(lm.engine.context, "decode", decode)


class _Layer(Watch):
    """Takes what a layer puts out."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.rows = np.zeros((0, 0), np.float32)

    def wants(self, t: Any) -> bool:
        return name_of(t) == self.name

    def add(self, t: Any) -> None:
        self.rows = array(t, np.float32)[0, 0].copy()


def states_behind(lm: LM, tokens: list[int]) -> npt.NDArray[np.float32]:
    """The hidden states of a text's tokens, [tokens, n_embd], read at once: behind the layer that the model was
    loaded for, or behind the final norm."""
    if (tap := lm.engine.context.tap) is None:
        return lm.hidden([tokens], [range(len(tokens))])[0].hidden
    watch, n = _Layer(tap.names[0]), len(tokens)
    p = C.llama_context_default_params()
    p.n_ctx = p.n_batch = p.n_ubatch = max(n, 32)
    p.cb_eval, p.type_k, p.type_v, p.flash_attn_type = watch.callback, 0, 0, C.LLAMA_FLASH_ATTN_TYPE_DISABLED
    with log_router().capture():
        context = Context(C.llama_init_from_model(lm.engine.context.model.pointer, p), lm.engine.context.model, n, n)
    context.token[:n], context.pos[:n], context.seq[:n], context.output[:n] = tokens, np.arange(n), 0, 1
    assert context.decode(n) == 0
    with log_router().capture():
        context.close()
    return watch.rows


def check_cells(kv: KvCache) -> None:
    """No cell and no id is lost, or counted wrong; a cached sequence has its cells."""
    owners = np.zeros_like(kv._owners)
    for seq in kv.live:
        assert len(set(seq.cells)) == len(seq.cells) == len(seq.tokens), seq.id
        owners[seq.cells] += 1
    assert owners.tolist() == kv._owners.tolist()
    assert sorted(kv._free_cells) == np.flatnonzero(owners == 0).tolist()
    assert sorted([*kv._live, *kv._free_ids]) == list(range(kv.limits.n_ids))
    held = {s for seq in kv.live for n, s in seq.snapshots.items() if n == s.length <= len(seq)}
    assert sum(len(seq.snapshots) for seq in kv.live) == sum(len(s.holders) for s in held)
    assert len(held) == len(kv.snapshots)
    assert sum(s.state.nbytes for s in held) == kv.snapshots.bytes <= kv.limits.snapshot_bytes
    if isinstance(kv, PrefixCache):
        assert all(kv._live.get(seq.id) is seq for seq in kv._cached.values())


def check_engine(engine: Engine, *, reading: bool = False) -> None:
    """No cells are lost, and those of a sample are its text's: between two steps, or while a batch is decoded.

    ``reading``: a reader has sequences of its own.
    """
    check_cells(engine.kv)
    scheduler, live = engine.scheduler, engine.kv.live
    samples = [*scheduler.running, *scheduler.queue]
    pinned = {id(s.request): s.request.pinned for s in samples}.values()
    held = [seq for seq in (*(s.kv for s in samples), *pinned) if seq is not None]
    owned = {seq.id for seq in held}
    assert all(seq in live for seq in held)
    assert reading or all(seq.id in owned or seq in engine.kv._cached.values() for seq in live)
    assert len(scheduler.running) <= scheduler.n_slots
    for s in samples:
        assert s.finish is None
        if s.kv is not None:
            text = s.target()
            assert s.kv.tokens[: len(text)] == text[: len(s.kv)]
            assert len(s.kv) <= len(text) or scheduler.drafter is not None
