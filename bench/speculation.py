"""Guessing tokens ahead against plain decoding: tokens per second, tokens per step and what was right, by task.

    python -m bench.speculation -m MODEL.gguf [--draft SMALL.gguf] [--tasks edit,chat] [-npl 1,4] [--temps 0,0.7] [-t 2]
        [--gsm8k FILE] [-n 128] [--json] [--quick] [--resume FILE --seconds S]

Each round generates the same texts without guesses, with look-up and, with --draft, with the draft model and with both,
one after the other, from an empty cache; with T = 0 all texts must be the same. The clock runs over the whole call
without its prompt (`usage.decode_seconds`, `drafting_seconds` and `sampling_seconds`). Tasks:

* edit: a text of code to be written again with one name changed; extract: fields of records as JSON; quote: a question
  answered with sentences of a text. What they ask for stands in the prompt.
* chat: questions that have nothing to copy; with --gsm8k, problems of that file.

`-npl 4` draws four samples of a prompt, which read each other's texts. Without -m it writes a random model (--quick: a
tiny one), on which no guess is right: what guessing costs in vain.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilebeam import SamplingParams, TilebeamError, load
from tilebeam.cli import console
from tilebeam.cli.bench import numbers
from tilebeam.engine.speculation import Speculation
from tilebeam.outputs import Usage

from bench.lib import ROOT, limits, models, report, rounds
from bench.lib.options import Parser
from bench.lib.rounds import Rounds

_CODE = (ROOT / "python" / "tilebeam" / "engine" / "detokenizer.py").read_text(encoding="utf-8")
_RECORDS = "\n".join(
    f"Order {1000 + 7 * i}: {who} from {town} bought {3 * i + 2} {what} for {12 * i + 5} euros on March {i + 3}."
    for i, (who, town, what) in enumerate(
        (
            ("Ines Faber", "Utrecht", "desk lamps"),
            ("Tomasz Wilk", "Gdansk", "bicycle bells"),
            ("Aoife Brennan", "Galway", "wool blankets"),
            ("Marcus Lindqvist", "Uppsala", "garden chairs"),
            ("Chiara Conti", "Verona", "coffee cups"),
            ("Hanna Virtanen", "Turku", "picture frames"),
        )
    )
)
PROMPTS = {
    "edit": f"Write this Python file again, with the class Detokenizer renamed to TextReader everywhere:\n\n{_CODE}",
    "extract": f"{_RECORDS}\n\nList all orders as JSON: order, customer, town, item, count, price, day.",
    "quote": f"{_RECORDS}\n\nRepeat, word for word, every line in which somebody spent more than 20 euros.",
    "chat": "Explain to a friend who never cooked how to make a vegetable soup, and why each step is needed.",
}


@dataclass(frozen=True)
class Case:
    """A row: a task, its prompts, how many samples and at which temperature, and where guesses come from."""

    task: str
    n: int
    temperature: float
    source: str  # "look-up", "draft" or "both"

    @property
    def name(self) -> str:
        """Of the row."""
        samples = f"{self.n} samples" if self.n > 1 else "1 sample"
        return f"{self.task}, {samples}, T = {self.temperature:g}, {self.source}"


class Runner:
    """The models, loaded once for each source of guesses."""

    def __init__(self, path: Path, draft: Path | None, threads: int, n: int, stack: ExitStack) -> None:
        options: dict[str, Any] = {"n_ctx": 4096, "n_seq_max": n, "threads": threads}
        sources: dict[str, dict[str, Any]] = {"plain": {}, "look-up": {"lookup": True}}
        if draft is not None:
            sources |= {"draft": {"draft": draft}, "both": {"draft": draft, "lookup": True}}
        self.lms = {name: stack.enter_context(load(path, **options, **more)) for name, more in sources.items()}

    @property
    def sources(self) -> list[str]:
        """All that guess."""
        return list(self.lms)[1:]

    def prompts(self, texts: list[str]) -> list[str]:
        """In the model's chat template, where it has one."""
        lm = self.lms["plain"]
        try:
            return [lm.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
        except TilebeamError:
            return texts

    def run(self, source: str, prompts: list[str], params: SamplingParams) -> tuple[Usage, list[list[int]]]:
        """One call for each prompt, one after the other; nothing is remembered of earlier rounds' texts."""
        lm, usage, texts = self.lms[source], Usage(), []
        drafter = lm._engine.scheduler.drafter
        if isinstance(drafter, Speculation):
            drafter.forget()
        for prompt in prompts:
            [output] = lm.generate(prompt, params)
            usage += output.usage
            texts += [s.token_ids for s in output.outputs]
        return usage, texts


def seconds(usage: Usage) -> float:
    """What generating took, without the prompt."""
    return usage.decode_seconds + usage.drafting_seconds + usage.sampling_seconds


def measure(
    runner: Runner,
    cases: list[Case],
    prompts: dict[str, list[str]],
    n_gen: int,
    log: Rounds,
    wanted: int,
    note: Callable[[str], None],
) -> None:
    """Rounds of all cases until each has as many as wanted, or the time is over."""
    while log.fewest(c.name for c in cases) < wanted:
        least, begun = log.fewest(c.name for c in cases), 0
        for case in cases:
            if log.count(case.name) > least or not log.begin(case.name):
                continue
            begun += 1
            note(case.name)
            params = SamplingParams(n=case.n, temperature=case.temperature, max_tokens=n_gen, seed=1)
            asked = runner.prompts(prompts[case.task])
            plain, texts = runner.run("plain", asked, params)
            ours, guessed = runner.run(case.source, asked, params)
            if case.temperature == 0 and texts != guessed:
                print(f"{case.name}: a text differs from the one without guesses", file=sys.stderr)
            log.end(
                ours=seconds(ours) / ours.completion_tokens,
                baseline=seconds(plain) / plain.completion_tokens,
                drafted=ours.drafted_tokens / ours.completion_tokens,
                accepted=ours.accepted_tokens / ours.completion_tokens,
                drafting=ours.drafting_seconds / seconds(ours),
            )
        if not begun:
            return


def gsm8k(path: Path, count: int) -> list[str]:
    """The first questions of a file of problems."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line)["question"] for line, _ in zip(file, range(count), strict=False)]


def main() -> None:
    """Measure and print."""
    p = Parser(__doc__, "a tiny model, fewer tokens and rounds")
    p.add_model()
    p.add_argument("--draft", type=Path, help="a draft model")
    p.add_argument("--tasks", default=",".join(PROMPTS), help="of " + ", ".join((*PROMPTS, "gsm8k")))
    p.add_argument("--gsm8k", type=Path, metavar="FILE", help="JSON lines with a question each, for the task gsm8k")
    p.add_argument("-npl", "--n-parallel", default="1,4", help="samples of a prompt")
    p.add_argument("--temps", default="0,0.7", help="temperatures")
    p.add_threads()
    p.add_count("-n", "--n-gen", usual=128, quick=16, what="tokens per sample")
    p.add_rounds(3, 1)
    rounds.add_options(p)
    a = p.parse()
    tasks = a.tasks.split(",") + (["gsm8k"] if a.gsm8k and "gsm8k" not in a.tasks else [])
    prompts = {name: [text] for name, text in PROMPTS.items()} | ({"gsm8k": gsm8k(a.gsm8k, 4)} if a.gsm8k else {})
    if unknown := set(tasks) - set(prompts):
        p.error(f"--tasks: {', '.join(sorted(unknown))} is not among {', '.join(prompts)}")
    path = a.model or models.synthetic("tiny" if a.quick else "bench-1.4b")
    samples, temperatures = numbers(a.n_parallel, "-npl"), [float(t) for t in a.temps.split(",")]
    setting = {"bench": "speculation", "model": path.name, "draft": str(a.draft), "n": a.n_gen, "threads": a.threads}
    log, rows = Rounds(a.resume, setting, a.seconds), report.Rows("speculation", a.json)
    with ExitStack() as stack:
        runner = Runner(path, a.draft, a.threads, max(samples), stack)
        cases = [Case(t, n, temp, s) for t in tasks for n in samples for temp in temperatures for s in runner.sources]
        with console.bar("speculation") as progress:
            task = progress.add_task("", total=None, note="")
            measure(
                runner,
                cases,
                prompts,
                a.n_gen,
                log,
                a.rounds,
                lambda name: progress.update(task, advance=1, description=name),
            )
    for case in cases:
        if case.name in log:
            more = {key: round(log.median(case.name, key), 3) for key in ("drafted", "accepted", "drafting")}
            rows.add(
                log.row(case.name, 1, "tokens/s", **more),
                f"per token {more['drafted']:.2f} guesses, {more['accepted']:.2f} right, taking {more['drafting']:.0%}",
            )
    rows.finish({}, f"{limits.machine()['cpu']}, {a.threads} threads")
    if note := log.note():
        print(note, file=sys.stderr)


if __name__ == "__main__":
    report.start(main)
