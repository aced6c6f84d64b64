"""The options of `tilebeam eval` in groups, and what each of them is to an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilebeam.cli.options import (
    CtxSize,
    Deterministic,
    ExecutorOption,
    Programs,
    Sequences,
    Threads,
    UnsafeCode,
    check_npu_only,
    named_file,
    option,
)
from tilebeam.errors import TilebeamError
from tilebeam.evaluation.task_options import UNIT_ITEMS, TaskOptions
from tilebeam.model.hub import missing
from tilebeam.model.load_options import BACKENDS, LoadOptions, backends, default_threads
from tilebeam.text_files import unescaped

if TYPE_CHECKING:
    from tilebeam.evaluation.config import ModelFile
    from tilebeam.evaluation.tasks.task import Task
    from tilebeam.scoring.load_reward import RewardSpec

task_option = partial(option, rich_help_panel="Task")
running_option = partial(option, rich_help_panel="How it runs")


@dataclass(frozen=True, kw_only=True)
class ChoiceOptions:
    """Out of how many candidates methods choose, and by what."""

    budget: str = option("1,2,4,8,16", help="Candidates per prompt, comma separated.")
    scorer: str | None = option(
        None,
        help="Comma separated: logprob, logprob-sum, verifier (the task's checker, an upper bound), examples (the "
        "share of the examples in the question's docstring that a program passes), prm, orm, head or adapter "
        "(--reward-head alone), or FILE.py:function of prompt and text. Default: logprob (humaneval: examples, too) "
        "and the reward model that is given.",
    )

    def scorers(self, task: Task, reward: RewardSpec | None) -> tuple[str, ...]:
        """Name the scorers: those that were given, else the task's and the reward model."""
        from tilebeam.evaluation.named_scorers import reward_name

        if self.scorer is not None:
            return tuple(part.strip() for part in self.scorer.split(",") if part.strip())
        model = reward_name(reward)
        return (*task.defaults.scorers, *([model] if model else []))


@dataclass(frozen=True, kw_only=True)
class ProblemOptions:
    """What is asked, and who judges the answers."""

    items: int | None = task_option(None, min=1, help="The first N of the file; default: all.")
    template: str | None = task_option(
        None, help="Template of a question; {question} and other fields, \\n allowed. Default: the task's own."
    )
    extract: str | None = task_option(
        None,
        help="A text's answer: last-number, text, line, another extractor's name, a regular expression, or "
        "FILE.py:function. Default: the task's own.",
    )
    checker: str | None = task_option(None, help="FILE.py:function of item (the JSON object) and text; True if right.")
    chat: bool | None = task_option(
        None,
        "--chat/--no-chat",
        help="Put prompts into the model's chat template, examples as earlier turns. Default: on for tasks that "
        "are made for instruct models (gsm8k, math, humaneval), off for others.",
    )

    def of(self, spec: str) -> TaskOptions:
        """Make the options of the task that --task names."""
        given: dict[str, Any] = {
            name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()
        }
        typed = {name: unescaped(given[name]) for name in ("template", "shot_answer") if given.get(name) is not None}
        return TaskOptions(spec, **given | typed)


@dataclass(frozen=True, kw_only=True)
class ItemOptions(ProblemOptions):
    """The same with examples, and with programs."""

    shots: int = task_option(TaskOptions.shots, min=0, help="Solved examples before every prompt.")
    shots_file: Path | None = task_option(
        None,
        help="File of examples, lines as the task's own. Without --shots the first 8 (gsm8k), 4 (math) or 2 "
        "(humaneval), or all (jsonl).",
    )
    shot_answer: str | None = task_option(None, help="Template of the answer in an example. Default: the task's own.")
    field: str | None = task_option(
        None, help="The question's name in a file's lines; default: prompt, question, problem, messages."
    )
    tir: bool = task_option(
        False,
        "--tir",
        help="Tool-integrated reasoning: prompts ask for Python programs, and those in the samples of all methods "
        "are run, confined, while they are drawn (gsm8k, math, jsonl).",
    )
    programs: Programs = TaskOptions.programs
    tools_grammar: bool = task_option(
        TaskOptions.tools_grammar,
        "--tools-grammar/--no-tools-grammar",
        help="Hold samples of bfcl to calls that are valid under the functions' schemas, or let the model write "
        "what it wants.",
    )
    unsafe_code: UnsafeCode = TaskOptions.unsafe_code


@dataclass(frozen=True, kw_only=True)
class RunningOptions:
    """The timed pass, where and how models run, how the work is cut, and how much of it is done."""

    latency_items: int = running_option(
        0, min=0, help="Also time every method and budget on this many prompts, one at a time."
    )
    latency_device: str | None = running_option(
        None, help="Where they are timed: npu, cpu, or both, with the accuracy of --device. Default: --device."
    )
    device: str = running_option(BACKENDS[0], help="tilebeam, cpu, or both.")
    threads: Threads = LoadOptions.threads
    executor: ExecutorOption = LoadOptions.executor
    deterministic: Deterministic = LoadOptions.deterministic
    ctx_size: CtxSize = LoadOptions.n_ctx
    parallel: Sequences = LoadOptions.n_seq_max
    unit_items: int = running_option(
        UNIT_ITEMS, min=1, help="Items that run together: what is lost when a run is killed."
    )
    so_far: bool = running_option(
        False,
        "--so-far",
        help="Evaluate no more items: report on those that are done by all models and methods that have begun. "
        "With --latency-items, methods are still timed.",
    )

    def arguments(self) -> dict[str, Any]:
        """Give the arguments of `runner.evaluate`."""
        devices = backends(self.latency_device, "--latency-device") if self.latency_device else ()
        return {"so_far": self.so_far, "latency_items": self.latency_items, "latency_devices": devices}

    def fields(self) -> dict[str, Any]:
        """Give the fields of `Setting`."""
        devices = backends(self.device)
        check_npu_only({"--executor": self.executor}, "npu" in (*devices, *self.arguments()["latency_devices"]))
        return {
            "devices": devices,
            "threads": self.threads or default_threads(),
            "executor": self.executor,
            "deterministic": self.deterministic,
            "n_ctx": self.ctx_size,
            "n_seq_max": self.parallel,
            "unit_items": self.unit_items,
        }


def split_methods(texts: Sequence[str]) -> tuple[str, ...]:
    """Split comma-separated lists of methods; "option=value" belongs to the method before it."""
    found: list[str] = []
    for part in (part.strip() for text in texts for part in text.split(",")):
        if "=" in part and ":" not in part.partition("=")[0]:
            if not found or ":" not in found[-1]:
                raise TilebeamError(f"--method: {part!r} is an option of no method; write beam:{part}.")
            found[-1] += f",{part}"
        elif part:
            found.append(part)
    return tuple(found)


def model_files(specs: Sequence[str]) -> tuple[ModelFile, ...]:
    """Find the files of NAME=FILE and FILE, and their fingerprints."""
    from tilebeam.evaluation.config import ModelFile
    from tilebeam.gguf.fingerprint import fingerprint

    found = []
    for spec in specs:
        name, path = named_file(spec)
        if not name or "/" in name:
            raise TilebeamError(f"--model {spec!r}: a name must not be empty or hold a slash.")
        if not Path(path).is_file():
            raise TilebeamError(f"--model: {missing(path)}")
        found.append(ModelFile(name, path, fingerprint(path)))
    return tuple(found)


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Read whole numbers, each once, in rising order."""
    try:
        return tuple(sorted({int(part) for part in text.split(",") if part.strip()}))
    except ValueError:
        raise TilebeamError(f"{option} {text!r}: write whole numbers, comma separated.") from None


def described_reward(spec: RewardSpec | None, step_stop: str) -> dict[str, Any]:
    """Describe the reward model for the setting, its files by their content."""
    from tilebeam.gguf.fingerprint import fingerprint

    found = {} if spec is None else asdict(spec)
    files: dict[str, Any] = {key: fingerprint(value) for key, value in found.items() if isinstance(value, Path)}
    if isinstance(several := found.get("head"), tuple):
        files["head"] = sorted(fingerprint(file) for file in several)
    return found | files | {"step_stop": step_stop}
