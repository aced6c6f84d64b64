"""Fits a draft head to a model's texts with PyTorch: EAGLE-3 (Li et al., arXiv 2503.01840), in the form that llama.cpp
runs (src/models/eagle3.cpp).

One decoder layer reads, at each position, a projection of three of the model's hidden states and the embedding of the
token behind; it is to give the model's distribution of the token behind that. In training, as in use, its own states
then take the place of the model's, `DEPTH` times (the paper's training-time test): the state of a position is then the
last of a chain of as many predictions, which attends to the model's states before it and to its own chain.
"""

from __future__ import annotations

import ctypes
import io
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F

from tilebeam import gguf as gguf_tools
from tilebeam.errors import TilebeamError, gguf_errors
from tilebeam.gguf.gguf_write import small_gguf
from tilebeam.gguf.weights import tensor_values, to_float
from tilebeam.gguf.whole_file import whole_file
from tilebeam.model.head_file import ARCHITECTURE, K_MODEL, model_mark
from tilebeam.training.draft_texts import DraftText

Array = npt.NDArray[np.float32]

DEPTH = 3  # predictions of a chain in training
WIDTH = 64  # of an attention head
_RATE, _WARM_UP, _LAST_RATE = 1e-3, 10, 0.05
_NORM_RATE = 10  # of norms' weights, which are much larger than others
_UNSURE = 0.3  # of the model's last norm, to begin with: a head that is wrong should not be sure
_BATCH, _LONGEST = 8, 384  # texts, and tokens of one
_LESS = 0.8  # weight of a prediction against that before it
_CHECKPOINT = 60  # seconds
_ROWS = 256  # of logits at a time
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # of malloc.h


class ModelWeights:
    """What a head takes from its model's file.

    Attributes:
        n_embd: elements of a hidden state; n_vocab: tokens.
        layers: whose outputs it reads, from 0.
        eps, rope_base: of norms and of the rotation.
        n_ff: of its feed-forward part.
        norm: weights of the last norm, float32 [n_embd].

    Raises:
        TilebeamError: the file is no model that a head can be trained for.
    """

    def __init__(self, path: Path, n_ff: int) -> None:
        self.path, self.n_ff = path, n_ff
        with gguf_errors(f"{path} cannot be read"), gguf_tools.open_gguf(path) as file:
            architecture = file.architecture
            if architecture == gguf_tools.ARCHITECTURE:
                raise TilebeamError(f"{path} is repacked: give the ordinary file; the head fits both.")

            def value(key: str, default: Any = None) -> Any:
                found = file.kv.get(f"{architecture}.{key}")
                return default if found is None else found.value

            n_layer, n_embd = int(value("block_count", 0)), int(value("embedding_length", 0))
            embeddings = file.tensors.get("token_embd.weight")
            if embeddings is None or n_layer < 4 or n_embd < WIDTH or n_embd % WIDTH:
                raise TilebeamError(
                    f"No draft head can be trained for {path}: that needs token embeddings, 4 layers or more, and "
                    f"hidden states of a multiple of {WIDTH} elements: it has {n_layer} layers, {n_embd} elements."
                )
            deep = n_layer >= 8
            self.layers = (1, n_layer // 2 - 1, n_layer - 4) if deep else (0, (n_layer - 2) // 2, n_layer - 2)
            self.eps = float(value("attention.layer_norm_rms_epsilon", 1e-6))
            self.rope_base = float(value("rope.freq_base", 10000.0))
            self.n_embd, self.n_vocab = n_embd, int(embeddings.ne[1])
            norm = file.tensors.get("output_norm.weight")
            self.norm = np.ones(n_embd, np.float32) if norm is None else tensor_values(file, norm)


def rows_of(path: Path, name: str, wanted: Sequence[int]) -> Array:
    """Return rows of a model's matrix with a row for each token, float32 [rows, n_embd]; of one that the file has not,
    those of the embeddings."""
    with gguf_tools.open_gguf(path) as file:
        tensor = file.tensors.get(name, file.tensors["token_embd.weight"])
        width = tensor.nbytes // tensor.ne[1]
        data = np.empty((len(wanted), width), np.uint8)
        for i, row in enumerate(wanted):
            file.read_tensor(tensor, row * width, data[i])
    return to_float(tensor.type, data.reshape(-1), tensor.ne[0], len(wanted))


def vocabulary(texts: Sequence[DraftText], n_vocab: int, size: int) -> npt.NDArray[np.int64]:
    """Return the tokens that a head shall guess, in rising order: those that texts have most often behind their
    prompts, then those that the model found likeliest anywhere."""
    count = np.zeros(n_vocab, np.float64)
    for text in texts:
        np.add.at(count, text.tokens[text.start :], 3.0)
        np.add.at(count, text.ids, text.probs.astype(np.float64))
    return np.sort(np.argsort(-count, kind="stable")[: min(size, n_vocab)])


def feature_scale(texts: Sequence[DraftText], n_embd: int) -> Array:
    """Return how large features of texts are, float32 [3 n_embd]: the root mean square of each, within 1/4 and 4 times
    the median of its layer's. So those of all layers are learnt from alike, and blocks of weights stay of one size."""
    some = np.concatenate([np.asarray(text.features[:-1], np.float32) for text in texts[:: max(1, len(texts) // 64)]])
    size = np.sqrt((some**2).mean(0)).reshape(3, n_embd)
    median = np.median(size, axis=1, keepdims=True).clip(min=1e-6)
    scale: Array = size.clip(median / 4, 4 * median).reshape(-1).astype(np.float32)
    return scale


class _Norm(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Any) -> Any:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class HeadNet(nn.Module):  # type: ignore[misc]
    """The head; parameters are called as in its file.

    Args:
        tokens: of the model, that it can guess. Their rows of the model's output are not trained: texts are too few
            for that, and it costs time.
        scale: of each feature, as large as they are; None: 1. In the file, it is part of `fc`.
    """

    def __init__(self, weights: ModelWeights, tokens: npt.NDArray[np.int64], scale: Array | None = None) -> None:
        super().__init__()
        n, heads = weights.n_embd, weights.n_embd // WIDTH
        self.rope_base = weights.rope_base
        self.heads, self.kv_heads = heads, 2 if heads % 2 == 0 else 1

        def linear(inputs: int, outputs: int, std: float) -> Any:
            made = nn.Linear(inputs, outputs, bias=False)
            nn.init.normal_(made.weight, std=std)
            return made

        self.fc = linear(3 * n, n, 0.006)
        self.attn_norm, self.attn_norm_2, self.ffn_norm, self.output_norm = (_Norm(n, weights.eps) for _ in range(4))
        self.attn_q = linear(2 * n, n, 0.02)
        self.attn_k, self.attn_v = (linear(2 * n, self.kv_heads * WIDTH, 0.02) for _ in range(2))
        self.attn_output = linear(n, n, 0.014)
        self.ffn_gate, self.ffn_up = (linear(n, weights.n_ff, 0.02) for _ in range(2))
        self.ffn_down = linear(weights.n_ff, n, 0.014)
        self.output = nn.Linear(n, len(tokens), bias=False).requires_grad_(False)
        self.register_buffer("scale", torch.ones(3 * n) if scale is None else torch.from_numpy(scale))
        with torch.no_grad():  # it begins with some of the last of the three states
            self.fc.weight[:, 2 * n :] += 0.3 * torch.eye(n)
            self.output.weight.copy_(torch.from_numpy(rows_of(weights.path, "output.weight", tokens.tolist())))
            self.output_norm.weight.copy_(_UNSURE * torch.from_numpy(weights.norm))

    def chain(self, embedded: Any, features: Any) -> Iterator[Any]:
        """Yield the states of `DEPTH` predictions, [texts, tokens, n_embd] each: at row t that of a chain of so many
        which ends there.

        Args:
            embedded: [texts, tokens, n_embd], of the token behind each row's.
            features: [texts, tokens, 3 n_embd].
        """
        texts, n, _ = embedded.shape
        state, embedded = self.fc(features / self.scale), self.attn_norm(embedded)
        rows, columns = torch.arange(n)[:, None], torch.arange(n)[None]
        angles = torch.arange(n)[:, None] * self.rope_base ** (-torch.arange(0, WIDTH, 2) / WIDTH)
        turn = angles.cos(), angles.sin()

        def split(x: Any, heads: int) -> Any:
            return x.view(texts, n, heads, WIDTH).transpose(1, 2)

        past: list[tuple[Any, Any]] = []
        for depth in range(DEPTH):
            x = torch.cat((embedded, self.attn_norm_2(state)), -1)
            q = rotated(split(self.attn_q(x), self.heads), *turn)
            k, v = rotated(split(self.attn_k(x), self.kv_heads), *turn), split(self.attn_v(x), self.kv_heads)
            past.append(tuple(p.repeat_interleave(self.heads // self.kv_heads, 1) for p in (k, v)))
            scores = (q @ past[0][0].transpose(-1, -2)).masked_fill(columns > rows - depth, -1e9)
            # The chain that ends at row t has its own earlier states at the rows before.
            own = [[_behind(p, depth - d) for p in past[d]] for d in range(1, depth + 1)]
            scores = torch.cat([scores, *((q * key).sum(-1, keepdim=True) for key, _ in own)], -1)
            shares = torch.softmax(scores / math.sqrt(WIDTH), -1)
            y = shares[..., :n] @ past[0][1]
            for i, (_, value) in enumerate(own):
                y = y + shares[..., n + i : n + i + 1] * value
            h = state + self.attn_output(y.transpose(1, 2).reshape(texts, n, -1))
            z = self.ffn_norm(h)
            h = h + self.ffn_down(F.silu(self.ffn_gate(z)) * self.ffn_up(z))
            yield h
            state = F.pad(h, (0, 0, 1, 0))[:, :n]


class _SparseCrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    """The cross entropy of rows of logits against distributions with few tokens, and how often the likeliest tokens
    agree. It computes some rows at a time, and their gradients at once: logits of all rows at a time would take most of
    the memory, and half of the time."""

    @staticmethod
    def forward(ctx: Any, z: Any, weight: Any, ids: Any, probs: Any) -> tuple[Any, Any]:
        """Return the sum of the rows' losses, and how many rows have the right token likeliest.

        Args:
            z: [rows, n_embd]; weight: [vocabulary, n_embd].
            ids, probs: [rows, tokens] each, what a row's distribution has.
        """
        w, dz = weight.to(z.dtype), torch.empty_like(z)
        loss, hits = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        for first in range(0, len(z), _ROWS):
            part = slice(first, first + _ROWS)
            logits = (z[part] @ w.T).float()
            hits += (logits.argmax(-1) == ids[part].gather(-1, probs[part].argmax(-1, keepdim=True))[:, 0]).sum()
            shares = torch.log_softmax(logits, -1)
            loss -= (probs[part] * shares.gather(-1, ids[part])).sum()
            slope = shares.exp_().scatter_add_(-1, ids[part], -probs[part]).to(z.dtype)
            dz[part] = slope @ w
        ctx.save_for_backward(dz)
        ctx.mark_non_differentiable(hits)
        return loss, hits

    @staticmethod
    def backward(ctx: Any, slope: Any, _: Any) -> tuple[Any, None, None, None]:
        (dz,) = ctx.saved_tensors
        return slope.to(dz.dtype) * dz, None, None, None


def number_type() -> Any:
    """Return the type of numbers that this machine multiplies matrices of in less time: bfloat16 or float32."""
    seconds = dict[Any, float]()
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(512, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        for _ in range(3):  # the first time it is prepared
            began = time.monotonic()
            a @ b
            seconds[dtype] = time.monotonic() - began
    return min(seconds, key=seconds.__getitem__)


def keep_memory() -> None:
    """Have malloc keep what PyTorch frees, in all of this process and for good: pages that are given back and taken
    anew for every tensor take as long as the arithmetic."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of glibc
    if mallopt is not None:
        for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, 1 << 28)):
            mallopt(option, value)


def _behind(x: Any, rows: int) -> Any:
    return F.pad(x, (0, 0, rows, 0))[:, :, : x.shape[2]]


def rotated(x: Any, cos: Any, sin: Any, *, halves: bool = False) -> Any:
    """Rotate pairs of elements by positions: neighbors, or those of the first and the second half (ggml's NEOX)."""
    a, b = x.chunk(2, -1) if halves else (x[..., 0::2], x[..., 1::2])
    turned = a * cos - b * sin, a * sin + b * cos
    return torch.cat(turned, -1) if halves else torch.stack(turned, -1).flatten(-2)


def write_checkpoint(path: Path, kept: dict[str, Any]) -> None:
    """Write a checkpoint; it appears when it is complete."""
    data = io.BytesIO()  # to a disk that is full torch writes with an error that does not say so
    torch.save(kept, data)
    with whole_file(path) as partial:
        partial.write_bytes(data.getbuffer())


class Fit:
    """A head in training.

    Args:
        weights: of its model.
        texts: to learn from, and every 25th to be judged by.
        size: of its vocabulary.
        checkpoint: where it is kept, and taken up again.
        seed: of its first weights and of the order of texts.

    Attributes:
        coverage: share of the held-out texts' tokens that are in its vocabulary.
        held: tokens of the held-out texts, without prompts.
        seconds: that it has been trained, and steps.

    Raises:
        TilebeamError: there are too few texts, or the checkpoint is of another head.
    """

    def __init__(
        self, weights: ModelWeights, texts: Sequence[DraftText], size: int, checkpoint: Path, seed: int = 1
    ) -> None:
        texts = [text for text in texts if len(text.tokens) > text.start + DEPTH]
        if len(texts) < 8:
            raise TilebeamError(f"{len(texts)} texts with tokens behind their prompts are too few to learn from: 8.")
        torch.manual_seed(seed)
        self._random = np.random.default_rng(seed)
        n_held = max(2, len(texts) // 25)
        self._held, self._learnt = texts[:n_held], texts[n_held:]
        self._weights, self._checkpoint = weights, checkpoint
        self.tokens = vocabulary(self._learnt, weights.n_vocab, size)
        self._places = np.full(weights.n_vocab, -1, np.int64)
        self._places[self.tokens] = np.arange(len(self.tokens))
        used = np.unique(np.concatenate([text.tokens for text in texts]))
        self._embedding_of = np.zeros(weights.n_vocab, np.int64)
        self._embedding_of[used] = np.arange(len(used))
        self._embeddings = rows_of(weights.path, "token_embd.weight", used.tolist())
        tails = np.concatenate([text.tokens[text.start :] for text in self._held])
        self.held, self.coverage = len(tails), float((self._places[tails] >= 0).mean())
        self.net = HeadNet(weights, self.tokens, feature_scale(self._learnt, weights.n_embd))
        matrices = [p for p in self.net.parameters() if p.ndim == 2 and p.requires_grad]
        groups = [{"params": matrices}, {"params": [p for p in self.net.parameters() if p.ndim == 1]}]
        self._optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.01)
        self.seconds, self.steps = 0.0, 0
        self._type = number_type()
        if checkpoint.exists():
            self._restore()

    def _restore(self) -> None:
        try:
            kept = torch.load(self._checkpoint, weights_only=True)
            if kept["tokens"] != self.tokens.tolist() or kept["n_ff"] != self._weights.n_ff:
                raise ValueError("it is of a head of other texts or sizes")
            self.net.load_state_dict(kept["net"])
            self._optimizer.load_state_dict(kept["optimizer"])
            self.seconds, self.steps = kept["seconds"], kept["steps"]
        except Exception as error:  # torch raises all kinds of them
            raise TilebeamError(f"{self._checkpoint} cannot be taken up ({error}): delete it to train anew.") from None

    def save(self) -> None:
        """Write the checkpoint."""
        kept = {"net": self.net.state_dict(), "optimizer": self._optimizer.state_dict(), "tokens": self.tokens.tolist()}
        kept |= {"seconds": self.seconds, "steps": self.steps, "n_ff": self._weights.n_ff}
        write_checkpoint(self._checkpoint, kept)

    def run(self, seconds: float, progress: Callable[[float, list[float]], object]) -> None:
        """Train until it has been trained for so long, in all.

        Args:
            progress: called after every step with the loss, and the share of right tokens by depth.

        Raises:
            TilebeamError: the loss is no number any more.
        """
        saved = self.seconds
        while self.seconds < seconds:
            for batch in self._batches():
                began = time.monotonic()
                rate = min(1.0, (self.steps + 1) / _WARM_UP)
                done = min(1.0, self.seconds / seconds)
                rate *= _LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * done)) / 2
                for group, times in zip(self._optimizer.param_groups, (1, _NORM_RATE), strict=True):
                    group["lr"] = _RATE * rate * times
                loss, hits = self._loss(batch)
                if not math.isfinite(loss.item()):
                    raise TilebeamError(
                        f"The loss of step {self.steps} is no number: delete {self._checkpoint} to train anew."
                    )
                self._optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
                self._optimizer.step()
                self.steps += 1
                self.seconds += time.monotonic() - began
                progress(loss.item(), hits)
                if self.seconds - saved > _CHECKPOINT:
                    self.save()
                    saved = self.seconds
                if self.seconds >= seconds:
                    break
        self.save()

    def _batches(self) -> Iterator[list[DraftText]]:
        """Yield all texts once, those of like lengths together."""
        order, at_once = self._random.permutation(len(self._learnt)).tolist(), _BATCH * 16
        starts = [
            sorted(order[i : i + at_once], key=lambda i: len(self._learnt[i].tokens))
            for i in range(0, len(order), at_once)
        ]
        batches = [part[i : i + _BATCH] for part in starts for i in range(0, len(part), _BATCH)]
        for i in self._random.permutation(len(batches)):
            yield [self._learnt[j] for j in batches[i]]

    def _arrays(self, texts: Sequence[DraftText]) -> tuple[Any, ...]:
        """Return embeddings, features, the model's likeliest tokens as the head numbers them (-1: it has them not) with
        their probabilities, the tokens that came, and which rows count; all [texts, rows ..]."""
        n, width = min(_LONGEST, max(len(t.tokens) for t in texts) - 2), self._weights.n_embd
        embedded, features = (np.zeros((len(texts), n, width * i), np.float32) for i in (1, 3))
        top = texts[0].ids.shape[1]
        ids, came = np.zeros((len(texts), n, top), np.int64), np.zeros((len(texts), n), np.int64)
        probs, counts = np.zeros((len(texts), n, top), np.float32), np.zeros((len(texts), n), bool)
        for i, text in enumerate(texts):
            # Of a long text some of the prompt, and what comes behind it.
            first = max(0, min(text.start - 48, len(text.tokens) - 2 - n))
            m = min(n, len(text.tokens) - 2 - first)
            now, behind = slice(first, first + m), slice(first + 1, first + 1 + m)
            embedded[i, :m] = self._embeddings[self._embedding_of[text.tokens[behind]]]
            features[i, :m], probs[i, :m] = text.features[now], text.probs[behind]
            ids[i, :m] = self._places[text.ids[behind]]
            came[i, :m] = self._places[text.tokens[first + 2 : first + 2 + m]]
            counts[i, :m] = np.arange(first, first + m) + 2 >= text.start
        return tuple(torch.from_numpy(x) for x in (embedded, features, ids, probs, came, counts))

    def _loss(self, texts: Sequence[DraftText]) -> tuple[Any, list[float]]:
        embedded, features, ids, probs, _, counts = self._arrays(texts)
        probs = probs * (ids >= 0)
        mass = probs.sum(-1, keepdim=True)
        probs, counts, ids = probs / mass.clamp(min=1e-6), counts & (mass[..., 0] > 0.2), ids.clamp(min=0)
        total, hits = torch.zeros(()), []
        with torch.autocast("cpu", self._type, enabled=self._type != torch.float32):
            for depth, state in enumerate(self.net.chain(embedded, features)):
                chosen = counts & (torch.arange(counts.shape[1]) >= depth)
                z = self.net.output_norm(state[chosen]).to(self._type)
                loss, right = _SparseCrossEntropy.apply(z, self.net.output.weight, ids[chosen], probs[chosen])
                n = max(1, len(z))  # no rows, where the head has too few of the tokens that came: no loss
                total = total + _LESS**depth * loss / n
                hits.append(int(right) / n)
        return total, hits

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def judge(self) -> tuple[list[float], float]:
        """Return how often the head's token is the one that came in the held-out texts, by depth, of chains that were
        right before; and how many tokens of a chain are accepted on the mean."""
        right, tried = np.zeros(DEPTH), np.zeros(DEPTH)
        for i in range(0, len(self._held), _BATCH):
            embedded, features, _, _, came, counts = self._arrays(self._held[i : i + _BATCH])
            alive, n = counts, counts.shape[1]
            for depth, state in enumerate(self.net.chain(embedded, features)):
                if depth:  # the chain's next row
                    alive = F.pad(alive, (1, 0))[:, :n] & counts
                tried[depth] += int(alive.sum())
                rows, places = state[alive], came[alive]
                best = self.net.output(self.net.output_norm(rows)).argmax(-1)
                alive = alive.clone()
                alive[alive.clone()] = best == places
                right[depth] += int(alive.sum())
        return (right / np.maximum(tried, 1)).tolist(), float(right.sum() / max(1.0, tried[0]))

    def write(self, path: Path) -> None:
        """Write the head's GGUF file, Q4_0, with the mark of its model; it appears when it is complete."""
        write_head(path, self._weights, self.tokens, self.net)


def write_head(path: Path, weights: ModelWeights, tokens: npt.NDArray[np.int64], net: HeadNet) -> None:
    """Write a head as llama.cpp reads it: architecture eagle3, with `d2t` the model's tokens of its output's rows."""
    import gguf

    with small_gguf(path, ARCHITECTURE) as writer:
        writer.add_block_count(1)
        writer.add_context_length(32768)
        writer.add_embedding_length(weights.n_embd)
        writer.add_feed_forward_length(weights.n_ff)
        writer.add_head_count(net.heads)
        writer.add_head_count_kv(net.kv_heads)
        writer.add_layer_norm_rms_eps(weights.eps)
        writer.add_rope_freq_base(weights.rope_base)
        writer.add_vocab_size(weights.n_vocab)
        writer.add_array(f"{ARCHITECTURE}.target_layers", [layer + 1 for layer in weights.layers])
        writer.add_uint32(f"{ARCHITECTURE}.target_hidden_size", weights.n_embd)
        writer.add_tokenizer_model("none")
        writer.add_string(K_MODEL, model_mark(weights.path))
        writer.add_tensor("d2t", tokens.astype(np.int64))
        # Of 0.912 tokens that a head of a 0.5B has accepted a step, it has 0.907 in Q4_0 (Q8_0 0.912), and a guess
        # waits for its weights.
        q4_0 = gguf.GGMLQuantizationType.Q4_0
        for name, parameter in net.named_parameters():
            values = np.ascontiguousarray(parameter.detach().numpy(), np.float32)
            values = values / net.scale.numpy() if name == "fc.weight" else values
            name = name if name.startswith(("fc.", "output")) else f"blk.0.{name}"
            if values.ndim == 2:
                writer.add_tensor(name, gguf.quants.quantize(values, q4_0), raw_dtype=q4_0)
            else:
                writer.add_tensor(name, values)


def write_untrained(path: Path, weights: ModelWeights) -> None:
    """Write a head as it is before training, with a vocabulary of a few tokens."""
    tokens = np.arange(32)
    write_head(path, weights, tokens, HeadNet(weights, tokens))
