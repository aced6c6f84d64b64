"""Draft heads with random weights, and what their guesses must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from tilebeam import LM, RequestOutput, SamplingParams
from tilebeam.engine.draft_head import DraftHead
from tilebeam.model.head_file import K_MODEL

from bench.lib.synth import SynthConfig

TOKENS = (100, 101, 102)
# Texts of three tokens, which the head guesses among: some guesses are right.
PARAMS = SamplingParams(
    max_tokens=40, temperature=1, top_k=0, top_p=1, seed=3, ignore_eos=True, logit_bias=dict.fromkeys(TOKENS, 1e4)
)


def write_head(
    path: Path,
    model: SynthConfig,
    tokens: Sequence[int],
    layers: Sequence[int] = (0, 1, 2),
    seed: int = 0,
    mark: str = "",
    tensors: Mapping[str, npt.NDArray[Any]] = MappingProxyType({}),
    **changes: Any,
) -> Path:
    """Write a head that guesses `tokens` only; it reads the outputs of `layers` of its model.

    Args:
        tensors: others than it would have, by name.
        changes: other metadata, by key without the architecture, "__" for ".".
    """
    rng, n_embd, n_head = np.random.default_rng(seed), model.n_embd, 2
    file = gguf.GGUFWriter(path, "eagle3")
    numbers = {
        "block_count": 1,
        "context_length": 4096,
        "embedding_length": n_embd,
        "feed_forward_length": 64,
        "attention.head_count": n_head,
        "attention.head_count_kv": 1,
        "vocab_size": model.n_vocab,
        "target_hidden_size": n_embd,
        "target_layers": [layer + 1 for layer in layers],
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    for key, value in numbers.items():
        (file.add_array if isinstance(value, list) else file.add_uint32)(f"eagle3.{key}", value)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_tokenizer_model("none")
    if mark:
        file.add_string(K_MODEL, mark)
    width = n_embd // n_head
    shapes = {
        "fc": (n_embd, len(layers) * n_embd),
        "output": (len(tokens), n_embd),
        "blk.0.attn_q": (n_embd, 2 * n_embd),
        "blk.0.attn_k": (width, 2 * n_embd),
        "blk.0.attn_v": (width, 2 * n_embd),
        "blk.0.attn_output": (n_embd, n_embd),
        "blk.0.ffn_gate": (64, n_embd),
        "blk.0.ffn_up": (64, n_embd),
        "blk.0.ffn_down": (n_embd, 64),
    }
    made = {
        f"{name}.weight": (rng.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32)
        for name, shape in shapes.items()
    }
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.attn_norm_2", "blk.0.ffn_norm"):
        made[f"{name}.weight"] = np.ones(n_embd, np.float32)
    for name, tensor in {**made, "d2t": np.array(tokens, np.int64), **tensors}.items():
        file.add_tensor(name, tensor)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


def check_guesses(lm: LM, calls: Sequence[list[list[int]]], params: SamplingParams) -> list[RequestOutput]:
    """Have a model with a head write texts, call by call, and compare the head's guesses with those for the texts read
    at once: whatever forks, cuts and pieces came before, and with what earlier calls left in the cache; return the last
    call's outputs."""
    seen = list[tuple[list[int], int, float]]()
    asked = dict[int, list[int]]()  # texts by their sequences
    waiting, guess = DraftHead.waiting, DraftHead.guess

    def note_texts(self: DraftHead, samples: Any) -> Any:
        spans = waiting(self, samples)
        asked.update({span[0]: samples[i].target() for i, span in spans.items()})
        return spans

    def note_guess(self: DraftHead, spans: Any) -> Any:
        result = guess(self, spans)
        for (id, *_), (token, p, _) in zip(spans, result, strict=True):
            if id in asked:  # its first guess; others come of the head's own states
                seen.append((asked.pop(id), token, p))
        return result

    with lm.keep_prefixes():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DraftHead, "waiting", note_texts)
            patch.setattr(DraftHead, "guess", note_guess)
            for prompts in calls:
                outputs = lm.generate(prompts, params)
        assert len(seen) > 60
        with lm.raw_decode() as context:
            assert lm.head is not None
            for text, token, p in seen[:: len(seen) // 40]:
                context.fill([(0, 0, text[:-1], 1)])
                lm.check_decode(context.decode(len(text) - 1))
                assert lm.head.failed is None
                known = lm.head._followed[0]
                assert (known.first, known.tokens) == (0, text[:-1])
                lm.head._settle(0, known)
                n = known.decoded
                ((again, q, _),) = lm.head.guess([(0, n, text[n + 1 :], known.states[n:])])
                assert (again, q) == (token, pytest.approx(p, abs=0.01))
                context.clear()
    return outputs
