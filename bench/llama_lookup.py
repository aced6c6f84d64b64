"""`llama_cpp.Llama` with its own guesses (`LlamaPromptLookupDecoding`), on the NPU and on the stock backend.

    python -m bench.llama_lookup -m MODEL.gguf [--only edit,chat] [--gsm8k FILE] [--humaneval FILE] [--guesses 10]
        [-n 128] [--items 2] [-t 2] [-r 3] [--json] [--quick] [--resume FILE --seconds S]

Programs that use llama-cpp-python's token loop keep it after `tilebeam.register()`; this measures what its guesses
bring them there. A round generates each text greedily four times: on the NPU without and with guesses, and on the stock
backend without and with them. The prompt is decoded before the clock starts. "same" is the share of texts with guesses
that are the texts without, on the NPU.

With a draft model `Llama` computes and copies the logits of every position that it decodes, the prompt's too
(`logits_all`). `bench.speculation` measures Tilebeam's own engine, which computes those that it draws from.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import llama_cpp
import tilebeam
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from tilebeam.cli import console

from bench.lib import guessing_tasks, limits, models, report, rounds
from bench.lib.options import Parser
from bench.lib.rounds import Rounds
from bench.speculation import FILES, Prompts

OWN = (*guessing_tasks.REPEATING, *guessing_tasks.OTHER)
SIDES = ("look-up", "plain", "stock look-up", "stock plain")


def generated(llm: llama_cpp.Llama, prompt: list[int], n_gen: int) -> tuple[list[int], float]:
    """The tokens of a greedy text, and the seconds that they took without the prompt's."""
    first = next(llm.generate(prompt, temp=0))  # its tokens are in the cache now, up to the last
    started = time.perf_counter()
    tokens = list(itertools.islice(llm.generate(prompt, temp=0), n_gen))
    took = time.perf_counter() - started
    if tokens[0] != first:
        raise RuntimeError("llama_cpp.Llama generated two texts for one prompt: T = 0 should give one")
    return tokens, took


class Sides:
    """The four of them."""

    def __init__(self, path: Path, n_ctx: int, o: argparse.Namespace) -> None:
        self._path, self._n_ctx, self._o = path, n_ctx, o
        self._stock = {name: self._llama(name, 0) for name in SIDES if "stock" in name}
        tilebeam.register()
        self.llamas = {name: self._llama(name, -1) for name in SIDES if "stock" not in name} | self._stock

    def _llama(self, name: str, layers: int) -> llama_cpp.Llama:
        draft = LlamaPromptLookupDecoding(num_pred_tokens=self._o.guesses) if "look-up" in name else None
        return llama_cpp.Llama(
            str(self._path),
            n_ctx=self._n_ctx,
            n_threads=self._o.threads,
            n_threads_batch=self._o.threads,
            n_gpu_layers=layers,
            flash_attn=True,
            draft_model=draft,
            logits_all=draft is not None,  # with a draft model alone, llama-cpp-python keeps logits of n_batch tokens
            verbose=False,
        )

    def close(self) -> None:
        """Free the models."""
        for llm in self.llamas.values():
            llm.close()


def prompts_of(path: Path, o: argparse.Namespace) -> dict[str, list[list[int]]]:
    """The tokens of all tasks' prompts."""
    files = {name: getattr(o, name) for name in FILES if getattr(o, name)}
    with tilebeam.load(path, "cpu", n_ctx=256, n_seq_max=1, threads=1, lookup=False) as lm:
        prompts = Prompts(lm, files)
        items = {task: 1 if task in guessing_tasks.REPEATING else o.items for task in o.tasks}
        return {task: [prompts.ids(task, i) for i in range(n)] for task, n in items.items()}


def measure(sides: Sides, prompts: dict[str, list[list[int]]], n_gen: int, wanted: int, log: Rounds) -> None:
    """Rounds of all tasks until each has as many as wanted, or the time is over."""
    with console.bar("llama_lookup") as progress:
        bar = progress.add_task("", total=wanted * len(prompts), note="")
        for task in log.turns(prompts, wanted):
            progress.update(bar, description=task)
            log.end(**_round(sides, prompts[task], n_gen))
            progress.update(bar, advance=1)


def _round(sides: Sides, prompts: list[list[int]], n_gen: int) -> dict[str, float]:
    """Seconds per token of all sides."""
    figures: dict[str, float] = {}
    texts: dict[str, list[list[int]]] = {}
    for side, llm in sides.llamas.items():
        outputs = [generated(llm, prompt, n_gen) for prompt in prompts]
        texts[side] = [tokens for tokens, _ in outputs]
        figures[side] = sum(took for _, took in outputs) / sum(len(tokens) for tokens, _ in outputs)
        time.sleep(0.2)  # the stock backend's threads spin for a while after a run
    same = [a == b for a, b in zip(texts["look-up"], texts["plain"], strict=True)]
    return figures | {"same": sum(same) / len(same)}


def options() -> argparse.Namespace:
    """Of the command line."""
    p = Parser(__doc__, "a tiny model, fewer tokens, one round")
    p.add_model()
    p.add_argument("--only", metavar="TASKS", help="of " + ", ".join((*OWN, *FILES)))
    for name in FILES:
        p.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"JSON lines of {name}, for the task of that name")
    p.add_argument("--guesses", type=int, default=10, metavar="N", help="num_pred_tokens (default 10)")
    p.add_threads()
    p.add_count("-n", "--n-gen", usual=128, quick=16, what="tokens of a text")
    p.add_count("--items", usual=2, quick=1, what="prompts of chat and of files")
    p.add_rounds(3, 1)
    rounds.add_options(p)
    o: argparse.Namespace = p.parse()
    have = [task for task in (*OWN, *FILES) if task in OWN or getattr(o, task)]
    o.tasks = o.only.split(",") if o.only else (["chat"] if o.quick else have)
    if unknown := set(o.tasks) - set(have):
        p.error(f"--only: {', '.join(sorted(unknown))} is not among {', '.join(have)}")
    o.model = o.model or models.synthetic("tiny" if o.quick else "bench-1.4b")
    return o


def main() -> None:
    """Measure and print."""
    o = options()
    setting = {"bench": "llama_lookup", "model": o.model.name, "n": o.n_gen, "threads": o.threads}
    setting |= {"items": o.items, "guesses": o.guesses}
    log, rows = Rounds(o.resume, setting, o.seconds), report.Rows("llama_lookup", o.json)
    prompts = prompts_of(o.model, o)
    n_ctx = max(len(ids) for each in prompts.values() for ids in each) + o.n_gen + o.guesses + 16
    with ExitStack() as stack:
        sides = Sides(o.model, n_ctx, o)
        stack.callback(sides.close)
        measure(sides, prompts, o.n_gen, o.rounds, log)
    for task in (t for t in prompts if t in log):
        more: dict[str, Any] = {s: round(1 / log.median(task, s), 3) for s in SIDES if "stock" in s}
        more["same"] = log.median(task, "same")
        row = log.row(task, 1, "tokens/s", ours="look-up", baseline="plain", **more)
        rows.add(row, "stock {stock look-up:.1f} of {stock plain:.1f}; texts alike: {same:.0%}".format(**more))
    rows.finish({}, f"{limits.machine()['cpu']}, {o.threads} threads")
    if note := log.note():
        print(note, file=sys.stderr)


if __name__ == "__main__":
    report.start(main)
