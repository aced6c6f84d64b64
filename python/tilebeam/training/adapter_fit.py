"""Fits a reward adapter with PyTorch: LoRA (Hu et al., arXiv 2106.09685) in the upper layers of a model, and a head on
its last hidden state, which tell right samples from wrong ones (a verifier: Cobbe et al., arXiv 2110.14168).

The lower layers stay as they are, so their outputs are computed once. Every token learns its sample's verdict, the last
one as much as all others together, so that beginnings are rated, too; and of each pair of a problem's samples the right
one is to be above the wrong one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tilebeam import gguf as gguf_tools
from tilebeam.errors import TilebeamError, gguf_errors
from tilebeam.gguf.adapter_check import K_ALPHA
from tilebeam.gguf.fingerprint import fingerprint
from tilebeam.gguf.gguf_write import small_gguf
from tilebeam.gguf.weights import tensor_values
from tilebeam.scoring.reward_heads import ADAPTER_BIAS, ADAPTER_WEIGHTS, PREFIX
from tilebeam.training.draft_fit import number_type, rotated, rows_of, write_checkpoint

RANK = 16
_ALPHA = 2.0  # what LoRA's products are multiplied by
_RATE, _HEAD_RATE, _WARM_UP = 4e-4, 2e-3, 10
_BATCH = 2  # problems
_LONGEST = 512  # tokens of a sample that are learnt from
_PAIRS = 0.5  # weight of the order within a problem against that of verdicts
_INPUT = 0.1  # of the head's: a normed state has elements of 1 to 10
_CHECKPOINT = 60  # seconds
# By architecture: whether heads are rotated in halves, not in neighbors (ggml's NEOX).
_FAMILIES = {"llama": False, "qwen2": True, "qwen3": True}


@dataclass(frozen=True)
class Problem:
    """A problem's prompt and samples as tokens, and the share of each sample that is right, 0 to 1."""

    prompt: list[int]
    samples: list[list[int]]
    right: list[float]


class _Frame:
    """How a problem's rows lie: those of its prompt, then those of each sample.

    Attributes:
        prompt: rows of the prompt.
        ends: of each sample the row of its last token, behind the prompt; owner: the sample of each row there.
        turn: cosines and sines of each row's position.
        mask: added to the scores of a sample's rows, which see the prompt and what is before them.
    """

    def __init__(self, problem: Problem, body: ModelBody) -> None:
        lengths, self.prompt = [len(s) for s in problem.samples], len(problem.prompt)
        begins, longest = np.cumsum([0, *lengths]), max(lengths)
        place = np.arange(longest)
        self._shape = len(lengths), longest
        padded = [begin + np.minimum(place, n - 1) for begin, n in zip(begins[:-1], lengths, strict=True)]
        self._padded = torch.from_numpy(np.concatenate(padded))
        self._packed = torch.from_numpy(np.concatenate([i * longest + place[:n] for i, n in enumerate(lengths)]))
        self.ends = torch.from_numpy(begins[1:] - 1)
        self.owner = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
        at = np.concatenate([np.arange(self.prompt), *(self.prompt + place[:n] for n in lengths)])
        turn = torch.from_numpy(at)[:, None] * body.angle
        self.turn = turn.cos()[:, None].to(body.type), turn.sin()[:, None].to(body.type)
        late = torch.arange(self.prompt + longest) > self.prompt + torch.arange(longest)[:, None]
        self.mask = torch.zeros(late.shape, dtype=body.type).masked_fill(late, -1e9)

    def split(self, x: Any) -> tuple[Any, Any]:
        """Split rows [rows, heads, width] into [1, heads, tokens, width] of the prompt and [samples, heads, tokens,
        width]."""
        samples = x[self.prompt :][self._padded].unflatten(0, self._shape)
        return x[: self.prompt].transpose(0, 1)[None], samples.transpose(1, 2)

    def joined(self, prompt: Any, samples: Any) -> Any:
        """Do the reverse: [rows, heads x width]."""
        parts = prompt[0].transpose(0, 1), samples.transpose(1, 2).flatten(0, 1)[self._packed]
        return torch.cat(parts).flatten(1)


class ModelBody:
    """The layers of a model, dequantized as they are asked for.

    Raises:
        TilebeamError: the file is no model of a family whose layers are known here.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.type = path, number_type()
        with gguf_errors(f"{path} cannot be read"), gguf_tools.open_gguf(path) as file:
            self.architecture = file.architecture

            def value(key: str, default: Any) -> Any:
                found = file.kv.get(f"{self.architecture}.{key}")
                return default if found is None else found.value

            self.names = set(file.tensors)
            dense = "blk.0.ffn_gate.weight" in self.names
            if self.architecture not in _FAMILIES or not dense or value("rope.scaling.type", None) is not None:
                raise TilebeamError(
                    f"{path} ({self.architecture}): a reward adapter can be trained for ordinary files of the "
                    f"families {', '.join(_FAMILIES)}, without experts and without stretched contexts."
                )
            self.n_layer, self.n_embd = int(value("block_count", 0)), int(value("embedding_length", 0))
            self.heads = int(value("attention.head_count", 1))
            self.kv_heads = int(value("attention.head_count_kv", self.heads))
            self.width = int(value("attention.key_length", self.n_embd // self.heads))
            self.eps = float(value("attention.layer_norm_rms_epsilon", 1e-6))
            factors = file.tensors.get("rope_freqs.weight")
            self.angle = torch.tensor(float(value("rope.freq_base", 10000.0))) ** -(
                torch.arange(0, self.width, 2) / self.width
            )
            if factors is not None:
                self.angle = self.angle / torch.from_numpy(tensor_values(file, factors).reshape(-1))

    def tensor(self, name: str) -> Any:
        """Return a tensor, [outputs, inputs] or [outputs]; None: the model has none of this name."""
        if name not in self.names:
            return None
        with gguf_tools.open_gguf(self.path) as file:
            found = file.tensors[name]
            values = tensor_values(file, found).reshape([n for n in found.ne if n > 1][::-1])
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.type)


class _Linear(nn.Module):  # type: ignore[misc]
    """A matrix of the model, and what LoRA adds to it."""

    def __init__(self, weight: Any, bias: Any, rank: int) -> None:
        super().__init__()
        self.weight, self.bias, self.rank = weight, bias, rank  # no parameters: they stay
        if rank:
            self.a = nn.Parameter(torch.randn(rank, weight.shape[1]) / math.sqrt(weight.shape[1]))
            self.b = nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, x: Any) -> Any:
        y = F.linear(x, self.weight, self.bias)
        if self.rank:
            y = torch.addmm(y, F.linear(x, self.a.to(x.dtype)), (_ALPHA * self.b).to(x.dtype).T)
        return y


class _Layer(nn.Module):  # type: ignore[misc]
    """A decoder layer; `rank` 0: without LoRA."""

    def __init__(self, body: ModelBody, number: int, rank: int) -> None:
        super().__init__()
        self.body, named = body, f"blk.{number}."
        self.norms = [body.tensor(f"{named}{name}_norm.weight") for name in ("attn", "ffn", "attn_q", "attn_k")]
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            # The two widest have none: they would take most of the time that LoRA does.
            own = 0 if name in ("ffn_gate", "ffn_up") else rank
            weight, bias = (body.tensor(f"{named}{name}.{part}") for part in ("weight", "bias"))
            setattr(self, name, _Linear(weight, bias, own))

    def forward(self, x: Any, frame: _Frame) -> Any:
        """Return the outputs [rows, n_embd] of a problem's rows."""
        body = self.body
        before_attention, before_ffn, q_norm, k_norm = self.norms
        z = _normed(x, before_attention, body.eps)
        q, k, v = (matrix(z).unflatten(1, (-1, body.width)) for matrix in (self.attn_q, self.attn_k, self.attn_v))
        q, k = (p if norm is None else _normed(p, norm, body.eps) for p, norm in ((q, q_norm), (k, k_norm)))
        q, k = (rotated(p, *frame.turn, halves=_FAMILIES[body.architecture]) for p in (q, k))
        (asked, asks), (first_keys, keys), (first_values, values) = (frame.split(p) for p in (q, k, v))
        keys, values = (
            torch.cat((first.expand(len(own), -1, -1, -1), own), 2)
            for first, own in ((first_keys, keys), (first_values, values))
        )
        times = body.heads // body.kv_heads
        first_keys, first_values, keys, values = (
            p.repeat_interleave(times, 1) for p in (first_keys, first_values, keys, values)
        )
        attend = F.scaled_dot_product_attention
        read = attend(asked, first_keys, first_values, is_causal=True)
        x = x + self.attn_output(frame.joined(read, attend(asks, keys, values, attn_mask=frame.mask)))
        z = _normed(x, before_ffn, body.eps)
        return x + self.ffn_down(F.silu(self.ffn_gate(z)) * self.ffn_up(z))


def _normed(x: Any, weight: Any, eps: float) -> Any:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


class AdapterFit:
    """A reward adapter in training.

    Args:
        body: of the model.
        problems: to learn from and to be judged by.
        held: which of them are not learnt from.
        work: path without suffix of the checkpoint and of the lower layers' outputs, which are taken up again.
        seed: of the first weights and of the order of problems.

    Attributes:
        steps: done so far.

    Raises:
        TilebeamError: the checkpoint is of another adapter.
    """

    def __init__(
        self, body: ModelBody, problems: Sequence[Problem], held: Sequence[bool], work: Path, seed: int
    ) -> None:
        torch.manual_seed(seed)
        self._body, self._seed, self.steps = body, seed, 0
        self._problems = [  # a sample without a token is rated by the prompt's last
            Problem(p.prompt, [s[:_LONGEST] or p.prompt[-1:] for s in p.samples], p.right) for p in problems
        ]
        self._learnt = [i for i, out in enumerate(held) if not out and self._problems[i].samples]
        self._checkpoint = work.with_name(f"{work.name}.checkpoint.pt")
        self.first = body.n_layer - max(1, body.n_layer // 3)  # layer with LoRA
        self._layers = nn.ModuleList(_Layer(body, i, RANK) for i in range(self.first, body.n_layer))
        self._norm = body.tensor("output_norm.weight")
        self.head = nn.Linear(body.n_embd, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        adapter = [p for p in self._layers.parameters() if p.requires_grad]
        groups = [{"params": adapter, "rate": _RATE}, {"params": list(self.head.parameters()), "rate": _HEAD_RATE}]
        self._optimizer = torch.optim.AdamW(groups, lr=_RATE, weight_decay=0.0)
        self._lower: list[Any] = []
        texts = json.dumps([fingerprint(body.path), *([p.prompt, p.samples] for p in self._problems)])
        digest = hashlib.sha256(texts.encode()).hexdigest()[:12]
        self._files = [work.with_name(f"{work.name}.{digest}.{end}") for end in ("lower", "lower.partial")]
        self._about = [seed, digest, self._learnt]
        if self._checkpoint.exists():
            self._restore()

    def _restore(self) -> None:
        try:
            kept = torch.load(self._checkpoint, weights_only=True)
            if kept["about"] != self._about:
                raise ValueError("it is of other samples")
            self._layers.load_state_dict(kept["adapter"])
            self.head.load_state_dict(kept["head"])
            self._optimizer.load_state_dict(kept["optimizer"])
            self.steps = kept["steps"]
        except Exception as error:  # torch raises all kinds of them
            raise TilebeamError(f"{self._checkpoint} cannot be taken up ({error}): delete it to train anew.") from None

    def save(self) -> None:
        """Write the checkpoint."""
        kept = {"adapter": self._layers.state_dict(), "head": self.head.state_dict(), "about": self._about}
        kept |= {"optimizer": self._optimizer.state_dict(), "steps": self.steps}
        write_checkpoint(self._checkpoint, kept)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def read(self, progress: Callable[[int, int], object]) -> None:
        """Compute the lower layers' outputs, 2 bytes an element of each token, mapped from a file.

        Args:
            progress: called with layers done, and all.
        """
        body = self._body
        sizes = [len(p.prompt) + sum(map(len, p.samples)) for p in self._problems]
        whole, partial = self._files
        done = whole.exists() and whole.stat().st_size == sum(sizes) * body.n_embd * body.type.itemsize
        path = whole if done else partial
        rows = torch.from_file(str(path), True, sum(sizes) * body.n_embd, dtype=body.type).view(-1, body.n_embd)
        self._lower = list(rows.split(sizes))
        if done:
            return
        used = sorted({t for p in self._problems for part in (p.prompt, *p.samples) for t in part})
        places = {t: i for i, t in enumerate(used)}
        embedded = torch.from_numpy(rows_of(body.path, "token_embd.weight", used)).to(body.type)
        for problem, lower in zip(self._problems, self._lower, strict=True):
            lower.copy_(embedded[[places[t] for part in (problem.prompt, *problem.samples) for t in part]])
        for number in range(self.first):
            layer = _Layer(body, number, 0)
            for problem, lower in zip(self._problems, self._lower, strict=True):
                lower.copy_(layer(lower, _Frame(problem, body)))
            progress(number + 1, self.first)
        os.replace(partial, whole)

    def _logits(self, i: int, frame: _Frame) -> Any:
        """Return what the head says at each token behind the prompt."""
        x = self._lower[i]
        for layer in self._layers:
            x = layer(x, frame)
        return self.head(_normed(x[frame.prompt :], self._norm, self._body.eps).float() * _INPUT)[:, 0]

    def run(self, epochs: int, progress: Callable[[int, int, float], object]) -> None:
        """Train until all problems were learnt from so often, in all.

        Args:
            progress: called after every step with steps done, all, and the loss.

        Raises:
            TilebeamError: the loss is no number any more.
        """
        a_round = math.ceil(len(self._learnt) / _BATCH)
        total, saved = epochs * a_round, time.monotonic()
        while self.steps < total:
            epoch, batch = divmod(self.steps, a_round)
            order = np.random.default_rng((self._seed, epoch)).permutation(self._learnt)
            rate = min(1.0, (self.steps + 1) / _WARM_UP) * (1 + math.cos(math.pi * self.steps / total)) / 2
            for group in self._optimizer.param_groups:
                group["lr"] = group["rate"] * rate
            self._optimizer.zero_grad()
            sum_of = 0.0
            for i in order[batch * _BATCH : (batch + 1) * _BATCH].tolist():
                loss = self._loss(i) / _BATCH
                loss.backward()
                sum_of += loss.item()
            if not math.isfinite(sum_of):
                raise TilebeamError(f"The loss of step {self.steps} is no number: use another --seed.")
            for group in self._optimizer.param_groups:
                nn.utils.clip_grad_norm_(group["params"], 1.0)
            self._optimizer.step()
            self.steps += 1
            progress(self.steps, total, sum_of)
            if time.monotonic() - saved > _CHECKPOINT:
                self.save()
                saved = time.monotonic()
        self.save()

    def _loss(self, i: int) -> Any:
        frame, right = _Frame(self._problems[i], self._body), torch.tensor(self._problems[i].right)
        logits = self._logits(i, frame)
        ends, cross_entropy = logits[frame.ends], F.binary_cross_entropy_with_logits
        loss = cross_entropy(ends, right) + cross_entropy(logits, right[frame.owner])
        better = right[:, None] > right[None]
        if better.any():
            loss = loss + _PAIRS * F.softplus(ends[None] - ends[:, None])[better].mean()
        return loss

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def judge(self, i: int) -> list[float]:
        """Return the logit of each sample of a problem."""
        frame = _Frame(self._problems[i], self._body)
        return [float(x) for x in self._logits(i, frame)[frame.ends]]

    def write(self, path: Path, maker: dict[str, str], stretch: float, move: float) -> None:
        """Write the adapter as llama.cpp reads one, the head in its metadata; it appears when it is complete.

        Args:
            maker: of the model, see `Head.maker`.
            stretch, move: of the logits, which make probabilities of them.
        """
        with small_gguf(path, self._body.architecture) as writer:
            writer.add_type("adapter")
            writer.add_string("adapter.type", "lora")
            writer.add_float32(K_ALPHA, _ALPHA * RANK)
            writer.add_array(ADAPTER_WEIGHTS, (self.head.weight[0] * _INPUT * stretch).tolist())
            writer.add_float32(ADAPTER_BIAS, self.head.bias.item() * stretch + move)
            for name, value in maker.items():
                writer.add_string(f"{PREFIX}model.{name}", value)
            for number, layer in enumerate(self._layers, self.first):
                for name, linear in layer.named_children():
                    for half, values in (("a", getattr(linear, "a", None)), ("b", getattr(linear, "b", None))):
                        if values is not None:
                            data = values.detach().numpy().astype(np.float16)
                            writer.add_tensor(f"blk.{number}.{name}.weight.lora_{half}", np.ascontiguousarray(data))

    def clean(self) -> None:
        """Delete what a finished run does not need any more."""
        self._lower.clear()
        for file in self._files:
            file.unlink(missing_ok=True)
        self._checkpoint.unlink(missing_ok=True)
