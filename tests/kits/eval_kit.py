"""For tests of evaluations: JSONL files, judges of what a random model writes, and models that need no file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import tilebeam
from tilebeam import CompletionOutput, Prompt, RequestOutput, SamplingParams, Usage
from tilebeam.evaluation.config import ModelFile, Setting
from tilebeam.evaluation.task_options import TaskOptions
from tilebeam.evaluation.tasks import open_task
from tilebeam.evaluation.tasks.task import Task
from tilebeam.evaluation.worker import EvalJob, Timed, Workbench

CHECKS = '''
def right(item, text):
    """Sums of letters modulo 3: a random model is right a third of the time."""
    return answer(text) == item["answer"]

def answer(text):
    return str(sum(map(ord, text)) % 3) if text.strip() else None

def step(prompt, text):
    return sum(map(ord, text)) % 11 / 10
'''


def lines(path: Path, *objects: Mapping[str, Any] | str) -> Path:
    path.write_text("".join((o if isinstance(o, str) else json.dumps(o)) + "\n" for o in objects))
    return path


def setting() -> Setting:
    """Of an evaluation of one model."""
    return Setting(
        models=(ModelFile("m", "m.gguf", "x"),),
        devices=("cpu",),
        task=TaskOptions("jsonl:t.jsonl"),
        task_digest="d",
        methods=("best-of-n",),
        budgets=(1, 2),
        scorers=("logprob",),
        seeds=(1,),
        sampling={},
    )


def job_of(folder: Path, n_items: int = 10, **changes: Any) -> tuple[EvalJob, Task]:
    """Make an evaluation of a scripted model, and its task."""
    path = lines(folder / "t.jsonl", *({"prompt": f"{i}: {i % 4}", "answer": str(i % 4)} for i in range(n_items)))
    options = TaskOptions(f"jsonl:{path}")
    task = open_task(options)
    values: dict[str, Any] = {
        "models": (ModelFile("m", str(path), "print"),),
        "devices": ("npu",),
        "task": options,
        "task_digest": task.digest,
        "methods": ("greedy", "best-of-n", "self-consistency", "adaptive:weighting=logprob"),
        "budgets": (1, 2, 4, 6),
        "scorers": ("logprob", "verifier"),
        "unit_items": 4,
    }
    return EvalJob(Setting(**(values | changes))), task


class Scripted:
    """Texts that depend on prompt and seed alone, greedy ones on the prompt; every item has its own difficulty."""

    n_ctx = 4096

    def tokenize(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def detokenize(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    def keep_prefixes(self) -> AbstractContextManager[None]:
        return nullcontext()

    def generate(
        self, prompts: Sequence[Any], sampling: Any, *, progress: Any = None, on_sample: Any = None
    ) -> list[RequestOutput]:
        if progress is not None:
            progress(tilebeam.Progress())
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        prompts = [self.detokenize(p) if isinstance(p, list) else Prompt.of(p).text for p in prompts]
        results: list[RequestOutput] = []
        unwanted: set[int] = set()
        for number, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            outputs: list[CompletionOutput] = []
            ease = np.random.default_rng(sum(map(ord, prompt))).random()
            for i in range(p.n):
                if number in unwanted:
                    outputs.append(CompletionOutput(i, "", [], "aborted", p.sample_seed(i)))
                    continue
                rng = np.random.default_rng([p.sample_seed(i) if p.temperature else 0, *map(ord, prompt)])
                right = rng.random() < ease
                text = f"{prompt[-1] if right else rng.integers(0, 4)}" if rng.random() < 0.9 else "-"
                outputs.append(
                    CompletionOutput(i, text, [1] * int(rng.integers(1, 5)), "stop", p.sample_seed(i), -rng.random())
                )
                unwanted.update((on_sample and on_sample(number, outputs[-1])) or ())
            usage = Usage(prompt_tokens=len(prompt), completion_tokens=sum(len(o.token_ids) for o in outputs))
            results.append(RequestOutput(prompt, [1], outputs, usage, p.seed))
        return results


class ScriptedBench(Workbench):
    """A workbench whose models are scripted."""

    def __init__(self, job: EvalJob, task: Task, keep: int = 1) -> None:
        super().__init__(job, task, keep=keep)
        self.model = Scripted()
        self.timed: list[tuple[str, str, int, str]] = []

    def _lm(self, name: str, device: str) -> Any:  # noqa: ARG002
        return self.model

    def _clean(self, lm: Any, device: str) -> None:
        pass

    def latency(self, model: str, device: str, timed: Timed, item: Any) -> dict[str, Any]:
        self.timed.append((model, timed.series, timed.budget, item.id))
        return super().latency(model, device, timed, item) | {"seconds": float(timed.budget)}
