"""The division of a model over devices, when a device's address space is limited or several devices are asked for.

llama.cpp gives each device a row of neighbouring layers and the last one the output matrix as well. What a device must
map is known from the file but for the compute buffer, of which an upper bound is used.

Sizes are bytes of address space, everything rounded up to pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tilebeam import gguf as gguf_tools
from tilebeam._ext import TILE, packed_bytes
from tilebeam.errors import TilebeamError

PAGE = 4096
_FILL_STEPS = 24  # steps of bisection for the fill level; more do not move a layer


def pages(size: float) -> int:
    """Return `size` in whole pages."""
    return -(-int(size) // PAGE) * PAGE


@dataclass(frozen=True)
class Weights:
    """The parts of a file that the devices must hold.

    Attributes:
        layers: bytes of each layer, and last those of the output.
        n_embd, n_ff, n_vocab: widths.
        q_row, kv_row: elements of a token's queries, and of its keys or values, per layer the largest.
        n_head: query heads.
        masks: attention masks; 2 with a sliding window.
        adapted, adapted_output: elements that a LoRA adapter's two products give per token, in a layer and in the
            output.
    """

    layers: tuple[int, ...]
    n_embd: int
    n_ff: int
    n_vocab: int
    q_row: int
    kv_row: int
    n_head: int
    masks: int
    adapted: int = 0
    adapted_output: int = 0

    @property
    def n_layer(self) -> int:
        """Layers without the output."""
        return len(self.layers) - 1


@dataclass(frozen=True)
class Use:
    """The planned use of a model: context cells, tokens per graph, rows of logits, bytes per element of K and V."""

    n_ctx: int
    n_ubatch: int
    n_outputs: int
    flash_attn: bool
    kv_bytes: float  # of an element of K and one of V together


@dataclass(frozen=True)
class Placement:
    """The number of layers on each device, of which the output counts as the last.

    Attributes:
        counts: layers per device, HMX0 first.
        planned: address space that each device needs at most.
    """

    counts: tuple[int, ...]
    planned: tuple[int, ...] = ()


def weights_of(gguf: gguf_tools.Source, architecture: str) -> Weights:
    """Read a file's header for what the devices must hold. Metadata that is absent counts as large as it can be."""
    from tilebeam.gguf.weights import TB_TYPE

    metadata = gguf_tools.model_kv(gguf)

    def number(key: str, default: int) -> int:
        value = gguf_tools.value_of(metadata, f"{architecture}.{key}")
        if isinstance(value, list):
            value = max((v for v in value if isinstance(v, int)), default=None)
        return value if isinstance(value, int) and value > 0 else default

    n_layer = number("block_count", 1)
    n_embd = number("embedding_length", 1)
    n_head = number("attention.head_count", 1)
    head = number("attention.key_length", n_embd // n_head)
    layers = [0] * (n_layer + 1)
    for name, tensor in gguf.tensors.items():
        tied = name == "token_embd.weight" and "output.weight" not in gguf.tensors
        if not gguf_tools.runs_on_device(tensor) or (name == "token_embd.weight" and not tied):
            continue
        rows = tensor.rows if len(tensor.ne) == 1 else -(-tensor.rows // TILE) * TILE
        size = packed_bytes(TB_TYPE[tensor.type], rows * tensor.row_bytes)
        layers[gguf_tools.layer_of(name, n_layer)] += pages(size) + PAGE
    vocabulary = [t for t in (gguf.tensors.get("output.weight"), gguf.tensors.get("token_embd.weight")) if t]
    return Weights(
        layers=tuple(layers),
        n_embd=n_embd,
        n_ff=number("feed_forward_length", 4 * n_embd),
        n_vocab=max((t.rows for t in vocabulary), default=1),
        q_row=n_head * head,
        kv_row=number("attention.head_count_kv", n_head) * max(head, number("attention.value_length", head)),
        n_head=n_head,
        masks=2 if number("attention.sliding_window", 0) else 1,
    )


def adapted(weights: Weights, pairs: Iterable[gguf_tools.Pair]) -> Weights:
    """Return the same model with LoRA adapters: their matrices are where those are that they change."""
    layers = list(weights.layers)
    widths = [0, 0]  # in a layer, in the output
    for pair in pairs:
        if pair.name == "token_embd.weight":  # looked up by the CPU, and so is what changes it
            continue
        home = gguf_tools.layer_of(pair.name, weights.n_layer)
        layers[home] += pages(pair.a.nbytes) + pages(pair.b.nbytes) + 2 * PAGE
        of_output = home == weights.n_layer
        widths[of_output] = max(widths[of_output], pair.a.ne[1] + 2 * pair.b.ne[1])
    return replace(weights, layers=tuple(layers), adapted=widths[0], adapted_output=widths[1])


class Planner:
    """Finds placements of one model for one use."""

    def __init__(self, weights: Weights, use: Use) -> None:
        self.use = use
        cache = pages(use.n_ctx * weights.kv_row * use.kv_bytes) + PAGE
        self._items = [size + (cache if i < weights.n_layer else 0) for i, size in enumerate(weights.layers)]
        # Intermediate results, as ggml's allocator was seen to need them at most: a tenth is for its fragmentation.
        rows = 4 * use.n_ubatch
        mask = use.n_ctx * use.n_ubatch * 2 * weights.masks
        scores = 0 if use.flash_attn else 2 * rows * use.n_ctx * weights.n_head + mask
        width = 3 * weights.n_ff + 4 * weights.n_embd + weights.q_row + weights.kv_row + weights.adapted
        layer = rows * width + scores
        output = 4 * use.n_outputs * (weights.n_vocab + weights.adapted_output) + 4 * rows * weights.n_embd
        small = 16 * PAGE
        self._compute = pages(1.1 * layer + mask) + small
        self._compute_last = pages(1.1 * max(layer, output) + mask) + small

    def place(self, limits: Sequence[int], least: int, most: int) -> Placement:
        """Find the placement on the fewest devices between `least` and `most`.

        Args:
            limits: per device, bytes of address space, 0 for none.
            least, most: how many devices, at most as many as there are limits.

        Raises:
            TilebeamError: it cannot be done; says what would help.
        """
        for n in range(least, most + 1):
            found = self.on(limits[:n])
            if found is not None:
                return found
        raise TilebeamError(self._advice(limits, most))

    def on(self, limits: Sequence[int]) -> Placement | None:
        """Find the most even placement on these devices; None if there is none."""
        room = [limit or 2 * (sum(self._items) + self._compute_last) for limit in limits]
        # The lower the level that all devices are filled to, the more even.
        low, high = 0.0, 1.0
        best = self._fill(room, high)
        for _ in range(_FILL_STEPS if best else 0):
            middle = (low + high) / 2
            tried = self._fill(room, middle)
            if tried is None:
                low = middle
            else:
                best, high = tried, middle
        return best

    def _fill(self, room: list[int], level: float) -> Placement | None:
        """Put layers in order onto devices in order, each filled to `level` of its room.

        No device stays empty while there are layers for it.
        """
        items = self._items
        counts, used = [0] * len(room), [0] * len(room)
        device = 0
        for i, size in enumerate(items):
            is_last = i + 1 == len(items)
            while True:
                if device == len(room):
                    return None
                base = self._compute_last if is_last else self._compute
                before = used[device] - (self._compute if counts[device] else 0)
                needed_behind = counts[device] > 0 and len(items) - i <= len(room) - device - 1
                if not needed_behind and before + size + base <= level * room[device]:
                    break
                device += 1
            used[device] = before + size + base
            counts[device] += 1
        return Placement(tuple(counts), tuple(used))

    def _advice(self, limits: Sequence[int], most: int) -> str:
        tightest = min(limit for limit in limits[:most] if limit)
        what, size = max(
            [(f"layer {i}", s) for i, s in enumerate(self._items[:-1])] + [("the output", self._items[-1])],
            key=lambda pair: pair[1],
        )
        text = (
            f"The model does not fit: it takes {_mib(sum(self._items))} with its KV cache of {self.use.n_ctx} cells, "
            f"and up to {_mib(self._compute_last)} per device for intermediate results; the largest part is {what} "
            f"with {_mib(size)}. {most} device{'s' if most > 1 else ''} with {_mib(tightest)} of address space left "
            "cannot hold it."
        )
        more = next((n for n in range(most + 1, len(limits) + 1) if self.on(limits[:n])), None)
        if more is not None:
            return f"{text} Use devices={more}, a larger memory_limit, or a smaller n_ctx or n_ubatch."
        low, high = tightest, 2 * (sum(self._items) + self._compute_last)
        while high - low > max(PAGE, low // 64):
            middle = (low + high) // 2
            low, high = (low, middle) if self.on([middle] * most) else (middle, high)
        return f"{text} Use a memory_limit of at least {_mib(high)}, or a smaller n_ctx, n_ubatch or n_seq_max."


def _mib(size: int) -> str:
    return f"{-(-size * 10 // 2**20) / 10:g} MiB"
