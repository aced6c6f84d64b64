"""Samples of a task's problems, judged, with the hidden states that decoding them produced: collected once, kept in two
files, taken up again where a run was interrupted.

DATA.jsonl   a log as of an evaluation: the setting and its digest, then a line for each problem
DATA.states  float16 [rows, 3 n_embd + 6]: mean, recent, last, length, confidence of a text's state; a sample's rows are
             those of some of its beginnings, then that of its end. Rows are on the disk before the line that counts
             them.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import numpy.typing as npt

from tilebeam.answers.normalize import merged
from tilebeam.errors import TilebeamError
from tilebeam.evaluation.config import Named, item_seed
from tilebeam.evaluation.log import Log, Record
from tilebeam.evaluation.task_options import TaskOptions
from tilebeam.evaluation.tasks.task import Item, Task
from tilebeam.gguf.closing import Closing
from tilebeam.gguf.whole_file import naming
from tilebeam.outputs import CompletionOutput, check_complete
from tilebeam.sampling_params import SamplingParams
from tilebeam.scoring.scorers import log_probability
from tilebeam.scoring.scoring_defaults import STEP_STOP
from tilebeam.text_state import Feature, TextState, width
from tilebeam.training.fit_options import SAMPLES, STEPS

if TYPE_CHECKING:
    from tilebeam.model.lm import LM

FEATURES: tuple[Feature, ...] = get_args(Feature)
_MOST = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class CollectionSetting(Named):
    """All that samples depend on, but for which problems: more of them may follow.

    Attributes:
        model: the file's fingerprint; lora: those of its adapters, each with its scale.
        task: options; how many items does not matter.
        sampling: fields of `SamplingParams`.
        samples: of a problem.
        steps: beginnings of a sample that are kept, at most; step_stop: what ends a step.
        seed: what the problems' seeds derive from.
        versions: of what computes.
        layer: behind which hidden states are taken, None: behind the final norm.
    """

    model: str
    task: TaskOptions
    sampling: Mapping[str, Any]
    samples: int = SAMPLES
    lora: tuple[tuple[str, float], ...] = ()
    steps: int = STEPS
    step_stop: str = STEP_STOP
    seed: int = 1
    versions: Mapping[str, str] = field(default_factory=dict)
    layer: int | None = None

    def __post_init__(self) -> None:
        """Raise `TilebeamError` for what nothing can be learnt from."""
        if self.samples < 1 or self.steps < 0:
            raise TilebeamError("A problem needs at least one sample, and at least 0 steps.")

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        result, usual = asdict(self), asdict(TaskOptions(""))
        task = {k: v for k, v in result["task"].items() if k != "items" and v != usual[k]}
        result["task"] = task | {"spec": self.task.spec.partition(":")[0]}
        result["features"] = FEATURES
        if self.layer is None:
            del result["layer"]
        plain: dict[str, Any] = json.loads(json.dumps(result))
        return plain


class Collection(Closing):
    """The two files, open for one process.

    Args:
        stem: their path without suffix.
        setting: of the samples.
        n_embd: elements of a hidden state.

    Raises:
        TilebeamError: they are of another setting, used by another process, or do not fit each other.
    """

    def __init__(self, stem: Path, setting: CollectionSetting, n_embd: int) -> None:
        self.setting = setting
        self._width = width(FEATURES, n_embd)
        self._path = stem.with_name(f"{stem.name}.states")
        self._log = Log(stem.with_name(f"{stem.name}.jsonl"), setting)
        try:
            self._file = open(self._path, "a+b")  # noqa: SIM115 - it stays open
            self._rows = max((r["row"] + sum(s["states"] for s in r["samples"]) for r in self.records), default=0)
            size, wanted = os.fstat(self._file.fileno()).st_size, self._rows * 2 * self._width
            if size < wanted:
                raise TilebeamError(
                    f"{self._path} is shorter than {self._log.path} says: one is damaged. Delete both to begin anew."
                )
            self._file.truncate(wanted)  # rows whose line was never written
        except BaseException:
            self._log.close()
            raise

    @property
    def records(self) -> list[Record]:
        """A record for each problem."""
        return list(self._log.records.values())

    def has(self, task: Task, item: Item, prompt: str) -> bool:
        """Tell whether a problem is there.

        Raises:
            TilebeamError: it is, with another prompt or answer.
        """
        record = self._log.records.get(item.id)
        if record is not None and record["problem"] != _digest(task, item, prompt):
            raise TilebeamError(
                f"{self._log.path} has samples of another problem {item.id}: the task's file, template or judge has "
                "changed. Use another --data, or the old task."
            )
        return record is not None

    def add(
        self, task: Task, item: Item, prompt: str, samples: Sequence[Record], states: npt.NDArray[np.float16]
    ) -> None:
        """Keep a problem's samples: they are on the disk when this returns."""
        with naming(self._path):
            self._file.write(states.tobytes())
            self._file.flush()
            os.fsync(self._file.fileno())
        record = {"unit": item.id, "problem": _digest(task, item, prompt), "row": self._rows, "samples": list(samples)}
        self._log.add(record)
        self._rows += len(states)

    def states(self) -> npt.NDArray[np.float16]:
        """Return all rows, mapped from the file: float16 [rows, 3 n_embd + 6]."""
        if not self._rows:
            return np.zeros((0, self._width), np.float16)
        return np.memmap(self._path, np.float16, "r", shape=(self._rows, self._width))

    def close(self) -> None:
        """Give the files free."""
        with self._log, naming(self._path):  # what found no room before is tried once more
            self._file.close()


def collect(lm: LM, task: Task, collection: Collection, *, finished: Callable[[int], None] = lambda _: None) -> None:
    """Draw and judge samples of all problems that are not collected yet, as many at a time as there are slots.

    Args:
        finished: called with 1 after every problem.
    """
    setting = collection.setting
    problems = [(item, task.prompt(item, lm)) for item in task.items]
    todo = [(item, prompt) for item, prompt in problems if not collection.has(task, item, prompt.text)]
    params = [
        SamplingParams(
            **setting.sampling,
            n=setting.samples,
            seed=item_seed(setting.seed, item.id),
            logprobs=True,
            hidden=True,
            hidden_steps=setting.step_stop if setting.steps else "",
        )
        for item, _ in todo
    ]
    for i, output in lm.completed([prompt for _, prompt in todo], params):
        check_complete([output])
        item, prompt = todo[i]
        answers = merged([task.extract(c.text) for c in output.outputs], task.equal)
        samples, rows = [], []
        for candidate, answer in zip(output.outputs, answers, strict=True):
            states = _kept(candidate, setting.steps)
            rows += [s.features(FEATURES) for s in states]
            samples.append(
                {
                    "text": candidate.text,
                    "answer": answer,
                    "correct": task.verdict(item, candidate.text),
                    "tokens": len(candidate.token_ids),
                    "logprob": log_probability(candidate, per_token=True),
                    "finish": candidate.finish_reason,
                    "states": len(states),
                }
            )
        collection.add(task, item, prompt.text, samples, np.clip(np.stack(rows), -_MOST, _MOST).astype(np.float16))
        finished(1)


def _kept(candidate: CompletionOutput, steps: int) -> list[TextState]:
    """Draw some beginnings of a sample from its steps, and add its end."""
    end = candidate.hidden
    assert end is not None
    if not np.isfinite(end.total).all():
        raise TilebeamError("The model computed hidden states that are not numbers: its weights are damaged.")
    begun = [s for s in candidate.hidden_steps or [] if 0 < s.count < end.count]
    some = sorted(random.Random(candidate.seed).sample(range(len(begun)), min(steps, len(begun))))
    return [*(begun[i] for i in some), end]


def _digest(task: Task, item: Item, prompt: str) -> str:
    return hashlib.sha256(json.dumps([prompt, item.answer, *task.judges(item)]).encode()).hexdigest()[:16]
