"""Rounds of one fault done to a running generation in the process executor. tests/test_fault_rounds.py runs this.

A program of its own, so that an abort or a hang is seen from outside. In every round a model generates, checking each
logit of it against a run without faults, and at a random moment a thread does the fault:

    kill      SIGKILL to the NPU process
    stop      SIGSTOP, for longer than the deadline
    page      the channel's shared pages are overwritten with random bytes, again and again
    word      .. once, a single word: an error, or no harm
    memory    the NPU process gets no more memory (RLIMIT_AS)
    truncate  the mapped model file is cut off, anywhere
    rewrite   some bytes of it are written over
    unlink    it is deleted: no harm, who has it mapped keeps it

Each time but for the harmless ones the host must get an NpuError that names the cause, the models that do not depend on
what broke must go on (a CPU model and another NPU session run all the time; where the NPU process lives on, so must
another model on it), and a new load must give the right logits. Prints one JSON object.

    PYTHONPATH=.:tests/kits python tests/session/fault_rounds.py kill --rounds 500
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import tilebeam
from npu_kit import FFI, OK, Session, SharedArray, Vec, possessions, scale
from tilebeam import NpuError, SamplingParams
from tilebeam.native.control import control

from bench.lib import synth

# Short where the fault is only noticed by it; elsewhere long, so that a machine with much else to do is not late.
DEADLINES_MS = {"stop": 600, "page": 600, "word": 600}
DEADLINE_MS = 5000
LONGEST_S = 60.0  # no round takes that long, however loaded the machine: then something hangs
CAUSES = {
    "kill": r"the NPU process was killed by signal 9",
    "stop": r"no op ended within the deadline of 600 ms",
    "page": r"the NPU process (reports: .*damaged|sent a damaged|did not answer)",
    "word": r"the NPU process (reports: .*damaged|sent a damaged|did not answer)",
    "memory": r"the NPU process reports: .*memory",
    "truncate": r"victim[0-9]+\.gguf was truncated while in use",
    "rewrite": r"victim[0-9]+\.gguf was written to while in use",
}
HARMLESS = ("unlink",)
MAYBE_HARMLESS = ("word",)
# The NPU process lives on, so other models on it must.
LIVES_ON = ("memory", "truncate", "rewrite", "unlink")
OF_THE_FILE = ("truncate", "rewrite", "unlink")
OPTIONS: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 4}
PROMPT = "the question is how many"
GREEDY = SamplingParams(n=3, temperature=0, max_tokens=6, ignore_eos=True)
IDS = [1 + 37 * i % 900 for i in range(600)]
# (tokens, tokens per batch) of one pass; the later ones need more scratch memory than all before.
PASSES = ((24, 1), (24, 8), (96, 48))
LARGE_PASS = (600, 300)


class TooLate(Exception):
    """The fault came when nothing was left that it could hit: not a round."""


class Wrong(Exception):
    """What must never happen did."""


class Reference:
    """What a model computes when nothing happens."""

    def __init__(self, lm: tilebeam.LM, passes: Sequence[tuple[int, int]]) -> None:
        self.passes = passes
        self.logits = [lm.logits(IDS[:n], chunk=chunk) for n, chunk in passes]
        self.tokens = [s.token_ids for s in lm.generate(PROMPT, GREEDY)[0].outputs]

    def check(self, lm: tilebeam.LM, which: int) -> int:
        """Decode one pass, comparing the logits of every batch before the next is decoded. Returns the rows."""
        n, chunk = self.passes[which]
        want = self.logits[which]
        with lm.raw_decode() as context:
            for start in range(0, n, chunk):
                count = min(chunk, n - start)
                context.token[:count] = IDS[start : start + count]
                context.pos[:count] = np.arange(start, start + count)
                context.seq[:count] = 0
                context.output[:count] = 1
                lm.check_decode(context.decode(count))
                for i in range(count):
                    if not np.array_equal(context.logits(i), want[start + i]):
                        raise Wrong(f"wrong logits at token {start + i} of pass {which}")
        return n

    def check_text(self, lm: tilebeam.LM) -> int:
        got = [s.token_ids for s in lm.generate(PROMPT, GREEDY)[0].outputs]
        if got != self.tokens:
            raise Wrong(f"generated {got}, not {self.tokens}")
        return sum(map(len, got))


class Others(threading.Thread):
    """What has nothing to do with the fault, and must not notice it: a CPU model and an NPU session of its own."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        self.model = tilebeam.load(model, "cpu", n_ctx=256, n_seq_max=4, threads=1)
        self.want = [s.token_ids for s in self.model.generate(PROMPT, GREEDY)[0].outputs]
        self.memory = SharedArray(4096)
        self.session = Session(True, n_threads=1, deadline_ms=60000)
        self.session.map(self.memory)
        self.rounds = 0
        self.error: BaseException | None = None
        self._ending = threading.Event()

    def run(self) -> None:
        try:
            while not self._ending.wait(0.01):
                if [s.token_ids for s in self.model.generate(PROMPT, GREEDY)[0].outputs] != self.want:
                    raise Wrong("the CPU model says something else")
                self.memory.floats[:] = 1
                if self.session.compute([scale(Vec(0, 4096), Vec(0, 4096), 2.0)] * 3, 1).status != OK:
                    raise Wrong("another NPU session failed")
                if not np.all(self.memory.floats == 8):
                    raise Wrong("another NPU session computed something else")
                self.rounds += 1
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self._ending.set()
        self.join()
        self.session.stop()
        self.memory.close()
        self.model.close()
        if self.error:
            raise self.error


# --- the faults -------------------------------------------------------------------------------------------------------


class Channel:
    """The control region of the NPU process `pid`, as this process has it mapped."""

    def __init__(self, pid: int) -> None:
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "memfd:tilebeam-channel" in line:
                begin, end = (int(x, 16) for x in line.split()[0].split("-"))
                struct = FFI.cast("tb_channel *", begin)
                if struct.npu.pid == pid:
                    self.struct = struct
                    self.bytes = FFI.buffer(struct, end - begin)
                    return
        raise Wrong(f"no channel to process {pid}")


def overwrite(pid: int, rng: np.random.Generator, noticed: threading.Event) -> None:
    page = Channel(pid).bytes
    size = FFI.sizeof("tb_channel")
    while not noticed.is_set():
        page[0:size] = rng.bytes(size)
        at = mmap.PAGESIZE + int(rng.integers(0, 1 << 16))
        page[at : at + 512] = rng.bytes(512)


def overwrite_word(pid: int, rng: np.random.Generator) -> None:
    page = Channel(pid).bytes
    at = int(rng.integers(0, FFI.sizeof("tb_channel")))
    if rng.random() < 0.3:
        at = mmap.PAGESIZE + int(rng.integers(0, 1 << 14))
    at = at // 4 * 4
    page[at : at + 4] = rng.bytes(4)


def take_memory(pid: int) -> None:
    used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.prlimit(pid, resource.RLIMIT_AS, (used + (1 << 16), resource.RLIM_INFINITY))


def write_over(path: Path, rng: np.random.Generator) -> None:
    with path.open("r+b") as f:
        f.seek(int(rng.integers(0, path.stat().st_size - 64)))
        f.write(rng.bytes(64))


def cut_off(path: Path, rng: np.random.Generator) -> None:
    size = path.stat().st_size
    os.truncate(path, int(rng.choice([0, size // 2, size - 1, size - 100, int(rng.integers(0, size))])))


def do_fault(kind: str, pid: int, path: Path, rng: np.random.Generator, noticed: threading.Event) -> None:
    actions: dict[str, Callable[[], None]] = {
        "kill": lambda: os.kill(pid, signal.SIGKILL),
        "stop": lambda: os.kill(pid, signal.SIGSTOP),
        "page": lambda: overwrite(pid, rng, noticed),
        "word": lambda: overwrite_word(pid, rng),
        "memory": lambda: take_memory(pid),
        "truncate": lambda: cut_off(path, rng),
        "rewrite": lambda: write_over(path, rng),
        "unlink": lambda: path.unlink(),
    }
    actions[kind]()


# --- a round ----------------------------------------------------------------------------------------------------------


class Rounds:
    """All rounds of one kind of fault."""

    def __init__(self, kind: str, folder: Path, model: Path, seed: int, executor: str) -> None:
        self.kind, self.folder, self.model = kind, folder, model
        self.deadline_s = DEADLINES_MS.get(kind, DEADLINE_MS) / 1000
        self.rng = np.random.default_rng(seed)
        self.errors, self.harmless, self.rows, self.seconds = 0, 0, 0, [0.0]
        control().configure(deadline_ms=int(1000 * self.deadline_s))
        self.options = {**OPTIONS, "executor": executor}
        self.references = {}
        for threads in (1, 2):
            with tilebeam.load(model, threads=threads, **self.options) as lm:
                started = time.monotonic()
                self.references[threads] = Reference(lm, (*PASSES, LARGE_PASS) if kind == "memory" else PASSES)
                self.pass_s = time.monotonic() - started
        with tilebeam.load(model, "cpu", n_ctx=1024) as cpu:
            right = cpu.logits(IDS[:96])
        for reference in self.references.values():
            if (distance := np.square(reference.logits[2] - right).mean() / np.square(right).mean()) > 0.01:
                raise Wrong(f"the NPU's logits are not the CPU's: {distance}")

    def run(self, number: int) -> None:
        threads = 1 + number % 2
        reference = self.references[threads]
        path = self.folder / f"victim{number}.gguf"
        shutil.copyfile(self.model, path)
        neighbour = None
        if self.kind in LIVES_ON:
            neighbour = tilebeam.load(self.model, threads=threads, **self.options)
        try:
            with tilebeam.load(path, threads=threads, **self.options) as lm:
                hurt = self._generate(lm, reference, path)
            if neighbour:
                reference.check(neighbour, 0)
                if hurt and control().status()["npu_pid"] != self.pid:
                    raise Wrong("the NPU process did not live on")
            if not path.exists() or self.kind in ("truncate", "rewrite"):
                shutil.copyfile(self.model, path)
            with tilebeam.load(path, threads=threads, **self.options) as again:
                self.rows += reference.check(again, 0)
        finally:
            if neighbour:
                neighbour.close()
        path.unlink()

    def _generate(self, lm: tilebeam.LM, reference: Reference, path: Path) -> bool:
        """Generate until the fault is felt. False: it did no harm."""
        self.pid = int(control().status()["npu_pid"])
        noticed, trouble, done_at = threading.Event(), [], [0.0]
        # Early where the fault is only felt when more memory is needed.
        delay = float(self.rng.uniform(0, self.pass_s * (0.2 if self.kind == "memory" else 1.2)))

        def fault() -> None:
            try:
                time.sleep(delay)
                done_at[0] = time.monotonic()
                do_fault(self.kind, self.pid, path, self.rng, noticed)
            except BaseException as error:
                trouble.append(error)

        thread = threading.Thread(target=fault)
        thread.start()
        try:
            started = time.monotonic()
            while time.monotonic() - started < LONGEST_S:
                over = not thread.is_alive()
                for which in range(len(reference.passes)):
                    self.rows += reference.check(lm, which)
                    if which == 1:
                        self.rows += reference.check_text(lm)
                if over and self.kind in HARMLESS + MAYBE_HARMLESS:
                    self.harmless += 1
                    return False
                if over and self.kind == "memory":
                    raise TooLate  # all the memory that is ever needed was there already
            raise Wrong(f"no error {LONGEST_S} s after the fault {trouble}")
        except NpuError as error:
            self.seconds.append(time.monotonic() - done_at[0])
            if self.kind in HARMLESS or not re.search(CAUSES[self.kind], str(error)):
                raise Wrong(f"the error does not say what happened: {error}") from None
            self.errors += 1
            return True
        finally:
            noticed.set()
            thread.join()
            if trouble:
                raise trouble[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=[*CAUSES, *HARMLESS])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--executor", choices=["process", "thread"], default="process", help="thread: only what is done to the file"
    )
    parser.add_argument("--model", type=Path, help="a GGUF file that may be copied; made if not given")
    args = parser.parse_args()
    if args.executor == "thread" and args.kind not in OF_THE_FILE:
        parser.error(f"{args.kind} would hit this program itself")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = args.model or synth.write_model(folder / "model.gguf", synth.preset("tiny", n_layer=2))
        rounds = Rounds(args.kind, folder, model, args.seed, args.executor)
        before = possessions()
        others = Others(model)
        others.start()
        try:
            for number in range(args.rounds):
                for _ in range(100):
                    with suppress(TooLate):
                        rounds.run(number)
                        break
                else:
                    raise Wrong("the fault comes too late, always")
        finally:
            others.end()
        end = time.monotonic() + LONGEST_S
        while (after := possessions()) != before:  # a thread is joined a moment before the system has forgotten it
            if time.monotonic() > end:
                raise Wrong(f"left behind: {after}, before there was {before}")
            time.sleep(0.01)
    json.dump(
        {
            "kind": args.kind,
            "executor": args.executor,
            "rounds": args.rounds,
            "errors": rounds.errors,
            "harmless": rounds.harmless,
            "deadline_s": rounds.deadline_s,
            "slowest_s": round(max(rounds.seconds), 3),
            "late": sum(s > rounds.deadline_s + 1 for s in rounds.seconds),
            "right_rows": rounds.rows,
            "others": others.rounds,
        },
        sys.stdout,
    )
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
