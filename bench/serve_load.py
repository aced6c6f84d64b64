"""`tilebeam serve` under load: many clients at once, against the engine's own throughput in the same run.

    python -m bench.serve_load [-m MODEL.gguf] [--clients 32] [--json] [--quick]

A server runs in a process of its own. In turn, clients send it requests (each client the next one as soon as it has an
answer), and `LM.generate` in this process gets the same prompts, seeds and lengths in one call; the other side idles
meanwhile. The ratio is the server's tokens per second over the engine's: what HTTP, JSON and the event loop cost,
with the load generator's own work on the same CPUs. Whole answers and streams are measured apart. Requests that failed
are counted, not skipped. Without -m it writes a random model with the shape of Qwen2.5-0.5B (--quick: a small one).
"""

from __future__ import annotations

import asyncio
import re
import sys
import urllib.request
from statistics import median
from typing import Any

import numpy as np
import tilebeam
from tilebeam import LM, SamplingParams

from bench.lib import models, report
from bench.lib.clients import Answers, Load, ask_all, server
from bench.lib.options import Parser


def mean_batch(before: dict[str, float], after: dict[str, float]) -> float:
    """Samples per batch between two looks."""
    batches, samples = (after[key] - before[key] for key in ("batches", "samples"))
    return round(samples / max(1.0, batches), 2)


def batches_of_server(port: int) -> dict[str, float]:
    """What /metrics says of batches so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    keys = {"batches": "count", "samples": "sum"}
    return {k: float(re.search(rf"tilebeam_batch_samples_{v} (\S+)", text)[1]) for k, v in keys.items()}  # type: ignore[index]


def batches_of(lm: LM) -> dict[str, float]:
    """The same of a model in this process."""
    sizes = lm.figures().batches
    return {"batches": float(sum(sizes.values())), "samples": float(sum(k * n for k, n in sizes.items()))}


def generate_all(lm: LM, load: Load) -> None:
    """The same, by the engine alone."""
    prompts, params = [], []
    for i in range(max(map(len, load.prompts))):
        for number, asked in enumerate(load.prompts):
            if i < len(asked):
                prompts.append(asked[i])
                params.append(SamplingParams(max_tokens=load.max_tokens, seed=1000 * number + i, ignore_eos=True))
    outputs = lm.generate(prompts, params)
    done = sum(len(s.token_ids) for o in outputs for s in o.outputs)
    assert done == load.tokens, f"{done} tokens instead of {load.tokens}"


def main() -> None:
    """Measure and print."""
    p = Parser(__doc__, "a small model, fewer rounds, shorter answers")
    p.add_model()
    p.add_argument("--clients", type=int, default=32)
    p.add_argument("--requests", type=int, default=4, help="of each client")
    p.add_count("--max-tokens", usual=64, quick=32, what="tokens of each answer")
    p.add_argument("-np", "--parallel", type=int, default=16)
    p.add_argument("--device", default="npu", choices=["npu", "cpu"])
    p.add_threads()
    p.add_rounds(5, 2)
    args = p.parse()
    path = args.model or models.synthetic("small" if args.quick else "bench-0.5b", types={"token_embd": "q8_0"})
    rng = np.random.default_rng(1)
    cells = 8192
    options = ["--no-cache-prompt", "--no-speculation", "-c", str(cells), "-np", str(args.parallel)]
    options += ["-t", str(args.threads), "--device", args.device]
    rows = report.Rows("serve_load", args.json)
    failures: list[str] = []
    with (
        tilebeam.load(
            path, args.device, n_ctx=cells, n_seq_max=args.parallel, threads=args.threads, lookup=False
        ) as lm,
        server([sys.executable, "-m", "tilebeam", "serve", "-m", str(path), *options]) as port,
    ):

        def tokens(count: int) -> list[int]:
            return [int(t) for t in rng.integers(lm.n_vocab // 2, lm.n_vocab, count)]

        prompts = [[tokens(int(rng.integers(8, 64))) for _ in range(args.requests)] for _ in range(args.clients)]
        load = Load(prompts, args.max_tokens)
        for stream in (False, True):
            answers = Answers()
            before, before_engine = batches_of_server(port), batches_of(lm)
            pairs = report.interleave(
                lambda s=stream, a=answers: asyncio.run(ask_all(port, load, s, a)),  # type: ignore[misc]
                lambda: generate_all(lm, load),
                args.rounds,
                0.0,
            )
            name = f"{args.clients} clients, {'streams' if stream else 'whole answers'}"
            more: dict[str, Any] = {"failed": len(answers.failures), "requests": len(answers.seconds)}
            more |= {"median_seconds": round(median(answers.seconds), 4), "max_seconds": round(max(answers.seconds), 4)}
            more["mean_batch"] = mean_batch(before, batches_of_server(port))
            more["mean_batch_engine"] = mean_batch(before_engine, batches_of(lm))
            failures += answers.failures
            rows.add(
                report.row(name, pairs, load.tokens, "tokens/s", **more),
                f"{more['failed']} of {more['requests']} requests failed, {more['median_seconds']} s each (median), "
                f"{more['mean_batch']} samples per batch (engine: {more['mean_batch_engine']})",
            )
    rows.finish()
    if failures:
        sys.exit(f"requests failed: {failures[:6]}")


if __name__ == "__main__":
    report.start(main)
