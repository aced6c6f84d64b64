"""Models loaded and closed many times leave nothing behind: no process, thread, descriptor, shared memory, or memory.

TILEBEAM_LOAD_ROUNDS sets how often (default 30; 1000 take some minutes per executor). Run as a program it prints what
it saw:

    PYTHONPATH=.:tests/kits python tests/session/test_leaks.py process 1000
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import process_kit
import pytest

ROUNDS = int(os.environ.get("TILEBEAM_LOAD_ROUNDS", "30"))
WARM_UP = 10  # caches of the C library, of Python and of llama.cpp fill
LEAK_BYTES = 16384  # per round; a KV cache or a graph that stayed would be far more
PARTS = 3  # of the rounds: what leaks grows in each part, what the C library takes and keeps in a few
MORE_PARTS = 12  # of the same length at most, as long as each has grown: heaps of busy machines take longer to settle


def resident_bytes() -> int:
    """Anonymous memory of this process: file pages that happen to be mapped are not its own."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


def leaks(grown: list[int], part: int) -> bool:
    """Tell whether memory has grown in every part of so many rounds. Where the C library gives some back, a part tells
    nothing."""
    return min((more for more in grown if more >= 0), default=0) >= LEAK_BYTES * part


def rounds(executor: str, n: int, folder: Path) -> dict[str, Any]:
    """Load, generate, close, at least n times, an ordinary and a repacked file in turn."""
    import tilebeam
    from npu_kit import possessions
    from tilebeam import gguf as gguf_tools
    from tilebeam.native.control import control

    from bench.lib import synth

    ordinary = synth.write_model(folder / "ordinary.gguf", synth.preset("tiny", n_layer=1))
    gguf_tools.pack(ordinary, folder / "repacked.gguf")
    files = [ordinary, folder / "repacked.gguf"]
    texts = set()

    def round_(i: int) -> None:
        with tilebeam.load(files[i % 2], n_ctx=256, n_seq_max=2, threads=2, executor=executor) as lm:
            texts.add(
                lm.generate("the question", tilebeam.SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].text
            )

    for i in range(WARM_UP):
        round_(i)
    before, memory = possessions(), [resident_bytes()]
    part, grown = n // PARTS, list[int]()
    while len(grown) < PARTS or (leaks(grown, part) and len(grown) < MORE_PARTS):
        for i in range(part):
            round_(i)
        memory.append(resident_bytes())
        grown = [after - before for before, after in pairwise(memory)]
    end = time.monotonic() + 60
    while (after := possessions()) != before and time.monotonic() < end:
        time.sleep(0.01)  # a thread is joined a moment before the system has forgotten it
    status = control().status()
    return {
        "executor": executor,
        "rounds": part * len(grown),
        "before": before.__dict__,
        "after": after.__dict__,
        "grown_bytes": grown,
        "texts": len(texts),
        "sessions": status["sessions"],
        "buffers": status["buffers"],
    }


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_loads_leave_nothing_behind(executor: str) -> None:
    """In a program of its own: the test runner's other tests hold all sorts of things."""
    run = subprocess.run(
        [sys.executable, __file__, executor, str(ROUNDS)],
        capture_output=True,
        text=True,
        env=process_kit.environment(),
        timeout=300 + 10 * ROUNDS * MORE_PARTS // PARTS,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout)
    assert found["after"] == found["before"]
    assert found["buffers"] == 0
    assert found["texts"] == 1
    assert found["sessions"] == found["rounds"] + WARM_UP
    sanitized = "libasan" in Path("/proc/self/maps").read_text()  # which keeps freed memory for a while
    assert not leaks(found["grown_bytes"], found["rounds"] // len(found["grown_bytes"])) or sanitized


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        json.dump(rounds(sys.argv[1], int(sys.argv[2]), Path(name)), sys.stdout)
    print()
