"""Random graphs of ops on tensors of one shape, as hard on memory as model code is: ops in place, views of parts that
are written into, CPY and SET_ROWS into parts, permuted operands, and ggml's allocator, which puts results where
operands were. The same seed makes the same graph, so two backends can compute it.

Values are kept near 1, so that a result that was read too late, or overwritten too early, shows, and rounding does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ggml_kit as kit
import graph_kit
import numpy as np
import numpy.typing as npt
from ggml_kit import ffi

MOST = 8.0  # root mean square of values, as estimated, before they are normalized
WIDTHS, HEADS, TOKENS = (32, 64, 96, 256, 1024, 1056), (1, 2, 4), (1, 2, 3, 7, 16, 33)


@dataclass
class Value:
    """A tensor of the graph's shape, and about how large its elements are."""

    tensor: Any
    size: float
    dense: bool = True
    is_input: bool = False

    @property
    def root(self) -> int:
        t = self.tensor
        return int(ffi.cast("uintptr_t", t if t.view_src == ffi.NULL else t.view_src))


class RandomGraph:
    """`graph` computes `output` from `inputs`. `ops` says what is in it."""

    def __init__(self, seed: int) -> None:
        kit.device()
        self.seed = seed
        self.rng = np.random.default_rng(seed)
        self.ctx = kit.lib.ggml_init(ffi.new("struct ggml_init_params *", {"mem_size": 4 << 20, "no_alloc": True})[0])
        self.graph = kit.lib.ggml_new_graph_custom(self.ctx, 1024, False)
        self.inputs: list[tuple[Any, Callable[[], npt.NDArray[Any]]]] = []  # tensors, and what makes their values
        self.ops: list[str] = []
        width, heads, tokens = (int(self.rng.choice(n)) for n in (WIDTHS, HEADS, TOKENS))
        self.shape = (width, heads, tokens)
        positions, order = self.rng.integers(0, 50, tokens, np.int32), self.rng.permutation(tokens).astype(np.int32)
        self.positions = self._input(kit.I32, (tokens,), lambda: positions)
        self.order = self._input(kit.I32, (tokens,), lambda: order)
        self.row = self._floats((width,))
        self.per_token = self._floats((width, 1, tokens))
        self.weights = [self._floats((width, width), width**-0.5) for _ in range(2)]
        self.pool = [Value(self._floats(self.shape), 1.0, is_input=True) for _ in range(3)]
        for _ in range(int(self.rng.integers(4, 25))):
            self._step()
        self.output = self._finish()

    def close(self) -> None:
        kit.lib.ggml_free(self.ctx)

    # ---- building blocks

    def call(self, name: str, *args: Any) -> Any:
        """ggml_NAME, its result in the graph: whatever comes later reads what it left behind."""
        t = getattr(kit.lib, f"ggml_{name}")(self.ctx, *args)
        kit.lib.ggml_build_forward_expand(self.graph, t)
        return t

    def _input(self, kind: int, ne: tuple[int, ...], values: Callable[[], npt.NDArray[Any]]) -> Any:
        t = kit.lib.ggml_new_tensor_4d(self.ctx, kind, *(*ne, 1, 1, 1)[:4])
        kit.lib.ggml_set_input(t)
        self.inputs.append((t, values))
        return t

    def _floats(self, ne: tuple[int, ...], scale: float = 1.0) -> Any:
        seed = [self.seed, len(self.inputs)]
        return self._input(
            kit.F32, ne, lambda: (np.random.default_rng(seed).standard_normal(ne[::-1]) * scale).astype(np.float32)
        )

    def coin(self) -> bool:
        return bool(self.rng.random() < 0.5)

    def pick(self) -> Value:
        return self.pool[self.rng.integers(len(self.pool))]

    def pick_dense(self) -> Value:
        v = self.pick()
        return v if v.dense else Value(self.call("cont", v.tensor), v.size)

    def pick_other(self, than: Value) -> Value | None:
        """A dense value in other memory."""
        v = self.pick_dense()
        return None if v.root == than.root else v

    def pick_writable(self) -> Value | None:
        """A value that may be overwritten: computed, and not a view."""
        v = self.pick()
        return v if v.dense and not v.is_input and v.tensor.view_src == ffi.NULL else None

    def flat(self, t: Any) -> Any:
        """A row for each token."""
        width, heads, tokens = self.shape
        return self.call("reshape_3d", t, width * heads, tokens, 1)

    def unflat(self, t: Any) -> Any:
        return self.call("reshape_3d", t, *self.shape)

    def part(self, t: Any, first: int, tokens: int) -> Any:
        width, heads, _ = self.shape
        return self.call("view_3d", t, width, heads, tokens, t.nb[1], t.nb[2], first * t.nb[2])

    def parts(self, a: Any, b: Any) -> tuple[Any, Any]:
        """Some tokens of a, and as many others of b."""
        total = self.shape[2]
        tokens = int(self.rng.integers(1, total + 1))
        first, second = (int(self.rng.integers(0, total - tokens + 1)) for _ in range(2))
        return self.part(a, first, tokens), self.part(b, second, tokens)

    def overwritten(self, a: Value, result: Any, size: float) -> Value:
        """`result` has been computed in the place of `a`, which nothing may read any more."""
        self.pool = [v for v in self.pool if v.root != a.root]
        return Value(self.call("scale", result, 1.0), size) if self.coin() else Value(result, size)

    def written_into(self, a: Value, size: float) -> Value:
        """Parts of `a` have been replaced."""
        for v in self.pool:
            if v.root == a.root:
                v.size = max(v.size, size)
        return Value(self.call("scale", a.tensor, 1.0), max(a.size, size)) if self.coin() else a

    # ---- the graph

    def _step(self) -> None:
        name = str(self.rng.choice(list(OPS)))
        made = OPS[name](self)
        if made is None:
            return
        assert [int(n) for n in made.tensor.ne] == [*self.shape, 1], name
        if made.size > MOST:
            made = Value(self.call("rms_norm", made.tensor, 1e-5), 1.0)
        self.ops.append(name)
        if all(v is not made for v in self.pool):
            self.pool.append(made)

    def _finish(self) -> Any:
        y = self.call("cont", self.pool[-1].tensor)
        for v in self.pool[-3:-1]:
            y = self.call("add", y, v.tensor)
        kit.lib.ggml_set_output(y)
        return y


def _pairs(name: str) -> Callable[[RandomGraph], Value]:
    def op(g: RandomGraph) -> Value:
        a, b = g.pick(), g.pick()
        return Value(g.call(name, a.tensor, b.tensor), 2 * a.size * b.size if name == "mul" else a.size + b.size)

    return op


def _repeated(name: str) -> Callable[[RandomGraph], Value]:
    def op(g: RandomGraph) -> Value:
        a, b = g.pick(), g.row if g.coin() else g.per_token
        return Value(g.call(name, a.tensor, b), 2 * a.size if name == "mul" else a.size + 1)

    return op


def _scale(g: RandomGraph) -> Value:
    a = g.pick_dense()
    return Value(g.call("scale", a.tensor, 0.7), a.size)


def _rms_norm(g: RandomGraph) -> Value:
    normed = g.call("rms_norm", g.pick().tensor, 1e-5)
    return Value(g.call("mul", normed, g.row) if g.coin() else normed, 1.5)


def _norm(g: RandomGraph) -> Value:
    t = g.call("norm", g.pick_dense().tensor, 1e-5)
    if g.coin():
        t = g.call("mul", t, g.row)
        t = g.call("add", t, g.row) if g.coin() else t
    return Value(t, 2.0)


def _l2_norm(g: RandomGraph) -> Value:
    t = g.call("l2_norm", g.pick_dense().tensor, 1e-5)
    return Value(g.call("scale", t, g.shape[0] ** 0.5), 1.0)


def _root_of_squares(g: RandomGraph) -> Value:
    a, b = g.pick_dense(), g.pick_dense()
    squares = g.call("add", g.call("sqr", a.tensor), g.call("sqr", b.tensor))
    return Value(g.call("sqrt", squares), a.size + b.size)


def _soft_max(g: RandomGraph) -> Value:
    return Value(g.call("soft_max_ext", g.pick_dense().tensor, ffi.NULL, 0.5, 0.0), 1.0)


def _soft_max_masked(g: RandomGraph) -> Value:
    """The mask is computed, too, and often nothing else reads it: the result may take its place, or that of x."""
    a, b = g.pick_dense(), g.pick_dense()
    mask = g.call("scale", b.tensor, 1.0) if g.coin() else b.tensor
    if g.rng.random() < 0.3:
        mask = g.call("cast", mask, kit.F16)
    return Value(g.call("soft_max_ext", a.tensor, mask, 0.5, 8.0 if g.coin() else 0.0), 1.0)


def _rope(g: RandomGraph) -> Value:
    a = g.pick_dense()
    width = g.shape[0]
    mode = int(g.rng.choice([0, 2]))
    return Value(g.call("rope", a.tensor, g.positions, width if g.coin() else width // 2, mode), a.size)


def _permuted(g: RandomGraph) -> Value:
    """Tokens and heads change places, and back; the result may lie that way in memory."""
    a = g.pick()
    turned = g.call("permute", a.tensor, 0, 2, 1, 3)
    if g.coin():
        b = g.pick()
        turned = g.call("add", turned, g.call("permute", b.tensor, 0, 2, 1, 3))
        a = Value(a.tensor, a.size + b.size)
    back = g.call("permute", g.call("cont", turned), 0, 2, 1, 3)
    return Value(g.call("cont", back), a.size) if g.coin() else Value(back, a.size, dense=g.shape[1] == g.shape[2] == 1)


def _product(g: RandomGraph) -> Value:
    a = g.pick()
    return Value(g.call("mul_mat", g.weights[g.rng.integers(2)], a.tensor), a.size)


def _product_and_sum(g: RandomGraph) -> Value:
    b, product = g.pick(), _product(g)
    operands = (product.tensor, b.tensor) if g.coin() else (b.tensor, product.tensor)
    return Value(g.call("add", *operands), product.size + b.size)


def _silu(g: RandomGraph) -> Value:
    a = g.pick_dense()
    return Value(g.call("silu", a.tensor), a.size)


def _swiglu(g: RandomGraph) -> Value:
    a, b = g.pick_dense(), g.pick_dense()
    return Value(g.call("swiglu_split", a.tensor, b.tensor), a.size * b.size)


def _repeat(g: RandomGraph) -> Value:
    a = g.pick_dense()
    width, heads, tokens = g.shape
    one = g.part(a.tensor, int(g.rng.integers(tokens)), 1)
    return Value(g.call("repeat_4d", one, width, heads, tokens, 1), a.size)


def _concat(g: RandomGraph) -> Value:
    a, b = g.pick_dense(), g.pick_dense()
    tokens = g.shape[2]
    first = int(g.rng.integers(0, tokens))
    if first == 0:
        return b
    parts = g.part(a.tensor, 0, first), g.part(b.tensor, int(g.rng.integers(0, first + 1)), tokens - first)
    return Value(g.call("concat", *parts, 2), max(a.size, b.size))


def _get_rows(g: RandomGraph) -> Value:
    a = g.pick_dense()
    return Value(g.unflat(g.call("get_rows", g.flat(a.tensor), g.order)), a.size)


def _cast(g: RandomGraph) -> Value:
    a = g.pick_dense()
    return Value(g.call("cast", g.call("cast", a.tensor, kit.F16), kit.F32), a.size)


def _in_place(g: RandomGraph) -> Value | None:
    a = g.pick_writable()
    if a is None:
        return None
    b = g.pick_other(a)
    width = g.shape[0]
    kinds: dict[str, tuple[tuple[Any, ...], float]] = {
        "scale": ((0.9,), a.size),
        "rms_norm": ((1e-5,), 1.0),
        "norm": ((1e-5,), 1.0),
        "rope": ((g.positions, width, 2), a.size),
        "silu": ((), a.size),
        "soft_max": ((), 1.0),
    }
    if b is not None:
        kinds["add"] = ((b.tensor,), a.size + b.size)
    name = str(g.rng.choice(list(kinds)))
    args, size = kinds[name]
    return g.overwritten(a, g.call(f"{name}_inplace", a.tensor, *args), size)


def _set_rows(g: RandomGraph) -> Value | None:
    a = g.pick_writable()
    b = a and g.pick_other(a)
    if a is None or b is None:
        return None
    rows = int(g.rng.integers(1, g.shape[2] + 1))
    to, source = g.flat(a.tensor), g.flat(b.tensor)
    some = g.call("view_3d", source, source.ne[0], rows, 1, source.nb[1], source.nb[2], 0)
    index = g.call("view_3d", g.order, rows, 1, 1, g.order.nb[1], g.order.nb[2], 0)
    return g.overwritten(a, g.unflat(g.call("set_rows", to, some, index)), max(a.size, b.size))


def _add_into_part(g: RandomGraph) -> Value | None:
    a = g.pick_writable()
    b = a and g.pick_other(a)
    if a is None or b is None:
        return None
    g.call("add_inplace", *g.parts(a.tensor, b.tensor))
    return g.written_into(a, a.size + b.size)


def _copy_into_part(g: RandomGraph) -> Value | None:
    a = g.pick_writable()
    b = a and g.pick_other(a)
    if a is None or b is None:
        return None
    to, source = g.parts(a.tensor, b.tensor)
    g.call("cpy", source, to)
    return g.written_into(a, b.size)


OPS: dict[str, Callable[[RandomGraph], Value | None]] = {
    "add": _pairs("add"),
    "sub": _pairs("sub"),
    "mul": _pairs("mul"),
    "add row": _repeated("add"),
    "mul row": _repeated("mul"),
    "scale": _scale,
    "rms_norm": _rms_norm,
    "norm": _norm,
    "l2_norm": _l2_norm,
    "root of squares": _root_of_squares,
    "soft_max": _soft_max,
    "soft_max masked": _soft_max_masked,
    "rope": _rope,
    "permuted": _permuted,
    "product": _product,
    "product and sum": _product_and_sum,
    "silu": _silu,
    "swiglu": _swiglu,
    "repeat": _repeat,
    "concat": _concat,
    "get_rows": _get_rows,
    "cast": _cast,
    "in place": _in_place,
    "set_rows": _set_rows,
    "add into part": _add_into_part,
    "copy into part": _copy_into_part,
}


def compute(seed: int, backend: Any, buft: Any) -> tuple[int, npt.NDArray[np.float32] | None, RandomGraph]:
    """Status, the output's values (None if it failed), and the graph, which is freed."""
    g = RandomGraph(seed)
    allocator = kit.lib.ggml_gallocr_new(buft)
    try:
        assert kit.lib.ggml_gallocr_alloc_graph(allocator, g.graph)
        for t, values in g.inputs:
            if t.data != ffi.NULL:  # else nothing reads it
                kit.put(t, values())
        status = int(kit.lib.ggml_backend_graph_compute(backend, g.graph))
        return status, kit.floats(g.output) if status == kit.SUCCESS else None, g
    finally:
        kit.lib.ggml_gallocr_free(allocator)
        g.close()


def differences(seeds: range, device: Any, stock: Any) -> list[str]:
    """What the two backends disagree about, as sentences. Both are (backend, buffer type)."""
    found = []
    for seed in seeds:
        _, want, _ = compute(seed, *stock)
        status, got, g = compute(seed, *device)
        label = f"seed {seed} {g.shape} {g.ops}"
        assert want is not None, label
        assert np.isfinite(want).all(), label
        if got is None:
            found.append(f"status {status}, {graph_kit.last_error()}: {label}")
            continue
        error = float(np.mean((got - want) ** 2) / max(float(np.mean(want**2)), 1e-2))
        if not error <= 1e-6:
            found.append(f"error {error:.1e}: {label}")
    return found
