"""A character-level model in PyTorch: its vocabulary, the mathematics of the `llama` architecture, and sampling.

The mathematics is llama.cpp's (src/models/llama.cpp): RMS norm, rotary positions over adjacent pairs, heads, SwiGLU.
So the file that `export` writes gives the same logits. Layers of other families are in `families`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.lib.metadata import BOS, EOS, FIRST_PIECES

from .families import Kept, Layer, Norm, Shape
from .references import CONTROLS, HYBRID, MIXTURE, THINKER

CHARACTERS = "\n0123456789+-*?"
FIRST_CHARACTER = len(FIRST_PIECES)
N_VOCAB = 288  # whole tiles of 32 rows; of the tokens behind the characters the thinker uses `CONTROLS`

_IDS = {c: FIRST_CHARACTER + i for i, c in enumerate((*CHARACTERS, *CONTROLS))}
_PIECES = re.compile("|".join((*map(re.escape, CONTROLS), ".")), re.DOTALL)

Cache = tuple[int, list[Kept]]  # tokens so far, and what each layer keeps of them


def encode(text: str) -> list[int]:
    return [_IDS[c] for c in _PIECES.findall(text)]


def decode(ids: Sequence[int]) -> str:
    """Return the text of token ids; special ones are left out."""
    return "".join(CHARACTERS[i - FIRST_CHARACTER] for i in ids if 0 <= i - FIRST_CHARACTER < len(CHARACTERS))


SHAPES = {
    "0.1m": Shape(64, 2, 2, 192),
    "0.5m": Shape(96, 4, 3, 256),
    "3.1m": Shape(128, 16, 4, 320),
    THINKER: Shape(96, 6, 3, 256),
    HYBRID: Shape(96, 6, 3, 192, family="lfm2", attends=(2, 5)),
    MIXTURE: Shape(96, 4, 3, 96, family="qwen3moe", experts=8, experts_used=2),
}


class _Layer(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.attn_norm, self.ffn_norm = Norm(s.n_embd, s.eps), Norm(s.n_embd, s.eps)
        self.attn_q, self.attn_k, self.attn_v, self.attn_output = (
            nn.Linear(s.n_embd, s.n_embd, bias=False) for _ in range(4)
        )
        self.ffn_gate, self.ffn_up = (nn.Linear(s.n_embd, s.n_ff, bias=False) for _ in range(2))
        self.ffn_down = nn.Linear(s.n_ff, s.n_embd, bias=False)

    def forward(self, x: Tensor, turns: Tensor, past: Kept | None) -> tuple[Tensor, Kept]:
        s, (batch, length, _) = self.shape, x.shape
        h = self.attn_norm(x)
        q, k, v = (
            w(h).view(batch, length, s.n_head, s.head_dim).transpose(1, 2)
            for w in (self.attn_q, self.attn_k, self.attn_v)
        )
        q, k = _rotated(q, turns), _rotated(k, turns)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        # With a past, one token at a time is read, and it sees everything.
        h = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.attn_output(h.transpose(1, 2).reshape(batch, length, s.n_embd))
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h)), (k, v)


def _rotated(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


class TinyLlama(nn.Module):
    """`forward`: token ids [batch, length] to logits [batch, length, N_VOCAB]."""

    turns: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(N_VOCAB, shape.n_embd)
        self.blk = nn.ModuleList(
            _Layer(shape) if shape.family == "llama" else Layer(shape, i) for i in range(shape.n_layer)
        )
        self.output_norm = Norm(shape.n_embd, shape.eps)
        self.output = nn.Linear(shape.n_embd, N_VOCAB, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                deep = "attn_output" in name or "ffn_down" in name or "out_proj" in name
                if not name.endswith("shortconv.conv.weight"):
                    nn.init.normal_(p, std=0.02 / (2 * shape.n_layer) ** 0.5 if deep else 0.02)
        frequencies = shape.rope_base ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.arange(shape.n_ctx)[:, None] * frequencies
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.extend(ids, None)[0]

    def extend(self, ids: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        """Logits of more tokens (with a cache: one for each row), and the cache of all so far."""
        x = self.token_embd(ids)
        start, past = cache or (0, [None] * len(self.blk))
        end = start + ids.shape[1]
        now: list[Kept] = []
        for layer, before in zip(self.blk, past, strict=True):
            x, kept = layer(x, self.turns[start:end], before)
            now.append(kept)
        return self.output(self.output_norm(x)), (end, now)

    @property
    def balance(self) -> Tensor | None:
        """How unequally the last batch used the experts, a layer's mean; None: the model has none."""
        losses = [layer.balance for layer in self.blk if isinstance(layer, Layer) and layer.balance is not None]
        return torch.stack(losses).mean() if losses else None

    @property
    def n_params(self) -> int:
        return sum(p.numel() for p in self.parameters())


@torch.no_grad()
def sample(
    model: TinyLlama, prompts: Sequence[str], temperature: float, generator: torch.Generator, longest: int = 100
) -> list[str]:
    """One sampled text behind each prompt, in batches of prompts of one length."""
    was_training = model.training
    model.eval()
    encoded = [[BOS, *encode(prompt)] for prompt in prompts]
    groups: dict[int, list[int]] = {}
    for i, ids in enumerate(encoded):
        groups.setdefault(len(ids), []).append(i)
    texts = [""] * len(prompts)
    for members in groups.values():
        for at in range(0, len(members), 512):
            rows = members[at : at + 512]
            drawn = _sample_rows(model, [encoded[i] for i in rows], temperature, generator, longest)
            for i, text in zip(rows, drawn, strict=True):
                texts[i] = text
    model.train(was_training)
    return texts


def _sample_rows(
    model: TinyLlama, prompts: list[list[int]], temperature: float, generator: torch.Generator, longest: int
) -> list[str]:
    logits, cache = model.extend(torch.tensor(prompts), None)
    drawn: list[list[int]] = [[] for _ in prompts]
    alive = list(range(len(prompts)))
    for _ in range(longest):
        tokens = torch.multinomial((logits[:, -1] / temperature).softmax(-1), 1, generator=generator)
        keep = [row for row, token in enumerate(tokens[:, 0].tolist()) if token != EOS]
        for row in keep:
            drawn[alive[row]].append(int(tokens[row, 0]))
        if not keep:
            break
        if len(keep) < len(alive):
            alive = [alive[row] for row in keep]
            tokens = tokens[keep]
            cache = (cache[0], [tuple(part[keep] for part in kept) for kept in cache[1]])
        logits, cache = model.extend(tokens, cache)
    return [decode(ids) for ids in drawn]


def deeper(model: TinyLlama, layers: int) -> TinyLlama:
    """Add layers behind the last one that do not change the function yet."""
    found = TinyLlama(replace(model.shape, n_layer=model.shape.n_layer + layers))
    found.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        for layer in list(found.blk)[model.shape.n_layer :]:
            layer.attn_output.weight.zero_()
            layer.ffn_down.weight.zero_()
    return found


def save(model: TinyLlama, path: Path) -> None:
    """Save a checkpoint that `load_checkpoint` reads."""
    torch.save({"shape": asdict(model.shape), "weights": model.state_dict()}, path)


def load_checkpoint(path: Path) -> TinyLlama:
    data = torch.load(path, weights_only=True)
    model = TinyLlama(Shape(**data["shape"]))
    model.load_state_dict(data["weights"])
    return model
