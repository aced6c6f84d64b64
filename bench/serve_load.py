"""`tilebeam serve` under load: many clients at once, against the engine's own throughput in the same run.

    python -m bench.serve_load [-m MODEL.gguf] [--clients 32] [--minutes 30] [--llama-server PROGRAM]
        [--llama-cpp-server SCRIPT] [--json] [--quick]

A server runs in a process of its own. In turn, clients send it requests (each client the next one as soon as it has an
answer), and `LM.generate` in this process gets the same prompts, seeds and lengths in one call; the other side idles
meanwhile. The ratio is the server's tokens per second over the engine's: what HTTP, JSON and the event loop cost,
with the load generator's own work on the same CPUs. Whole answers and streams are measured apart, and with
--llama-server llama.cpp's server gets the same requests in turn with ours, with --llama-cpp-server the batched one in
llama-cpp-python's examples. With --minutes, the clients first keep the
server busy for that long, every other answer a stream, and a row says how much memory it has from minute to minute.
Requests that failed are counted, not skipped. Without -m it writes a random model with the shape of Qwen2.5-0.5B
(--quick: a small one).
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tilebeam
from tilebeam import LM, SamplingParams

from bench.lib import models, report
from bench.lib.clients import IGNORE_EOS, Answers, Load, Served, ask_all, server
from bench.lib.engines import llama_cpp_server, llama_server_command, never_ending, tilebeam_command
from bench.lib.options import Parser


def mean_batch(before: dict[str, float], after: dict[str, float]) -> float:
    batches, samples = (after[key] - before[key] for key in ("batches", "samples"))
    return round(samples / max(1.0, batches), 2)


def batches_of_server(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    keys = {"batches": "count", "samples": "sum"}
    return {k: float(re.search(rf"tilebeam_batch_samples_{v} (\S+)", text)[1]) for k, v in keys.items()}  # type: ignore[index]


def generate_all(lm: LM, load: Load) -> None:
    prompts, params = [], []
    for i in range(max(map(len, load.requests))):
        for number, asked in enumerate(load.requests):
            if i < len(asked):
                prompts.append(asked[i][0])
                params.append(SamplingParams(max_tokens=asked[i][1], seed=1000 * number + i, ignore_eos=True))
    outputs = lm.generate(prompts, params)
    done = sum(len(s.token_ids) for o in outputs for s in o.outputs)
    assert done == load.tokens, f"{done} tokens instead of {load.tokens}"


def anonymous_mib(pid: int) -> float:
    """Memory of a process that no file backs, MiB: what grows if it leaks."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))) / 1024


async def kept_busy(served: Served, load: Load, minutes: float, answers: Answers) -> list[float]:
    """Keep the server busy, half of it with streams; return its memory from minute to minute."""
    until = time.monotonic() + 60 * minutes
    halves = [Load(load.requests[part::2]) for part in (0, 1)]
    asked = [
        asyncio.create_task(ask_all(served.port, h, bool(stream), answers, until)) for stream, h in enumerate(halves)
    ]
    memory = []
    while time.monotonic() < until:
        await asyncio.sleep(min(60.0, max(0.0, until - time.monotonic())))
        memory.append(round(anonymous_mib(served.pid), 1))
    await asyncio.gather(*asked)
    return memory


def main() -> None:
    p = Parser(__doc__, "a small model, fewer rounds, shorter answers")
    p.add_model()
    p.add_argument("--clients", type=int, default=32)
    p.add_argument("--requests", type=int, default=4, help="of each client")
    p.add_count("--max-tokens", usual=64, quick=32, what="tokens of the longest answer, the shortest has a quarter")
    p.add_argument("--max-prompt", type=int, default=64, help="tokens of the longest prompt, the shortest has 8")
    p.add_argument("-np", "--parallel", type=int, default=16)
    p.add_argument("--minutes", type=float, default=0, help="keep the server busy for so long first")
    p.add_argument(
        "--llama-server", type=Path, metavar="PROGRAM", help="llama-server of a llama.cpp build, to compare with"
    )
    p.add_argument(
        "--llama-cpp-server",
        type=Path,
        metavar="SCRIPT",
        help="examples/server/server.py of llama-cpp-python's source distribution, which also wants the packages "
        "safetensors and websockets, to compare with",
    )
    p.add_argument("--device", default="npu", choices=["npu", "cpu"])
    p.add_threads()
    p.add_rounds(5, 2)
    args = p.parse()
    path = args.model or models.synthetic("small" if args.quick else "bench-0.5b", types={"token_embd": "q8_0"})
    rng = np.random.default_rng(1)
    # llama-server gives each slot an equal part of the cells.
    cells = max(8192, args.parallel * (args.max_prompt + args.max_tokens))
    same = ["-c", str(cells), "-np", str(args.parallel), "-t", str(args.threads)]
    ours = [*tilebeam_command(path), "--device", args.device]
    rows = report.Rows("serve_load", args.json)
    failures: list[str] = []
    with ExitStack() as stack:
        options = {"n_ctx": cells, "n_seq_max": args.parallel, "threads": args.threads, "lookup": False}
        lm = stack.enter_context(tilebeam.load(path, args.device, **options))
        served = stack.enter_context(server([*ours, "--max-queue", str(max(args.clients, 64)), *same]))

        def tokens(count: int) -> list[int]:
            return [int(t) for t in rng.integers(lm.n_vocab // 2, lm.n_vocab, count)]

        def request() -> tuple[list[int], int]:
            n = int(rng.integers(max(1, args.max_tokens // 4), args.max_tokens + 1))
            return tokens(int(rng.integers(8, args.max_prompt))), n

        load = Load([[request() for _ in range(args.requests)] for _ in range(args.clients)])
        if args.minutes:
            answers, began = Answers(), time.monotonic()
            memory = asyncio.run(kept_busy(served, load, args.minutes, answers))
            minutes = (time.monotonic() - began) / 60
            failures += answers.failures
            done = {"failed": len(answers.failures), "requests": len(answers.seconds), "minutes": round(minutes, 1)}
            rows.add(
                report.figures(
                    f"{args.clients} clients, kept busy",
                    memory[0],
                    memory[-1],
                    "MiB",
                    [memory[-1] / memory[0]],
                    None,
                    memory=memory,
                    **done,
                ),
                f"memory {memory[0]} MiB after a minute, {memory[-1]} at the end, {max(memory)} at most; "
                f"{done['failed']} of {done['requests']} requests failed in {done['minutes']} minutes",
            )

        def asked(
            port: int, stream: bool, answers: Answers, fields: Mapping[str, Any] = IGNORE_EOS
        ) -> Callable[[], None]:
            return lambda: asyncio.run(ask_all(port, load, stream, answers, fields=fields))

        def compared(name: str, stream: bool, other: Callable[[], object]) -> None:
            answers = Answers()
            before = batches_of_server(served.port)
            pairs = report.interleave(asked(served.port, stream, answers), other, args.rounds, 0.0)
            more: dict[str, Any] = {"failed": len(answers.failures), "requests": len(answers.seconds)}
            more |= {"median_seconds": round(median(answers.seconds), 4), "max_seconds": round(max(answers.seconds), 4)}
            more["mean_batch"] = mean_batch(before, batches_of_server(served.port))
            failures.extend(answers.failures)
            rows.add(
                report.row(f"{args.clients} clients, {name}", pairs, load.tokens, "tokens/s", **more),
                f"{more['failed']} of {more['requests']} requests failed, {more['median_seconds']} s each (median), "
                f"{more['mean_batch']} samples per batch",
            )

        compared("whole answers", False, lambda: generate_all(lm, load))
        compared("streams", True, lambda: generate_all(lm, load))
        if args.llama_server:
            theirs = llama_server_command(args.llama_server, path, args.threads)
            peer, answers = stack.enter_context(server([*theirs, *same])), Answers()
            compared("whole answers, against llama-server", False, asked(peer.port, False, answers))
            failures += answers.failures
        if args.llama_cpp_server:
            started = llama_cpp_server(args.llama_cpp_server, path, args.threads, args.parallel, cells)
            peer, answers = stack.enter_context(started), Answers()
            ask = asked(peer.port, False, answers, never_ending(lm))
            compared("whole answers, against llama-cpp-python's batched server", False, ask)
            failures += answers.failures
    rows.finish()
    if failures:
        sys.exit(f"requests failed: {failures[:6]}")


if __name__ == "__main__":
    report.start(main)
