"""Guessing tokens ahead against plain decoding and the stock backend: tokens per second, and what was right, by task.

    python -m bench.speculation -m MODEL.gguf [--draft SMALL.gguf] [--head HEAD.gguf] [--only edit,chat] [-npl 1,4]
        [--temps 0,0.7] [-t 2] [-n 128] [--gsm8k FILE] [--humaneval FILE] [--summaries FILE]
        [--sources look-up,draft,head] [--no-stock] [--peer "PROGRAM [OPTIONS]"] [--llama 0,10]
        [--json] [--quick] [--resume FILE --seconds S]

Each round generates the same texts plainly, with look-up, with --draft by the draft model, with --head by look-up and
the draft head, and on the stock CPU backend, one after the other. The clock runs over the whole call without its
prompt, which stays in the cache (`usage.decode_seconds`, `drafting_seconds` and `sampling_seconds`); what the draft
model reads of a prompt counts. Nothing is remembered of earlier rounds' texts. "same" is the share of sources whose
texts were all the plain ones.
Tasks:

* edit: a text of code to be written again with one name changed; extract: fields of records as JSON; quotes: a question
  answered with sentences of a text of 1000 tokens. What they ask for stands in the prompt.
* chat, talk: questions that have nothing to copy, of one kind and of twenty kinds; gsm8k, humaneval: problems of
  files; summaries: of paragraphs of WikiText's raw text.
* noise: random tokens at T = 3, of which no guess is right. What guessing costs in vain: no ratio below 0.97.

At T = 0 `-npl 4` decodes four prompts, else four samples of a prompt, which read each other's texts: what best-of-4
and a vote of 4 decode. One sequence goes through --items prompts, one after the other. --peer runs another engine's
program (lib/speculative_program.py) on the same prompts where one sequence is decoded at T = 0, --llama
`llama_cpp.Llama` with its own look-up of so many guesses, on the NPU and on the stock backend (0: without guesses).

Without -m it writes a random model (--quick: a tiny one), on which guesses are right by chance only.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tilebeam import LM, Prompt, RequestOutput, SamplingParams, TilebeamError, load
from tilebeam.cli.bench import numbers
from tilebeam.engine.speculation import MOST_WITH_HEAD, Speculation
from tilebeam.outputs import Usage

from bench.lib import guessing_tasks, limits, models, report, rounds
from bench.lib.options import Parser
from bench.lib.rounds import Rounds
from bench.lib.speculative_program import LlamaLookup, SpeculativeProgram

OWN = (*guessing_tasks.REPEATING, *guessing_tasks.OTHER, "noise")
FILES = ("gsm8k", "humaneval", "summaries")
SOURCES = ("look-up", "draft", "head")
_NOISE = 64  # tokens of its prompts


@dataclass(frozen=True)
class Case:
    """What is generated in one round: a task, for how many sequences, at which temperature."""

    task: str
    n: int
    temperature: float

    @property
    def name(self) -> str:
        what = ("prompt" if self.temperature == 0 else "sample") + ("s" if self.n > 1 else "")
        return f"{self.task}, {self.n} {what}, T = {self.temperature:g}"

    def calls(self, items: int) -> list[range]:
        """Return the numbers of the prompts of each call: all sequences of a call decode together."""
        if self.task in guessing_tasks.REPEATING or self.task == "noise":
            items = 1
        each = self.n if self.temperature == 0 else 1
        return [range(first * each, (first + 1) * each) for first in range(max(1, items // self.n))]

    def params(self, n_gen: int) -> SamplingParams:
        noise: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "ignore_eos": True} if self.task == "noise" else {}
        samples = 1 if self.temperature == 0 else self.n
        return SamplingParams(n=samples, temperature=self.temperature, max_tokens=n_gen, seed=1, **noise)


def cases(tasks: Iterable[str], sequences: list[int], temperatures: list[float]) -> list[Case]:
    return [Case(t, n, temp) for t in tasks for n in sequences for temp in ([3.0] if t == "noise" else temperatures)]


class Prompts:
    """Prompts of all tasks, in the model's chat template where it has one."""

    def __init__(self, lm: LM, files: dict[str, Path]) -> None:
        self._lm = lm
        self._files = {task: guessing_tasks.from_file(path) for task, path in files.items()}

    def asked(self, task: str, i: int) -> str:
        texts = self._files.get(task)
        return texts[i % len(texts)] if texts is not None else guessing_tasks.own(task, i)

    def ids(self, task: str, i: int) -> list[int]:
        if task == "noise":
            drawn = np.random.default_rng(i).integers(0, self._lm.n_vocab, 2 * _NOISE).tolist()
            return [t for t in drawn if not self._lm.is_control(t)][:_NOISE]
        return self._prompt(task, i).tokens(self._lm)

    def text(self, task: str, i: int) -> str:
        return self._prompt(task, i).text

    def _prompt(self, task: str, i: int) -> Prompt:
        text = self.asked(task, i)
        try:
            return self._lm.chat_prompt([{"role": "user", "content": text}])
        except TilebeamError:
            return Prompt(text)


class Sides:
    """The model with every source of guesses, and on the stock backend."""

    def __init__(self, lm: LM, stock: LM | None, headed: LM | None, wanted: list[str]) -> None:
        self._lms = {"stock": stock, "head": headed}
        self._plain = lm
        drafter = lm._engine.scheduler.drafter  # of the draft model, if one was loaded
        model = drafter.model if isinstance(drafter, Speculation) else None
        made: dict[str, Callable[[], Speculation]] = {"look-up": Speculation}
        if model is not None:
            made |= {"draft": lambda: Speculation(model)}
        if headed is not None:
            made["head"] = lambda: Speculation(headed.head, MOST_WITH_HEAD)
        self._drafters = {name: made[name]() for name in wanted if name in made}

    @property
    def guessing(self) -> list[str]:
        return list(self._drafters)

    @property
    def names(self) -> list[str]:
        return ["plain", *self.guessing, *(["stock"] if self._lms["stock"] is not None else [])]

    def run(self, side: str, calls: list[list[list[int]]], params: SamplingParams) -> list[RequestOutput]:
        lm = self._lms.get(side, self._plain)
        assert lm is not None
        drafter = self._drafters.get(side)
        if drafter is not None:
            drafter.forget()
        lm.use_drafter(drafter)
        return [output for prompts in calls for output in lm.generate(prompts, params)]


def seconds(usage: Usage) -> float:
    return usage.decode_seconds + usage.drafting_seconds + usage.sampling_seconds


class Bench:
    """Rounds of cases."""

    def __init__(
        self, sides: Sides, llamas: list[LlamaLookup], prompts: Prompts, options: argparse.Namespace, log: Rounds
    ) -> None:
        self._sides, self._llamas, self._prompts, self._o, self._log = sides, llamas, prompts, options, log

    def measure(self, all_cases: list[Case]) -> None:
        """Until each case has as many rounds as wanted, or the time is over."""
        by_name = {case.name: case for case in all_cases}
        for name in self._log.turns(by_name, self._o.rounds):
            self._log.end(**self._round(by_name[name]))

    def _round(self, case: Case) -> dict[str, float]:
        """Seconds per token of all sides, and what became of guesses."""
        calls = case.calls(self._o.items)
        prompts = [[self._prompts.ids(case.task, i) for i in call] for call in calls]
        figures: dict[str, float] = {}
        texts: dict[str, list[list[int]]] = {}
        for side in self._sides.names:
            outputs = self._sides.run(side, prompts, case.params(self._o.n_gen))
            texts[side] = [s.token_ids for o in outputs for s in o.outputs]
            usage = sum((o.usage for o in outputs), Usage())
            figures[side] = seconds(usage) / usage.completion_tokens
            if side in self._sides.guessing:
                figures[f"{side} drafted"] = usage.drafted_tokens / usage.completion_tokens
                figures[f"{side} accepted"] = usage.accepted_tokens / usage.completion_tokens
                figures[f"{side} drafting"] = usage.drafting_seconds / seconds(usage)
        same = [texts[side] == texts["plain"] for side in self._sides.guessing]
        figures["same"] = sum(same) / max(1, len(same))
        if case.n == 1 and case.temperature == 0:
            for peer in self._o.peer:
                figures[peer.name] = self._peer(peer, case, [i for call in calls for i in call])
            for llama in self._llamas:
                runs = [llama.run(ids, self._o.n_gen) for call in prompts for ids in call]
                figures[llama.name] = sum(took for _, took in runs) / sum(count for count, _ in runs)
        return figures

    def _peer(self, peer: SpeculativeProgram, case: Case, items: list[int]) -> float:
        tokens, spent = 0, 0.0
        for i in items:
            prompt = (self._prompts.asked if peer.of_ik else self._prompts.text)(case.task, i)
            n_ctx = len(self._prompts.ids(case.task, i)) + self._o.n_gen + 64
            count, took = peer.run(self._o.model, self._o.draft, prompt, self._o.n_gen, self._o.threads, n_ctx)
            tokens, spent = tokens + count, spent + took
        return spent / max(1, tokens)

    def rows(self, all_cases: list[Case]) -> Iterable[tuple[dict[str, Any], str]]:
        """Make a row for each case and source, and a line that says more."""
        for case in (c for c in all_cases if c.name in self._log):
            for source in self._sides.guessing:
                about = {key: self._log.median(case.name, f"{source} {key}") for key in _ABOUT}
                known = ("stock", *(p.name for p in (*self._o.peer, *self._llamas)))
                others = [n for n in known if n in self._log.figures(case.name)]
                more: dict[str, Any] = {key: round(value, 3) for key, value in about.items()}
                more["same"] = self._log.median(case.name, "same")
                for other in others:
                    more[other] = round(1 / self._log.median(case.name, other), 3)
                name = f"{case.name}, {source}"
                row = self._log.row(case.name, 1, "tokens/s", ours=source, baseline="plain", title=name, **more)
                line = "per token {drafted:.2f} guesses, {accepted:.2f} right, taking {drafting:.0%}".format(**about)
                yield row, line + "".join(f"; {other} {more[other]:.1f}" for other in others)


_ABOUT = ("drafted", "accepted", "drafting")


def options() -> argparse.Namespace:
    p = Parser(__doc__, "a tiny model, fewer cases, tokens and rounds")
    p.add_model()
    p.add_argument("-md", "--draft", type=Path, help="a draft model")
    p.add_argument("--head", type=Path, help="a draft head of the model (tilebeam draft train)")
    p.add_argument("--only", metavar="TASKS", help="of " + ", ".join((*OWN, *FILES)))
    for name in FILES:
        p.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"data of the task {name}")
    p.add_argument("-npl", "--n-parallel", metavar="N,..", help="sequences (default 1,2,4,16, 1,4 with --quick)")
    p.add_argument("--temps", metavar="T,..", help="temperatures (default 0,0.7, 0 with --quick)")
    p.add_argument("--sources", default="look-up,draft,head", help="of guesses: " + ", ".join(SOURCES))
    p.add_argument("--stock", action=argparse.BooleanOptionalAction, default=True, help="measure the stock backend too")
    p.add_argument("--peer", type=SpeculativeProgram.parse, action="append", default=[], metavar="'PROGRAM [OPTIONS]'")
    p.add_argument("--llama", metavar="N,..", help="guesses of llama_cpp.Llama's own look-up")
    p.add_threads()
    p.add_count("-n", "--n-gen", usual=128, quick=16, what="tokens per sequence")
    p.add_count("--items", usual=4, quick=1, what="prompts of chat and of files")
    p.add_rounds(3, 1)
    rounds.add_options(p)
    o = p.parse()
    have = [task for task in (*OWN, *FILES) if task in OWN or getattr(o, task)]
    usual = ["edit", "noise"] if o.quick else have
    o.tasks = o.only.split(",") if o.only else usual
    if unknown := set(o.tasks) - set(have):
        p.error(f"--only: {', '.join(sorted(unknown))} is not among {', '.join(have)}")
    o.sequences = numbers(o.n_parallel or ("1,4" if o.quick else "1,2,4,16"), "-npl")
    o.llama = numbers(o.llama, "--llama") if o.llama else []
    o.temperatures = [float(t) for t in (o.temps or ("0" if o.quick else "0,0.7")).split(",")]
    o.sources = [s for s in o.sources.split(",") if s == "look-up" or getattr(o, s, True)]
    if unknown := set(o.sources) - set(SOURCES):
        p.error(f"--sources: {', '.join(sorted(unknown))} is not among {', '.join(SOURCES)}")
    o.model = o.model or models.synthetic("tiny" if o.quick else "bench-1.4b")
    return o


def cells(all_cases: list[Case], prompts: Prompts, o: argparse.Namespace) -> int:
    """KV cells for the largest call, and for prompts that stay in the cache."""
    most = 0
    for case in all_cases:
        for call in case.calls(o.items):
            samples = case.params(o.n_gen).n
            most = max(most, sum(len(prompts.ids(case.task, i)) + samples * (o.n_gen + 16) for i in call))
    return most + (256 if o.quick else 4096)


def main() -> None:
    o = options()
    all_cases = cases(o.tasks, o.sequences, o.temperatures)
    setting: dict[str, Any] = {"bench": "speculation", "model": o.model.name, "n": o.n_gen, "threads": o.threads}
    setting |= {"draft": str(o.draft), "head": str(o.head), "sources": o.sources, "items": o.items}
    setting |= {"stock": o.stock, "peers": [p.name for p in o.peer], "llama": o.llama}
    log, rows = Rounds(o.resume, setting, o.seconds), report.Rows("speculation", o.json)
    files = {name: getattr(o, name) for name in FILES if getattr(o, name)}
    with ExitStack() as stack:
        with load(o.model, "cpu", n_ctx=256, n_seq_max=1, threads=1, lookup=False) as small:
            n_ctx = cells(all_cases, Prompts(small, files), o)
        run: dict[str, Any] = {"n_ctx": n_ctx, "n_seq_max": max(o.sequences), "threads": o.threads}
        lm = stack.enter_context(load(o.model, draft=o.draft, lookup=False, **run))
        stock = stack.enter_context(load(o.model, "cpu", lookup=False, **run)) if o.stock else None
        headed = stack.enter_context(load(o.model, draft=o.head, **run)) if "head" in o.sources else None
        for one in filter(None, (lm, stock, headed)):
            stack.enter_context(one.keep_prefixes())
        places = [(guesses, layers) for guesses in o.llama for layers in (-1, 0)]
        llamas = [LlamaLookup(o.model, n_ctx, o.threads, *place) for place in places]
        for llama in llamas:
            stack.callback(llama.close)
        bench = Bench(Sides(lm, stock, headed, o.sources), llamas, Prompts(lm, files), o, log)
        bench.measure(all_cases)
        for row, line in bench.rows(all_cases):
            rows.add(row, line)
    rows.finish({}, f"{limits.machine()['cpu']}, {o.threads} threads")
    log.warn()


if __name__ == "__main__":
    report.start(main)
