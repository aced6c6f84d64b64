"""Dequantization of 4-bit weights to FP16 tiles in HMX order, by how the quants are laid out.

    python -m bench.papers.dequant_layouts [--json] [--quick]

conventional  rows of ggml blocks: every value goes to its place in the tile by scatter
groups        2 x 16 groups in tile order, a block each: stores in order, but vectors are cut by the block size
coalesced     eight groups in a super-block, as the paper stores them
column        Tilebeam's tile: the same order of quants, one scale per column and 32 k, ggml's own
none          the quants copied, nothing computed

It is dequantization alone, of the layouts that the paper's figure 15 compares by the latency of a whole product; on a
host no model dequantizes to such tiles, which only the Hexagon kernels use. One thread; the tiles are written to a
buffer that stays in L2, as a matrix unit's memory would. The baseline of every row is the conventional layout, the
share of the limit that of `none`. Every way's numbers are checked first. The counts of Hexagon instructions for the
same steps are bench/hvx_packets.py's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from tilebeam import _ext as ggml_ext
from tilebeam._ext import Type

from bench.lib import limits, report
from bench.lib.options import Parser

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]
RING = 64  # tiles of output: 128 KiB


def in_tiles(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return a matrix (N, K) as tiles (N/32, K/32, 1024) in HMX order."""
    n, k = values.shape
    tiles = values.reshape(n // 32, 32, k // 32, 16, 2)  # panel, column, tile, row pair, row
    return tiles.transpose(0, 2, 3, 1, 4).reshape(n // 32, k // 32, 1024)


def with_scales(scales: Halves, quants: npt.NDArray[Any]) -> Bytes:
    """FP16 scales in front of their quants, along the last axis."""
    return np.concatenate([np.ascontiguousarray(scales).view(np.uint8), quants], axis=-1)


def grouped(k: int, n: int, rng: np.random.Generator) -> tuple[Bytes, Bytes, Halves]:
    """Return the same random weights in groups and coalesced, and their values in tile order."""
    tiles = n * k // 1024
    nibbles = rng.integers(0, 16, (tiles, 32, 32)).astype(np.uint8)
    scales = rng.uniform(-1, 1, (tiles, 32)).astype(np.float16)
    blocks = with_scales(scales[..., None], nibbles[..., :16] | nibbles[..., 16:] << 4)
    # quad order: rows of a chunk by (low, high) nibble and even, odd byte: 0, 1 low and 2, 3 high
    rows = nibbles.reshape(tiles, 4, 4, 64)
    packed = np.stack([rows[:, :, 0] | rows[:, :, 2] << 4, rows[:, :, 1] | rows[:, :, 3] << 4], axis=-1)
    supers = with_scales(scales.reshape(tiles, 4, 8), packed.reshape(tiles, 4, 128))
    values = (nibbles.astype(np.float32) - 8) * scales.astype(np.float32)[..., None]
    return blocks.reshape(-1), supers.reshape(-1), values.astype(np.float16).reshape(-1)


def inputs(k: int, n: int) -> dict[str, tuple[Bytes, Halves]]:
    """Each layout's bytes, and what its tiles must hold."""
    rng = np.random.default_rng(1)
    nibbles = rng.integers(0, 16, (n, k // 32, 32)).astype(np.uint8)
    scales = rng.uniform(-1, 1, (n, k // 32)).astype(np.float16)
    rows = with_scales(scales[..., None], nibbles[..., :16] | nibbles[..., 16:] << 4).reshape(-1)
    values = ((nibbles.astype(np.float32) - 8) * scales.astype(np.float32)[..., None]).reshape(n, k)
    plain = in_tiles(values).astype(np.float16).reshape(-1)
    blocks, supers, group_values = grouped(k, n, rng)
    column = ggml_ext.pack(Type.Q4_0_COL, rows, k, n)
    return {
        "conventional": (rows, plain),
        "groups": (blocks, group_values),
        "coalesced": (supers, group_values),
        "column": (column, plain),
        "none": (column, plain),
    }


def main() -> None:
    p = Parser(__doc__, "one shape, fewer and shorter rounds")
    p.add_rounds(15, 5)
    args = p.parse()
    shapes = [(1536, 1536)] if args.quick else [(1536, 1536), (1536, 8960), (8960, 1536)]
    least = 0.02 if args.quick else 0.05
    lib = limits.compile("papers/dequant_layouts.cpp")
    rows = report.Rows("dequant_layouts", args.json)
    copies = []
    for k, n in shapes:
        tiles = k * n // 1024
        data = inputs(k, n)
        out = np.zeros(tiles * 1024, np.float16)

        def run(name: str, ring: int = RING) -> Callable[[], None]:
            function = getattr(lib, f"tb_{name}")
            pointers = (ctypes.c_void_p(data[name][0].ctypes.data), ctypes.c_void_p(out.ctypes.data))  # noqa: B023
            sizes = tuple(ctypes.c_size_t(v) for v in (k // 32, n // 32, ring))  # noqa: B023
            return lambda: function(*pointers, *sizes)

        for name, (_, values) in data.items():
            if name != "none":
                run(name, tiles)()
                np.testing.assert_array_equal(out, values, err_msg=name)
        work = 1e-9 * k * n
        copy = report.interleave(run("none"), lambda: None, 3, least, 0.0)
        copies.append(work / min(copy.ours))
        for name in data:
            if name != "conventional":
                pairs = report.interleave(run(name), run("conventional"), args.rounds, least, 0.0)
                rows.add(report.row(f"{name}, {k} x {n}", pairs, work, "Gweights/s", copies[-1]))
    rows.finish({"copy_gweights_per_s": round(max(copies), 2)})


if __name__ == "__main__":
    report.start(main)
