"""Instruction packets per weight of the Hexagon kernels' inner loops: dequantization and exp2.

    python -m bench.hvx_packets [--json] [--quick]

A Hexagon issues one packet of up to four instructions per cycle and thread at best; no emulator knows how many cycles
one takes, so packets are what can be compared without a phone: those of the inner loop in the disassembly of the
kernels compiled for v73 (HVX floating point, as on the phones of the paper; never run), over the weights that the
loop's stores or scatters write. `least`, where given, is what the busiest unit would need if packets were filled
perfectly.

The baseline of dequantization is the conventional layout as one would write it down, a block at a time by table
look-up and scatter; ratio_min and ratio_max are against the same with eight columns in flight, and without tables. That
a scatter counts as one packet flatters this baseline. That a gather does flatters the table of exponents: by the paper,
one takes 24 to 48 packets' time on V75, so the table has a row for each of these too, as if nothing of that time
could be hidden behind other work. The baseline of the exponents is the 32-bit polynomial. The limit is one stored
vector of 64 numbers per packet.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench.lib import report
from bench.lib.built import built
from bench.lib.options import Parser

STORE_LIMIT = 1 / 64  # packets per number
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
        return sum(len(re.findall(pattern, p)) for p in self.packets)

    @property
    def written(self) -> int:
        """FP16 numbers written per iteration: stored vectors, gathers' results among them, and scattered ones. Under a
        predicate a scatter writes half a vector in these kernels."""
        half = self.count(r"if \(q\d\) vscatter")
        return 64 * (self.count(r"vmemu?\([^)]*\) = ") + self.count("vscatter") - half) + 32 * half

    @property
    def least(self) -> int:
        return max(self.count(pattern) for pattern in UNITS.values())


def objdump() -> str | None:
    """Find a disassembler that knows Hexagon, if there is one."""
    for name in ("llvm-objdump-19", "llvm-objdump"):
        path = shutil.which(name)
        if path:
            targets = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
            if "hexagon" in targets:
                return path
    return None


def library_v73() -> Path:
    """Return the library of kernels with HVX floating point, which are never run.

    Raises:
        FileNotFoundError: the build has none.
    """
    return built("hexagon/libhvx_v73.a")


@cache
def disassembly(path: Path) -> str:
    """All functions of an object, library or program.

    Raises:
        RuntimeError: there is no disassembler for Hexagon.
    """
    tool = objdump()
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
    """Find the loop of the one matching function that does most of the instruction ``work`` per iteration: where a
    compiler unrolled one and left a second for the rest, the unrolled one.

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


def static_loops() -> dict[str, Loop]:
    """Return the inner loops of everything that is compared, v73."""
    library = library_v73()
    return {name: inner_loop(library, *how) for name, how in (DEQUANTIZATION | EXPONENTS).items()}


def static_row(name: str, loop: Loop, baselines: Sequence[float], unit: str) -> dict[str, Any]:
    """Make a row: its ratio is to the first baseline; the others widen the range."""
    value = len(loop.packets) / loop.written
    return _row(name, value, baselines, unit) | {"packets": len(loop.packets), "numbers": loop.written}


def _row(name: str, value: float, baselines: Sequence[float], unit: str, limit: float = STORE_LIMIT) -> dict[str, Any]:
    ratios = [b / value for b in baselines]
    row = report.figures(name, round(baselines[0], 5), round(value, 5), unit, ratios, limit / value)
    return row | {"ratio": round(ratios[0], 3)}


def static_rows(loops: Mapping[str, Loop]) -> list[dict[str, Any]]:
    """Dequantization and exponents, v73."""
    cost = {name: len(loop.packets) / loop.written for name, loop in loops.items()}
    conventional = [cost[n] for n in ("conventional", "conventional, no tables", "conventional, tuned")]
    polynomial = [cost["exp2, polynomial in float"]]
    copy = inner_loop(library_v73(), *COPY)
    weights = 256 * (copy.written // 64)  # a vector of quants, two to the byte
    value = len(copy.packets) / weights
    rows = [_row("4-bit quants, copied only", value, conventional, "packets/weight", STORE_LIMIT / 4)]
    rows[0] |= {"packets": len(copy.packets), "numbers": weights}
    for name in DEQUANTIZATION:
        least = round(loops[name].least / loops[name].written, 5)
        rows.append(static_row(name, loops[name], conventional, "packets/weight") | {"least": least})
    rows += [static_row(name, loops[name], polynomial, "packets/number") for name in EXPONENTS]
    return rows + [gather_row(loops["exp2, table"], time, polynomial) for time in GATHER_TIMES]


def gather_row(loop: Loop, time: int, baselines: Sequence[float]) -> dict[str, Any]:
    """Make the row of the table of exponents, where each gather takes the time of so many packets."""
    packets = len(loop.packets) + (time - 1) * loop.count("vgather")
    name, value = f"exp2, table, {time} packets a gather", packets / loop.written
    return _row(name, value, baselines, "packets/number") | {"packets": packets, "numbers": loop.written}


def main() -> None:
    args = Parser(__doc__, "has no effect").parse()
    try:
        counted = static_rows(static_loops())
    except FileNotFoundError as error:
        raise RuntimeError(
            f"{error}\nThe Hexagon kernels are built where clang-19, lld-19 and libc++-19-dev are installed."
        ) from error
    rows = report.Rows("hvx_packets", args.json)
    for row in counted:
        rows.add(row)
    rows.finish({"packets per stored number": STORE_LIMIT})


if __name__ == "__main__":
    report.start(main)
