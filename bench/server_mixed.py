"""`tilebeam serve` under requests of several kinds at once: what readers cost those that generate, and whether every
answer is its question's.

    python -m bench.server_mixed [-m MODEL.gguf] [--clients 64] [--minutes 6] [--embeddings 6] [-r 3] [--seed 1]
        [--json] [--quick]
    python -m bench.server_mixed --storm --minutes 20

Clients send a server in a process of its own one request after the other: answers of 20 to 160 tokens, a tenth of one
token. In turn with that, some of them (--embeddings, in percent) ask for embeddings instead, which read the model
between two steps of the others. The first row compares the engine's tokens per second, with embeddings over without.
The second has the 99th percentile of the seconds that a one-token request takes beside embeddings; its ratio is three
medians over that, so 1 and above is the target.

With --storm there is one phase with all kinds of requests: texts held to patterns with a constant of their own, samples
and searches with a reward head on the model's own hidden states, embeddings, reranking, and scored prompts.
Every answer is checked (bench/lib/mixed_requests.py); the row counts those that were right.

A request that is not answered within three minutes, or wrongly, is a failure; failures end the program with status 1.
Without -m it writes a random model with the shape of Qwen2.5-0.5B and a classifier (--quick: a tiny one); the
head is random, too. Reranking is left out for a model whose file does not say that it ranks.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tilebeam
from tilebeam.scoring.reward_heads import save_head

from bench.lib import models, report
from bench.lib.clients import post, server
from bench.lib.mixed_requests import Asked, Offer, Questions
from bench.lib.options import Parser
from bench.scoring import random_head

TIMEOUT = 180.0  # seconds
_LONGEST = 160  # tokens of an answer
_ONE_TOKEN = 10.0  # percent of the requests
# Of a storm, in percent; those that a server cannot be asked are left out.
_STORM = {
    "plain": 20.0,
    "one token": 10.0,
    "own constant": 30.0,
    "forced": 12.0,
    "embeddings": 6.0,
    "echo": 8.0,
    "rerank": 6.0,
    "search": 8.0,
}


@dataclass
class Told:
    """What came of the requests of a phase.

    Attributes:
        seconds: of each, by kind.
        failures: what was wrong, one line each.
        tokens_per_second: that the engine drew.
    """

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    failures: list[str] = field(default_factory=list)
    tokens_per_second: float = 0.0

    @property
    def requests(self) -> int:
        return sum(map(len, self.seconds.values()))

    def by_kind(self) -> dict[str, Any]:
        """For each kind how many, and the median and the longest seconds."""
        told = {k: [len(s), round(median(s), 3), round(max(s), 3)] for k, s in sorted(self.seconds.items())}
        return {"kinds": told, "requests": self.requests, "failed": len(self.failures)}


def tokens_drawn(port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return float(re.search(r"tilebeam_batch_samples_sum (\S+)", answer.read().decode())[1])  # type: ignore[index]


def ask(port: int, path: str, body: Mapping[str, Any]) -> Any:
    head = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        return json.load(answer)


async def wrong_about(port: int, asked: Asked, streams: list[Any]) -> str | None:
    """Return what is wrong about the answer to a request; None: nothing.

    Args:
        streams: of an open connection, which is replaced where it was closed.
    """
    try:
        if not streams:
            streams[:] = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        fine, text = await asyncio.wait_for(post(*streams, asked.path, asked.body), TIMEOUT)
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        for writer in streams[1:]:
            writer.close()
        streams.clear()
        return f"{type(error).__name__}: {error}"
    if not fine:
        return text.decode(errors="replace")
    try:
        return asked.wrong(json.loads(text))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        return f"{type(error).__name__} in {text[:300]!r}: {error}"


async def phase(
    port: int, questions: Questions, shares: Mapping[str, float], clients: int, seconds: float, seed: int
) -> Told:
    """All clients at once for so long, and what came back.

    Args:
        shares: of kinds of requests, in percent.
        seed: of what they ask.
    """
    told, kinds = Told(), questions.kinds()
    names = [name for name in shares if name in kinds]
    chances = np.array([shares[name] for name in names])
    until = time.monotonic() + seconds

    async def client(number: int) -> None:
        rng, streams = np.random.default_rng([seed, number]), list[Any]()
        while time.monotonic() < until:
            name = names[rng.choice(len(names), p=chances / chances.sum())]
            asked = kinds[name](rng)
            began = time.monotonic()
            wrong = await wrong_about(port, asked, streams)
            told.seconds[name].append(time.monotonic() - began)
            if wrong:
                told.failures.append(f"{name}: {wrong}")
        for writer in streams[1:]:
            writer.close()

    before = await asyncio.to_thread(tokens_drawn, port)
    asking = [asyncio.create_task(client(i)) for i in range(clients)]
    await asyncio.sleep(seconds)
    told.tokens_per_second = (await asyncio.to_thread(tokens_drawn, port) - before) / seconds
    await asyncio.gather(*asking)
    return told


def short_row(told: Told) -> dict[str, Any]:
    seconds = told.seconds["one token"]
    limit, slowest = 3 * median(seconds), float(np.percentile(seconds, 99))
    name = "one token, 99th percentile to 3 medians"
    more = {"median_seconds": round(limit / 3, 4), "requests": len(seconds)}
    return report.figures(name, round(limit, 4), round(slowest, 4), "s", [limit / slowest], None, **more)


def compared(port: int, questions: Questions, args: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Phases with and without embeddings in turn; rows and failures."""
    seconds = 30 * args.minutes / args.rounds
    without, beside = [Told() for _ in range(args.rounds)], Told()
    speeds: list[float] = []
    for i in range(args.rounds):
        rest = 100 - _ONE_TOKEN
        shares = {"plain": rest, "one token": _ONE_TOKEN}
        without[i] = asyncio.run(phase(port, questions, shares, args.clients, seconds, args.seed + i))
        shares |= {"plain": rest - args.embeddings, "embeddings": args.embeddings}
        now = asyncio.run(phase(port, questions, shares, args.clients, seconds, args.seed + i))
        speeds.append(now.tokens_per_second)
        beside.failures += now.failures
        for name, found in now.seconds.items():
            beside.seconds[name] += found
    others = [one.tokens_per_second for one in without]
    row = report.figures(
        f"{args.clients} clients, {args.embeddings:g} % embeddings",
        round(median(others), 2),
        round(median(speeds), 2),
        "tokens/s",
        [a / b for a, b in zip(speeds, others, strict=True)],
        None,
        minutes=args.minutes,
        seed=args.seed,
        **beside.by_kind(),
    )
    return [row, short_row(beside)], [f for one in (*without, beside) for f in one.failures]


def stormed(port: int, questions: Questions, args: Any) -> tuple[list[dict[str, Any]], list[str]]:
    told = asyncio.run(phase(port, questions, _STORM, args.clients, 60 * args.minutes, args.seed))
    right = told.requests - len(told.failures)
    speed = round(told.tokens_per_second, 2)
    row = report.figures(
        f"{args.clients} clients, all kinds",
        told.requests,
        right,
        "requests",
        [right / told.requests],
        None,
        minutes=args.minutes,
        seed=args.seed,
        tokens_per_second=speed,
        **told.by_kind(),
    )
    return [row, short_row(told)], told.failures


def main() -> None:
    p = Parser(__doc__, "a tiny model, a few seconds, 8 clients")
    p.add_model()
    p.add_argument("--storm", action="store_true", help="all kinds of requests")
    p.add_count("--clients", usual=64, quick=8, what="that ask at the same time")
    p.add_argument("--minutes", type=float, help="of all phases together (default 6, 0.1 with --quick)")
    p.add_argument("--embeddings", type=float, default=6, metavar="PERCENT", help="of the requests (default 6)")
    p.add_argument("-np", "--parallel", type=int, default=16)
    p.add_argument("-c", "--ctx-size", type=int, default=8192)
    p.add_argument("--device", default="npu", choices=["npu", "cpu"])
    p.add_argument("--seed", type=int, default=1, help="of what is asked")
    p.add_threads()
    p.add_rounds(3, 1)
    args = p.parse()
    args.minutes = args.minutes or (0.1 if args.quick else 6.0)
    path = args.model or models.synthetic("tiny" if args.quick else "bench-0.5b", arch="qwen3", labels=("yes", "no"))
    command = [sys.executable, "-m", "tilebeam", "serve", "-m", str(path), "--device", args.device]
    command += ["-c", str(args.ctx_size), "-np", str(args.parallel), "-t", str(args.threads)]
    command += ["--max-queue", str(8 * args.clients)]
    rows = report.Rows("server_mixed", args.json)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with tilebeam.load(path, args.device, n_ctx=64, n_seq_max=1, threads=args.threads) as lm:
            offer = Offer(lm.n_vocab, args.storm and lm.info.pooling == "rank", args.storm)
            save_head(folder / "head.gguf", random_head(lm))
        if args.storm:
            command += ["--reward-head", str(folder / "head.gguf")]
        port = stack.enter_context(server(command)).port
        questions = Questions(lambda to, body: ask(port, to, body), offer, _LONGEST)
        found, failures = (stormed if args.storm else compared)(port, questions, args)
        for row in found:
            rows.add(row)
    rows.finish()
    if failures:
        sys.exit(f"{len(failures)} requests failed: {failures[:6]}")


if __name__ == "__main__":
    report.start(main)
