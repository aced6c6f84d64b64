"""Tilebeam beside other engines on the same files, prompts and samples: how fast prompts are read and samples decoded.

    python -m bench.peers -m MODEL.gguf [-m ..] [--ik-llama PROGRAM] [--llama-server PROGRAM] [--openvino [PYTHON]]
        [-t 1,2] [-npl 1,4,8,16] [-p 128] [--shared 512] [-n 48] [-r 5] [--json] [--quick]
        [--resume FILE --seconds S]

Each round gives the same work to all engines, one after the other, while the others idle: prompts of random tokens (-p
for each sample, --shared for all samples together), n tokens behind each, at temperature 0.8, top_k 40, top_p 0.95,
with batches of 512. A row compares Tilebeam with one of them:

* stock: llama.cpp's CPU backend as llama-cpp-python has it, under Tilebeam's scheduler.
* ik_llama.cpp: llama-batched-bench of a build, with -rtr; it samples nothing, and loads the model each time.
* OpenVINO GenAI, in a Python that has it (pip install openvino-genai openvino-tokenizers): continuous batching as it
  comes, which is with 8 bits a value in the KV cache. It does not read every type of GGUF.
* llama-server, against `tilebeam serve`: each sample is a client's request, all at once.

"read" is the time until every sample has its first token, of an engine that does not tell it by a run with one token;
"decode" is the rest. An engine that fails on a file is named, and the others go on. Without -m it writes a random model
with the shapes of Qwen2.5-0.5B (--quick: a small one).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tilebeam.cli.bench import numbers

from bench.lib import engines, models, report, rounds
from bench.lib.batched_bench import BatchedBench
from bench.lib.engines import Engine, Work
from bench.lib.options import Parser
from bench.lib.rounds import Rounds

OURS, SERVE = "Tilebeam", "tilebeam serve"
STOCK, IK, OPENVINO, LLAMA_SERVER = "stock", "ik_llama.cpp", "OpenVINO GenAI", "llama-server"
# Whom each is compared with.
AGAINST = {STOCK: OURS, IK: OURS, OPENVINO: OURS, LLAMA_SERVER: SERVE}
PHASES = ("read", "decode")


@dataclass(frozen=True)
class Peers:
    """Which engines there are besides the stock backend; None: not that one."""

    ik_llama: Path | None = None
    llama_server: Path | None = None
    openvino: str | None = None

    def names(self) -> list[str]:
        given = {IK: self.ik_llama, OPENVINO: self.openvino, LLAMA_SERVER: self.llama_server}
        return [STOCK, *(name for name, value in given.items() if value is not None)]


@dataclass
class Group:
    """What is loaded together: a file, and a number of threads.

    Attributes:
        failed: engines that cannot do it, and why.
    """

    model: Path
    threads: int
    works: tuple[Work, ...]
    failed: dict[str, str] = field(default_factory=dict)

    def label(self, work: Work) -> str:
        return f"{self.model.stem}, {work.name}, {self.threads} thread{'s' if self.threads > 1 else ''}"

    def labels(self) -> Iterator[str]:
        return map(self.label, self.works)

    def open(self, stack: ExitStack, peers: Peers) -> dict[str, Engine]:
        works, threads = self.works, self.threads
        first = stack.enter_context(engines.loaded(self.model, "npu", threads, works))
        found: dict[str, Engine] = {OURS: engines.in_process(first)}
        vocab = first.n_vocab
        others: dict[str, Callable[[], AbstractContextManager[Engine]]] = {}
        others[STOCK] = partial(engines.stock, self.model, threads, works)
        if peers.ik_llama is not None:
            found[IK] = engines.program(BatchedBench(peers.ik_llama, ("-rtr",)), self.model, threads)
        if (python := peers.openvino) is not None:
            others[OPENVINO] = partial(engines.openvino, python, self.model, threads, works, vocab)
        if (program := peers.llama_server) is not None:
            commands = {SERVE: engines.tilebeam_command(self.model)}
            commands[LLAMA_SERVER] = engines.llama_server_command(program, self.model, threads)
            for name, command in commands.items():
                others[name] = partial(engines.server_of, command, threads, works, vocab)
        for name, opened in others.items():
            try:
                found[name] = stack.enter_context(opened())
            except (RuntimeError, OSError) as error:
                self.failed[name] = f"does not load it: {error}"
        warm = Work(min(2, max(w.n_parallel for w in works)), 8, 2)
        for name in list(found):
            self._run(found, name, warm, 0)
        return found

    def measure(self, found: dict[str, Engine], log: Rounds, wanted: int) -> bool:
        """Measure rounds until each case has as many as wanted; False if the time was over before."""
        by_label = dict(zip(self.labels(), self.works, strict=True))
        for seed, label in enumerate(log.turns(by_label, wanted), 1):
            work = by_label[label]
            figures: dict[str, float] = {}
            for name in list(found):
                took = self._run(found, name, work, seed)
                # A time below zero is a difference of two runs that noise turned round.
                figures |= {f"{name}, {phase}": t for phase, t in zip(PHASES, took, strict=False) if t > 0}
            log.end(**figures)
        return log.fewest(by_label) >= wanted

    def _run(self, found: dict[str, Engine], name: str, work: Work, seed: int) -> tuple[float, ...]:
        """One engine's phases; none of one that fails, which is not asked again."""
        try:
            return found[name](work, seed)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            if name == OURS:
                raise
            self.failed[name] = f"failed at {work.name}: {error}"
            del found[name]
            return ()


def rows_of(groups: list[Group], log: Rounds, peers: Peers) -> list[dict[str, Any]]:
    """Make a row for each case, phase and peer that has rounds."""
    rows = []
    for group in groups:
        for work in group.works:
            label = group.label(work)
            for phase, tokens in zip(PHASES, (work.prompt_tokens, work.decoded_tokens), strict=True):
                for peer in peers.names():
                    ours, theirs = f"{AGAINST[peer]}, {phase}", f"{peer}, {phase}"
                    if not log.measured(label, ours, theirs):
                        continue
                    title = f"{label}, {phase}: {AGAINST[peer]} to {peer}"
                    more = {"peer": peer, "phase": phase, "n_parallel": work.n_parallel, "threads": group.threads}
                    rows.append(log.row(label, tokens, "tokens/s", ours=ours, baseline=theirs, title=title, **more))
    return rows


def main() -> None:
    p = Parser(__doc__, "a small model, fewer rounds, shorter samples")
    p.add_argument("-m", "--model", type=Path, action="append", default=[], help="GGUF file; may be repeated")
    p.add_argument("--ik-llama", type=Path, metavar="PROGRAM", help="llama-batched-bench of an ik_llama.cpp build")
    p.add_argument("--llama-server", type=Path, metavar="PROGRAM", help="llama-server of a llama.cpp build")
    p.add_argument(
        "--openvino", nargs="?", const=sys.executable, metavar="PYTHON", help="one with OpenVINO GenAI (default: this)"
    )
    p.add_thread_counts()
    p.add_argument("-npl", "--n-parallel", default="1,4,8,16", help="samples at once")
    p.add_argument("-p", "--n-prompt", default="128", help="tokens of each sample's own prompt; 0: none such")
    p.add_argument("--shared", default="512", help="tokens of a prompt that all samples share; 0: none such")
    p.add_count("-n", "--n-gen", usual=48, quick=8, what="tokens of each sample")
    p.add_rounds(5, 2)
    rounds.add_options(p)
    a = p.parse()
    counts = numbers(a.n_parallel, "-npl")
    lengths = {
        shared: numbers(text, name) for shared, text, name in ((False, a.n_prompt, "-p"), (True, a.shared, "--shared"))
    }
    works = [
        Work(n, length, a.n_gen, shared)
        for shared in (False, True)
        for length in lengths[shared]
        if length
        for n in counts
    ]
    # One sample of a prompt of its own is the same work as one of a shared prompt.
    works = [w for w in works if not (w.shared and w.n_parallel == 1 and w.n_prompt in lengths[False])]
    if not works or min(min(w.n_parallel, w.n_prompt) for w in works) < 1 or a.n_gen < 2:
        p.error("there is nothing to measure: -npl and -p or --shared must be 1 or more, -n 2 or more")
    threads = p.thread_counts(a)
    files = a.model or [models.synthetic("small" if a.quick else "bench-0.5b")]
    peers = Peers(a.ik_llama, a.llama_server, a.openvino)
    setting = {"bench": "peers", "models": [path.name for path in files], "n_gen": a.n_gen, "peers": peers.names()}
    log = Rounds(a.resume, setting, a.seconds)
    groups = [Group(path, n, tuple(works)) for path in files for n in threads]
    for group in sorted(groups, key=lambda g: log.fewest(g.labels())):
        if log.fewest(group.labels()) >= a.rounds:
            continue
        with ExitStack() as stack:
            found = group.open(stack, peers)
            if not group.measure(found, log, a.rounds):
                break
    table = report.Rows("peers", a.json)
    for row in rows_of(groups, log, peers):
        table.add(row)
    table.finish()
    for group in groups:
        for name, why in group.failed.items():
            print(f"{group.model.name}, {name}: {why}", file=sys.stderr)
    log.warn()


if __name__ == "__main__":
    report.start(main)
