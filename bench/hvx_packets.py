"""Instruction packets per weight of the Hexagon kernels' inner loops: dequantization, exp2, the integer GEMM.

    python -m bench.hvx_packets [--json] [--quick]

A Hexagon issues one packet of up to four instructions per cycle and thread at best; no emulator knows how many cycles
one takes, so packets are what can be compared without a phone. Two ways of counting:
  static   the inner loop's packets in the disassembly of the kernels compiled for v73 (HVX floating point, as on the
           phones of the paper), over the weights that the loop's stores or scatters write. Never run.
  dynamic  the packets that qemu-hexagon executes in the kernels compiled for v66, which multiplies FP16 in integers and
           scales integer sums with scalar instructions. Difference of two lengths, so calls and prologues drop out.

`least`, where given, is what the busiest unit would need if packets were filled perfectly.

The baseline of dequantization is the conventional layout as one would write it down, a block at a time by table
look-up and scatter; ratio_min and ratio_max are against the same with eight columns in flight, and without tables. That
a scatter counts as one packet flatters this baseline. That a gather does flatters the table of exponents: by the paper,
one takes 24 to 48 packets' time on V75, so the table has a row for each of these too, as if nothing of that time
could be hidden behind other work. The baseline of the exponents is the 32-bit polynomial, that of the GEMM the portable
kernel on qemu-hexagon. The limit of dequantization and exponents is one stored vector of 64 numbers per packet; that of
the GEMM two vrmpy per packet.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tilebeam._ext import Type, tile_bytes

from bench.lib import hvx_guest as guest
from bench.lib import report
from bench.lib.hvx_guest import HVX, PORTABLE, Op, Request
from bench.lib.options import Parser

STORE_LIMIT = 1 / 64  # packets per number
VRMPY_LIMIT = 1 / 256  # packets per weight and row
GATHER_TIMES = (24, 48)  # packets that a gather takes on V75, from the paper


# Instructions of which a packet takes one each (checked with the assembler: two of a kind in a packet are an error).
UNITS = {
    "shift": r"vlut16|vlsr|vunpack|vshuff|\.hf = v\d+\.qf16|\.qf16 = v(?:add|sub)",
    "permute": r"vlut16|vdelta|vror|vunpack|vshuff|valign|vmemu",
    "multiply": r"\.qf16 = vmpy|vsplat",
    "store": r"vmemu?\([^)]*\) = |vscatter",
}


@dataclass(frozen=True)
class Loop:
    """The packets of one hardware loop's body."""

    function: str
    packets: tuple[str, ...]

    def count(self, pattern: str) -> int:
        """How many instructions match."""
        return sum(len(re.findall(pattern, p)) for p in self.packets)

    @property
    def written(self) -> int:
        """FP16 numbers written per iteration: stored vectors, gathers' results among them, and scattered ones. Under a
        predicate a scatter writes half a vector in these kernels."""
        half = self.count(r"if \(q\d\) vscatter")
        return 64 * (self.count(r"vmemu?\([^)]*\) = ") + self.count("vscatter") - half) + 32 * half

    @property
    def least(self) -> int:
        """Packets that the busiest unit needs."""
        return max(self.count(pattern) for pattern in UNITS.values())


@cache
def disassembly(path: Path) -> str:
    """All functions of an object, library or program.

    Raises:
        RuntimeError: there is no disassembler for Hexagon.
    """
    tool = guest.objdump()
    if tool is None:
        raise RuntimeError("no llvm-objdump for Hexagon: install the package llvm-19")
    command = [tool, "-d", "--no-show-raw-insn", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def functions(path: Path, pattern: str) -> dict[str, list[tuple[int, str]]]:
    """Functions whose mangled names match, as lists of packets with their addresses."""
    found: dict[str, list[tuple[int, str]]] = {}
    packets: list[tuple[int, str]] | None = None
    words: list[str] = []
    for line in disassembly(path).splitlines():
        head = re.match(r"[0-9a-f]+ <(.*)>:$", line)
        if head:
            packets = found.setdefault(head[1], []) if re.search(pattern, head[1]) else None
            continue
        instruction = re.match(r"\s*([0-9a-f]+):\s+(.*)", line)
        if packets is None or not instruction:
            continue
        text = instruction[2]
        if text.startswith("{"):
            words, start = [], int(instruction[1], 16)
        words.append(text)
        if "}" in text:
            packets.append((start, " ".join(words)))
    return found


def inner_loop(path: Path, pattern: str, work: str) -> Loop:
    """The loop of the one matching function that does most of the instruction ``work`` per iteration: where a compiler
    unrolled one and left a second for the rest, the unrolled one.

    Raises:
        LookupError: no function, several, or no hardware loop with such an instruction in it.
    """
    matching = functions(path, pattern)
    if len(matching) != 1:
        raise LookupError(f"{path.name}: {len(matching)} functions match {pattern}")
    ((name, packets),) = matching.items()
    addresses = [address for address, _ in packets]
    loops = []
    for _, text in packets:
        for target in re.findall(r"loop0\((?:##)?(0x[0-9a-f]+)", text):
            first = addresses.index(int(target, 16))
            last = next(i for i in range(first, len(packets)) if ":endloop0" in packets[i][1])
            loops.append(Loop(name, tuple(text for _, text in packets[first : last + 1])))
    loops = [loop for loop in loops if loop.count(work)]
    if not loops:
        raise LookupError(f"{name}: no hardware loop with {work}")
    return max(loops, key=lambda loop: loop.count(work))


# Mangled names of the counted functions, and an instruction that their inner loops must contain.
DEQUANTIZATION = {
    "conventional": (r"\d+conventional_oneE", "vscatter"),
    "conventional, no tables": (r"\d+conventional_arithmeticE", "vscatter"),
    "conventional, tuned": (r"\d+conventional_tunedE", "vscatter"),
    "tile groups": (r"\d+tile_groupsE", "vlut16"),
    "tile groups, super-blocks": (r"\d+super_blocksE", "vlut16"),
    "q4_0 tile": (r"\d+dequantize_q4_tileE", "vlut16"),
    "q4_0 column": (r"\d+dequantize_q4_columnE", "vlut16"),
    "iq4_nl column": (r"\d+dequantize_iq4nl_columnE", "vlut16"),
    "q8_0 column": (r"\d+dequantize_q8_columnE", "vzxt"),
    "q8_0 tile": (r"\d+dequantize_q8_tileE", "vdelta"),
}
COPY = (r"\d+copy_quantsE", "vmem")
EXPONENTS = {
    "exp2, polynomial in float": (r"\d+exp2_fp32_polynomialE", "vmpy"),
    "exp2, polynomial in FP16": (r"\d+exp2_fp16_polynomialE", "vmpy"),
    "exp2, table": (r"\d+exp2_vectorsE", "vgather"),
}


def gemm_function(format: str, rows: int) -> str:
    """The mangled name of a GEMM kernel."""
    return rf"block.*format_{format}ELi{rows}E"


def static_loops() -> dict[str, Loop]:
    """The inner loops of everything that is compared, v73."""
    library = guest.library_v73()
    return {name: inner_loop(library, *how) for name, how in (DEQUANTIZATION | EXPONENTS).items()}


def static_row(name: str, loop: Loop, baselines: Sequence[float], unit: str) -> dict[str, Any]:
    """A row: the first baseline is the one; the others widen the range."""
    value = len(loop.packets) / loop.written
    return _row(name, value, baselines, unit, STORE_LIMIT) | {
        "counted": "static v73, never run",
        "packets": len(loop.packets),
        "numbers": loop.written,
    }


def _row(name: str, value: float, baselines: Sequence[float], unit: str, limit: float) -> dict[str, Any]:
    ratios = [b / value for b in baselines]
    row = report.figures(name, round(baselines[0], 5), round(value, 5), unit, ratios, limit / value)
    return row | {"ratio": round(ratios[0], 3)}


# ---- dynamic


def per_number(make: Any, short: int, long: int, numbers: int) -> float:
    """Packets per number: what ``long - short`` units of ``numbers`` numbers add."""
    few, many = guest.packets(guest.command(), [make(short), make(long)])
    return (many - few) / ((long - short) * numbers)


def _bytes(rng: np.random.Generator, n: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return rng.integers(0, 128, n, np.uint8)


def dynamic_rows(tiles: int) -> list[dict[str, Any]]:
    """What qemu-hexagon executes, v66."""
    rng = np.random.default_rng(1)
    rows = []

    def tile_values(kind: Type) -> float:
        size = tile_bytes(kind)
        return per_number(lambda n: Request(Op.TILES, HVX, (kind, n), (_bytes(rng, n * size),)), tiles, 9 * tiles, 1024)

    def layout_values(layout: int) -> float:
        size = tile_bytes(Type.Q4_0_COL)
        return per_number(
            lambda n: Request(Op.LAYOUT, HVX, (layout, n), (_bytes(rng, n * size + 128),)), tiles, 9 * tiles, 1024
        )

    conventional = [layout_values(guest.CONVENTIONAL), layout_values(guest.CONVENTIONAL_TUNED)]
    values = {
        "conventional": conventional[0],
        "conventional, tuned": conventional[1],
        "tile groups": layout_values(guest.TILE_GROUPS),
        "tile groups, super-blocks": layout_values(guest.SUPER_BLOCKS),
        "q4_0 tile": tile_values(Type.Q4_0_TILE),
        "q4_0 column": tile_values(Type.Q4_0_COL),
        "iq4_nl column": tile_values(Type.IQ4_NL_COL),
        "q8_0 column": tile_values(Type.Q8_0_COL),
        "q8_0 tile": tile_values(Type.Q8_0_TILE),
    }
    for name, value in values.items():
        row = _row(f"{name}, v66", value, conventional, "packets/weight", STORE_LIMIT)
        rows.append(row | {"counted": "dynamic v66"})
    gathered = per_number(lambda n: Request(Op.GATHER, HVX, (), (_bytes(rng, n * 128),)), tiles, 9 * tiles, 64)
    row = _row("exp2, table, v66", gathered, [gathered], "packets/number", STORE_LIMIT)
    rows.append(row | {"counted": "dynamic v66"})
    return rows


def gemm_rows(tiles: int, row_counts: Sequence[int]) -> list[dict[str, Any]]:
    """The integer GEMM per weight and activation row: v66 as executed, v73 from its loop."""
    rng = np.random.default_rng(2)
    rows = []
    for format, number, kind in (("q4", 0, Type.Q4_0_COL), ("q8", 1, Type.Q8_0_COL)):
        for m in row_counts:

            def request(
                set: int, k_tiles: int, number: int = number, size: int = tile_bytes(kind), m: int = m
            ) -> Request:
                x = rng.standard_normal((m, 32 * k_tiles)).astype(np.float32)
                operands = (_bytes(rng, k_tiles * size), x, np.zeros((m, 32), np.float32))
                return Request(Op.GEMM, set, (number, m, k_tiles, 0), operands)

            baseline = per_number(lambda n: request(PORTABLE, n), tiles, 9 * tiles, 1024 * m)
            value = per_number(lambda n: request(HVX, n), tiles, 9 * tiles, 1024 * m)
            name = f"gemm {format}_0 column, {m} rows"
            row = _row(f"{name}, v66", value, [baseline], "packets/weight/row", VRMPY_LIMIT)
            rows.append(row | {"counted": "dynamic v66"})
            loop = inner_loop(guest.library_v73(), gemm_function(format, m), "vrmpy")
            weights = loop.count("vrmpy") * 128
            value = len(loop.packets) / weights
            row = _row(f"{name}, v73", value, [baseline], "packets/weight/row", VRMPY_LIMIT)
            rows.append(row | {"counted": "static v73, never run", "packets": len(loop.packets), "numbers": weights})
    return rows


def static_rows(loops: Mapping[str, Loop]) -> list[dict[str, Any]]:
    """Dequantization and exponents, v73."""
    cost = {name: len(loop.packets) / loop.written for name, loop in loops.items()}
    conventional = [cost[n] for n in ("conventional", "conventional, no tables", "conventional, tuned")]
    polynomial = [cost["exp2, polynomial in float"]]
    copy = inner_loop(guest.library_v73(), *COPY)
    weights = 256 * (copy.written // 64)  # a vector of quants, two to the byte
    value = len(copy.packets) / weights
    rows = [_row("4-bit quants, copied only", value, conventional, "packets/weight", STORE_LIMIT / 4)]
    rows[0] |= {"counted": "static v73, never run", "packets": len(copy.packets), "numbers": weights}
    for name in DEQUANTIZATION:
        least = round(loops[name].least / loops[name].written, 5)
        rows.append(static_row(name, loops[name], conventional, "packets/weight") | {"least": least})
    rows += [static_row(name, loops[name], polynomial, "packets/number") for name in EXPONENTS]
    return rows + [gather_row(loops["exp2, table"], time, polynomial) for time in GATHER_TIMES]


def gather_row(loop: Loop, time: int, baselines: Sequence[float]) -> dict[str, Any]:
    """The table of exponents, where each gather takes the time of so many packets."""
    packets = len(loop.packets) + (time - 1) * loop.count("vgather")
    name, value = f"exp2, table, {time} packets a gather", packets / loop.written
    row = _row(name, value, baselines, "packets/number", STORE_LIMIT)
    return row | {"counted": "static v73, never run", "packets": packets, "numbers": loop.written}


def measure(quick: bool) -> tuple[list[dict[str, Any]], str | None]:
    """All rows, and why the dynamic ones are missing, if they are."""
    rows = static_rows(static_loops())
    missing = guest.missing()
    if missing is None:
        tiles = 2 if quick else 16
        rows += dynamic_rows(tiles) + gemm_rows(tiles, (1, 8) if quick else (1, 2, 4, 8))
    return rows, missing


def verdict(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What became of the target: `column` at most the paper's best, both at least ten times below the conventional."""
    by_name = {r["name"]: r for r in rows}
    column, best = by_name["q4_0 column"], by_name["tile groups, super-blocks"]
    lines = [
        f"column needs {column['value'] / best['value']:.2f} of the packets of the paper's best (target: at most 1)",
    ]
    for name, r in (("column", column), ("the paper's best", best)):
        lines.append(
            f"{name}: {r['ratio']:.1f} times fewer than conventional, {r['ratio_max']:.1f} without tables, "
            f"{r['ratio_min']:.1f} tuned (target: 10)"
        )
    lines.append(f"busiest unit: column {column['least']:.4f}, the paper's best {best['least']:.4f} packets per weight")
    return lines


def main() -> None:
    """Count and print."""
    args = Parser(__doc__, "fewer lengths").parse()
    try:
        counted, missing = measure(args.quick)
    except FileNotFoundError as error:
        raise RuntimeError(
            f"{error}\nThe Hexagon kernels are built where clang-19, lld-19 and libc++-19-dev are installed."
        ) from error
    rows = report.Rows("hvx_packets", args.json)
    for row in counted:
        rows.add(row)
    notes = [f"not counted on qemu-hexagon: {missing}"] if missing else []
    peaks = {"packets per stored number": STORE_LIMIT, "packets per weight and row": VRMPY_LIMIT}
    rows.finish(peaks, *verdict(counted), *notes)


if __name__ == "__main__":
    report.start(main)
