"""Layers of the families besides `llama`, in PyTorch: `lfm2` (short convolutions, attention in few layers) and
`qwen3moe` (a mixture of experts).

The mathematics is llama.cpp's (src/models/lfm2.cpp, src/models/qwen3moe.cpp): queries and keys normalized by head,
rotary positions over the halves of a head, a gated causal convolution over `CONVOLVED` tokens, experts weighted by the
softmax over all of them, scaled to a sum of one. Parameters are called as the tensors of a file are; `export` stacks
the experts, which are matrices of their own here because Muon takes only these.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CONVOLVED = 3  # tokens that a short convolution sees

Kept = tuple[Tensor, ...]  # what a layer keeps of the tokens before: keys and values, or a convolution's last inputs


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. Every inner dimension is a multiple of 32, the block of Q4_0 and Q8_0.

    Attributes:
        family: the architecture of its file.
        attends: lfm2: layers with attention; the others have short convolutions.
        experts: qwen3moe: of each layer, `n_ff` wide each; `experts_used` of them for a token.
    """

    n_embd: int
    n_layer: int
    n_head: int
    n_ff: int
    n_ctx: int = 256
    rope_base: float = 10000.0
    eps: float = 1e-5
    family: str = "llama"
    attends: tuple[int, ...] = ()
    experts: int = 0
    experts_used: int = 0

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def heads_kv(self) -> int | list[int]:
        """Heads of keys and values: of all layers, or of each; 0 of layers without attention."""
        if self.family != "lfm2":
            return self.n_head
        return [self.n_head * (i in self.attends) for i in range(self.n_layer)]


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class _ShortConvolution(nn.Module):
    """The gated convolution of a layer, depthwise; it keeps its inputs of the last tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(width, 3 * width, bias=False)
        self.conv = nn.Linear(CONVOLVED, width, bias=False)  # [width, CONVOLVED], the latest token last
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, past: Kept | None) -> tuple[Tensor, Kept]:
        before, behind, value = self.in_proj(x).chunk(3, -1)
        inputs = before * value
        state = past[0] if past else inputs.new_zeros(len(x), CONVOLVED - 1, x.shape[-1])
        inputs = torch.cat([state, inputs], 1)
        seen = inputs.unfold(1, CONVOLVED, 1)  # [batch, length, width, CONVOLVED]
        out = self.out_proj(behind * (seen * self.conv.weight).sum(-1))
        return out, (inputs[:, 1 - CONVOLVED :],)


class Layer(nn.Module):
    """A layer of lfm2 or qwen3moe.

    Attributes:
        balance: a mixture's loss for unequal use of its experts (Fedus et al. 2022, eq. 4; 1 if all are used alike),
            of the last batch.
    """

    balance: Tensor | None = None

    def __init__(self, s: Shape, index: int) -> None:
        super().__init__()
        self.shape = s
        self.attn_norm, self.ffn_norm = Norm(s.n_embd, s.eps), Norm(s.n_embd, s.eps)
        self.shortconv: _ShortConvolution | None = None
        if s.family == "lfm2" and index not in s.attends:
            self.shortconv = _ShortConvolution(s.n_embd)
        else:
            self.attn_q, self.attn_k, self.attn_v, self.attn_output = (
                nn.Linear(s.n_embd, s.n_embd, bias=False) for _ in range(4)
            )
            self.attn_q_norm, self.attn_k_norm = Norm(s.head_dim, s.eps), Norm(s.head_dim, s.eps)
        if s.experts:
            self.ffn_gate_inp = nn.Linear(s.n_embd, s.experts, bias=False)
            self.ffn_gate_exps, self.ffn_up_exps, self.ffn_down_exps = (
                nn.ModuleList(nn.Linear(n_in, n_out, bias=False) for _ in range(s.experts))
                for n_in, n_out in ((s.n_embd, s.n_ff), (s.n_embd, s.n_ff), (s.n_ff, s.n_embd))
            )
        else:
            self.ffn_gate, self.ffn_up = (nn.Linear(s.n_embd, s.n_ff, bias=False) for _ in range(2))
            self.ffn_down = nn.Linear(s.n_ff, s.n_embd, bias=False)

    def forward(self, x: Tensor, turns: Tensor, past: Kept | None) -> tuple[Tensor, Kept]:
        h = self.attn_norm(x)
        h, kept = self.shortconv(h, past) if self.shortconv is not None else self._attention(h, turns, past)
        x = x + h
        h = self.ffn_norm(x)
        if self.shape.experts:
            return x + self._mixture(h), kept
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h)), kept

    def _attention(self, h: Tensor, turns: Tensor, past: Kept | None) -> tuple[Tensor, Kept]:
        s, (batch, length, width) = self.shape, h.shape
        q, k, v = (
            w(h).view(batch, length, s.n_head, s.head_dim).transpose(1, 2)
            for w in (self.attn_q, self.attn_k, self.attn_v)
        )
        q, k = _rotated(self.attn_q_norm(q), turns), _rotated(self.attn_k_norm(k), turns)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        # With a past, one token at a time is read, and it sees everything.
        h = F.scaled_dot_product_attention(q, k, v.type_as(q), is_causal=past is None)
        return self.attn_output(h.transpose(1, 2).reshape(batch, length, width)), (k, v)

    def _mixture(self, h: Tensor) -> Tensor:
        """All experts of all tokens, which at this size costs less than sorting the tokens by expert."""
        s = self.shape
        shares = self.ffn_gate_inp(h).float().softmax(-1)
        best, chosen = shares.topk(s.experts_used, -1)
        weights = torch.zeros_like(shares).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        used = (weights > 0).float().flatten(0, -2).mean(0) / s.experts_used
        self.balance = s.experts * (used * shares.flatten(0, -2).mean(0)).sum()
        gate, up = (
            F.linear(h, torch.cat([e.weight for e in experts])) for experts in (self.ffn_gate_exps, self.ffn_up_exps)
        )
        inner = (F.silu(gate) * up).unflatten(-1, (s.experts, s.n_ff)) * weights.unsqueeze(-1)
        return F.linear(inner.flatten(-2).type_as(gate), torch.cat([e.weight for e in self.ffn_down_exps], 1))


def _rotated(x: Tensor, turns: Tensor) -> Tensor:
    low, high = x.float().chunk(2, -1)
    return torch.cat([low * turns.real - high * turns.imag, low * turns.imag + high * turns.real], -1).type_as(x)
