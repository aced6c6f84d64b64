"""`tilebeam eval`: its options, and what becomes of them."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilebeam._version import __version__
from tilebeam.cli import console
from tilebeam.cli.options import (
    CtxSize,
    Deterministic,
    Draft,
    ExecutorOption,
    NamedModels,
    NPredict,
    Sequences,
    Stop,
    Threads,
    TokenOptions,
    UnsafeCode,
    grouped,
    named_file,
)
from tilebeam.cli.reward_options import STEP_STOP_TEXT, RewardModelOptions, StepStop
from tilebeam.errors import TilebeamError
from tilebeam.evaluation.options import SEEDS, UNIT_ITEMS, TaskOptions
from tilebeam.evaluation.tasks import KINDS, open_task
from tilebeam.model.load_options import BACKENDS, LoadOptions, default_threads
from tilebeam.text_files import read_text, unescaped

if TYPE_CHECKING:
    from tilebeam.evaluation.config import ModelFile
    from tilebeam.evaluation.runner import Executor
    from tilebeam.evaluation.tasks.base import Task
    from tilebeam.scoring.load_reward import RewardSpec

_METHODS = ["greedy", "best-of-n", "self-consistency"]
_BUDGETS = "1,2,4,8,16"
_SEEDS = ",".join(map(str, SEEDS))
_TASK = "Task"
_RUNNING = "How it runs"


@grouped
def evaluate(
    *,
    model: NamedModels,
    task: Annotated[
        str, typer.Option("--task", help=f"One of {', '.join(k.usage for k in KINDS.values())}.", show_default=False)
    ],
    out: Annotated[
        Path,
        typer.Option(
            "-o", "--out", help="Folder for log, report and plots; an existing run is resumed.", show_default=False
        ),
    ],
    method: Annotated[
        list[str],
        typer.Option(
            "--method",
            help="Comma separated: greedy (one answer at temperature 0), best-of-n, self-consistency, beam, dvts, "
            "adaptive; options behind a colon: beam:beam_width=4,max_steps=8.",
        ),
    ] = _METHODS,
    budget: Annotated[str, typer.Option("--budget", help="Candidates per prompt, comma separated.")] = _BUDGETS,
    scorer: Annotated[
        str | None,
        typer.Option(
            "--scorer",
            help="Comma separated: logprob, logprob-sum, verifier (the task's checker, an upper bound), examples (the "
            "share of the examples in the question's docstring that a program passes), prm, orm, head (--reward-head "
            "alone), or FILE.py:function of prompt and text. Default: logprob (humaneval: examples, too) and the "
            "reward model that is given.",
        ),
    ] = None,
    items: Annotated[
        int | None,
        typer.Option("--items", min=1, help="Items; default: 100, or all of a file.", rich_help_panel=_TASK),
    ] = None,
    item_seed: Annotated[
        int,
        typer.Option(
            "--item-seed",
            help="Seed of generated items, and of the --items that are drawn from a file of mmlu or choice.",
            rich_help_panel=_TASK,
        ),
    ] = TaskOptions.item_seed,
    pilot_seed: Annotated[
        int | None,
        typer.Option("--pilot-seed", help="Leave out the items that this seed gives.", rich_help_panel=_TASK),
    ] = None,
    pilot_items: Annotated[
        int, typer.Option("--pilot-items", min=1, help="Number of pilot items.", rich_help_panel=_TASK)
    ] = TaskOptions.pilot_items,
    shots: Annotated[
        int, typer.Option("--shots", min=0, help="Solved examples before every prompt.", rich_help_panel=_TASK)
    ] = TaskOptions.shots,
    shot_seed: Annotated[
        int, typer.Option("--shot-seed", help="Seed of generated examples.", rich_help_panel=_TASK)
    ] = TaskOptions.shot_seed,
    shots_file: Annotated[
        Path | None,
        typer.Option(
            "--shots-file",
            help="File of examples, lines as the task's own. Without --shots the first 8 (gsm8k), 4 (math) or 2 "
            "(humaneval), 5 of each subject (mmlu), or all (jsonl, choice).",
            rich_help_panel=_TASK,
        ),
    ] = None,
    prefix_file: Annotated[
        Path | None, typer.Option("--prefix-file", help="Text before everything else.", rich_help_panel=_TASK)
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            "--template",
            help="Template of a question; {question} and other fields, \\n allowed. Default: the task's own.",
            rich_help_panel=_TASK,
        ),
    ] = None,
    shot_answer: Annotated[
        str | None,
        typer.Option(
            "--shot-answer",
            help="Template of the answer in an example. Default: the task's own.",
            rich_help_panel=_TASK,
        ),
    ] = None,
    question: Annotated[
        str | None,
        typer.Option(
            "--question",
            help="Regular expression whose groups pick the question out of a generated text.",
            rich_help_panel=_TASK,
        ),
    ] = None,
    extract: Annotated[
        str | None,
        typer.Option(
            "--extract",
            help="A text's answer: last-number, text, line, another extractor's name, a regular expression, or "
            "FILE.py:function. Default: the task's own.",
            rich_help_panel=_TASK,
        ),
    ] = None,
    checker: Annotated[
        str | None,
        typer.Option(
            "--checker",
            help="module:function or FILE.py:function of item (the JSON object) and text; True if right.",
            rich_help_panel=_TASK,
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Put prompts into the model's chat template, examples as earlier turns. Default: on for tasks that "
            "are made for instruct models (gsm8k, math, humaneval), off for others.",
            rich_help_panel=_TASK,
        ),
    ] = None,
    tir: Annotated[
        bool,
        typer.Option(
            "--tir",
            help="Tool-integrated reasoning: prompts ask for Python programs, and those in the samples of all methods "
            "are run, confined, while they are drawn (gsm8k, math, jsonl).",
            rich_help_panel=_TASK,
        ),
    ] = False,
    unsafe_code: UnsafeCode = TaskOptions.unsafe_code,
    seeds: Annotated[
        str,
        typer.Option(
            "--seeds", help="Seeds, comma separated; every item runs once with each.", rich_help_panel="Sampling"
        ),
    ] = _SEEDS,
    tokens: TokenOptions,
    n_predict: NPredict = None,
    stop: Stop = None,
    reward_model: RewardModelOptions,
    step_stop: StepStop = STEP_STOP_TEXT,
    latency_items: Annotated[
        int,
        typer.Option(
            "--latency-items",
            min=0,
            help="Also time every method and budget on this many prompts, one at a time.",
            rich_help_panel=_RUNNING,
        ),
    ] = 0,
    latency_device: Annotated[
        str | None,
        typer.Option(
            "--latency-device",
            help="Where they are timed: npu, cpu, or both, with the accuracy of --device. Default: --device.",
            rich_help_panel=_RUNNING,
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="npu, cpu, or both.", rich_help_panel=_RUNNING)] = BACKENDS[0],
    threads: Threads = LoadOptions.threads,
    executor: ExecutorOption = LoadOptions.executor,
    lookup: Annotated[
        bool,
        typer.Option(
            "--lookup/--no-lookup",
            help="Guess tokens ahead by look-up; a repeated run may then give other texts, as with --draft.",
            rich_help_panel=_RUNNING,
        ),
    ] = False,
    draft: Draft = None,
    deterministic: Deterministic = LoadOptions.deterministic,
    ctx_size: CtxSize = LoadOptions.n_ctx,
    parallel: Sequences = LoadOptions.n_seq_max,
    unit_items: Annotated[
        int,
        typer.Option(
            "--unit-items",
            min=1,
            help="Items that run together: what is lost when a run is killed, and the grain of --ray.",
            rich_help_panel=_RUNNING,
        ),
    ] = UNIT_ITEMS,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            help="Run units on the Ray cluster at this address; auto: the one this machine is in.",
            rich_help_panel=_RUNNING,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, help="Processes on it; default: as its CPUs allow.", rich_help_panel=_RUNNING),
    ] = None,
    so_far: Annotated[
        bool,
        typer.Option(
            "--so-far",
            help="Evaluate no more items: report on those that are done by all models and methods that have begun. "
            "With --latency-items, methods are still timed.",
            rich_help_panel=_RUNNING,
        ),
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print report.json instead of tables.")] = False,
) -> None:
    """Evaluate models on a task: accuracy of search methods over budgets, latency, and the Pareto front of all.

    The greedy answer is what methods are compared with. One run of N samples per item gives every budget of best-of-n
    and self-consistency; beam, dvts and the others run at each budget. If a run is killed or interrupted, the same
    command resumes it.

    Example: tilebeam eval -m model.gguf --task "reasoning-gym:chain_sum?max_terms=3" --shots 8 -n 16 --stop "\\n"
    --items 200 --out eval/chain-sum --latency-items 10

    A benchmark: tilebeam eval -m model.gguf --task gsm8k:gsm8k_test.jsonl --items 200 --budget 1,4,16 -np 16 -c 16384
    --out eval/gsm8k   (docs/evaluation.md says where its files come from)
    """
    from tilebeam.evaluation import runner
    from tilebeam.evaluation import scorers as scoring
    from tilebeam.evaluation.config import LIKELIHOOD, Setting
    from tilebeam.evaluation.tasks.choice import ChoiceTask
    from tilebeam.evaluation.worker import Job

    reward = reward_model.read()
    options = TaskOptions(
        spec=task,
        items=items,
        item_seed=item_seed,
        pilot_seed=pilot_seed,
        pilot_items=pilot_items,
        shots=shots,
        shot_seed=shot_seed,
        shots_file=str(shots_file) if shots_file else None,
        prefix=read_text(prefix_file) if prefix_file else "",
        template=None if template is None else unescaped(template),
        shot_answer=None if shot_answer is None else unescaped(shot_answer),
        question=question,
        extract=extract,
        checker=checker,
        chat=chat,
        tir=tir,
        unsafe_code=unsafe_code,
    )
    opened = open_task(options)
    if is_choice := isinstance(opened, ChoiceTask):
        _refuse_sampling(
            {
                "--method": method != _METHODS,
                "--budget": budget != _BUDGETS,
                "--scorer": scorer is not None,
                "a reward model": reward is not None,
                "--latency-items": latency_items > 0,
                "--seeds": seeds != _SEEDS,
                "-n": n_predict is not None,
                "--stop": bool(stop),
                "--extract": extract is not None,
                "--checker": checker is not None,
                "--lookup": bool(lookup),
                "--draft": draft is not None,
                "--tir": tir,
            }
        )
    scorers = () if is_choice else _scorers(scorer, opened, reward)
    setting = Setting(
        models=_models(model),
        devices=_devices(device),
        task=options,
        task_digest=opened.digest,
        methods=(LIKELIHOOD,) if is_choice else _methods(method),
        budgets=(1,) if is_choice else _numbers(budget, "--budget"),
        scorers=scorers,
        reward=_reward(reward, unescaped(step_stop)),
        sources=scoring.sources(scorers),
        seeds=(0,) if is_choice else _numbers(seeds, "--seeds"),
        sampling={} if is_choice else _sampling(opened, tokens, n_predict, stop),
        n_ctx=ctx_size,
        n_seq_max=parallel,
        threads=threads or default_threads(),
        executor=executor,
        lookup=lookup,
        draft=_models([str(draft)], "--draft")[0] if draft else None,
        deterministic=deterministic,
        unit_items=unit_items,
        versions={"tilebeam": __version__, "llama-cpp-python": importlib.metadata.version("llama-cpp-python")},
    )
    job = Job(setting, reward, unescaped(step_stop))
    from tilebeam.cli.evaluate_view import Bars, show

    try:
        report = runner.evaluate(
            job,
            out,
            task=opened,
            executor=_cluster(ray, workers),
            latency_items=latency_items,
            latency_devices=_devices(latency_device) if latency_device else (),
            so_far=so_far,
            watcher=Bars(),
        )
    except KeyboardInterrupt:
        console.err().print(f"Interrupted. What is finished is in {out}; run the same command again to resume.")
        raise typer.Exit(130) from None
    if json_:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        show(report, out)


# --- options ----------------------------------------------------------------------------------------------------------


def _models(specs: Sequence[str], option: str = "--model") -> tuple[ModelFile, ...]:
    from tilebeam.evaluation.config import ModelFile
    from tilebeam.gguf.fingerprint import fingerprint

    found = []
    for spec in specs:
        name, path = named_file(spec)
        if not name or "/" in name:
            raise TilebeamError(f"{option} {spec!r}: a name must not be empty or hold a slash.")
        if not Path(path).is_file():
            raise TilebeamError(f"{option} {path} does not exist.")
        found.append(ModelFile(name, path, fingerprint(path)))
    return tuple(found)


def _refuse_sampling(given: dict[str, bool]) -> None:
    """Choices are scored, not sampled.

    Args:
        given: options, and whether they were given.
    """
    if named := [name for name, there in given.items() if there]:
        raise TilebeamError(
            f"The choices of this task are scored by their likelihood, nothing is sampled: leave out {named[0]}."
        )


def _sampling(task: Task, tokens: TokenOptions, n_predict: int | None, stop: list[str] | None) -> dict[str, Any]:
    """The fields of `SamplingParams`; what was not given is the task's."""
    return tokens.fields() | {
        "max_tokens": task.defaults.max_tokens if n_predict is None else n_predict,
        "stop": [unescaped(s) for s in stop] if stop else list(task.defaults.stop),
    }


def _devices(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if unknown := [n for n in names if n not in BACKENDS]:
        raise TilebeamError(f"--device must be one of {', '.join(BACKENDS)}, not {unknown[0]!r}.")
    return names


def _methods(texts: Sequence[str]) -> tuple[str, ...]:
    """Methods of comma-separated lists; "option=value" belongs to the method before it."""
    found: list[str] = []
    for part in (part.strip() for text in texts for part in text.split(",")):
        if "=" in part and ":" not in part.partition("=")[0]:
            if not found or ":" not in found[-1]:
                raise TilebeamError(f"--method: {part!r} is an option of no method; write beam:{part}.")
            found[-1] += f",{part}"
        elif part:
            found.append(part)
    return tuple(found)


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",") if part.strip()}))
    except ValueError:
        raise TilebeamError(f"{option} {text!r}: write whole numbers, comma separated.") from None


def _scorers(text: str | None, task: Task, reward: RewardSpec | None) -> tuple[str, ...]:
    from tilebeam.evaluation.scorers import reward_name

    model = reward_name(reward)
    if text is not None:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return (*task.defaults.scorers, *([model] if model else []))


def _reward(spec: RewardSpec | None, step_stop: str) -> dict[str, Any]:
    """The reward model for the setting: its files by their content."""
    from tilebeam.gguf.fingerprint import fingerprint

    found = {} if spec is None else asdict(spec)
    files: dict[str, Any] = {key: fingerprint(value) for key, value in found.items() if isinstance(value, Path)}
    if isinstance(several := found.get("head"), tuple):
        files["head"] = sorted(fingerprint(file) for file in several)
    return found | files | {"step_stop": step_stop}


def _cluster(address: str | None, workers: int | None) -> Executor | None:
    """Where units are done, None for here."""
    if address is None:
        if workers is not None:
            raise TilebeamError("--workers are processes on a Ray cluster: give its address with --ray.")
        return None
    from tilebeam.evaluation.ray_executor import RayExecutor

    return RayExecutor(address, workers)
