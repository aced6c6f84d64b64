"""The commands that generate: `tilebeam generate`, and a command per search algorithm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilebeam.cli import console
from tilebeam.cli.options import (
    Budget,
    Json,
    ModelOptions,
    PromptOptions,
    SamplingOptions,
    grouped,
)
from tilebeam.cli.prompts import wrap
from tilebeam.cli.reward_options import RewardModelOptions, open_scorer
from tilebeam.errors import TilebeamError
from tilebeam.text_files import read_text, unescaped

if TYPE_CHECKING:
    from tilebeam.answers.extract import Extractor
    from tilebeam.model.lm import LM
    from tilebeam.outputs import RequestOutput
    from tilebeam.sampling_params import SamplingParams
    from tilebeam.scoring.load_reward import RewardSpec
    from tilebeam.scoring.scorers import Scorer

_JUDGE = "Judge"
_STEPS = "Steps"


class ScorerName(StrEnum):
    """What rates whole candidates without a reward model."""

    logprob = "logprob"
    logprob_sum = "logprob-sum"
    majority = "majority"
    judge = "judge"


class WeightingName(StrEnum):
    """What a vote weighs."""

    plain = "plain"
    logprob = "logprob"
    reward = "reward"
    judge = "judge"


class VerdictName(StrEnum):
    """How a judge says what it thinks."""

    probability = "probability"
    number = "number"


@dataclass(frozen=True)
class JudgeOptions:
    """A model that is asked what it thinks of candidates."""

    judge_model: Annotated[
        Path | None,
        typer.Option("--judge-model", help="GGUF file; default: the model itself.", rich_help_panel=_JUDGE),
    ] = None
    judge_template: Annotated[
        Path | None,
        typer.Option(
            "--judge-template",
            help="File with its question, holding {answer}, and {prompt}, {low}, {high} as wanted.",
            rich_help_panel=_JUDGE,
        ),
    ] = None
    judge_verdict: Annotated[
        VerdictName,
        typer.Option(
            "--judge-verdict", help="The probability of Yes against No, or a number it writes.", rich_help_panel=_JUDGE
        ),
    ] = VerdictName.probability
    judge_chat: Annotated[
        bool | None,
        typer.Option(
            "--judge-chat/--no-judge-chat", help="Use its chat template; default: as --chat.", rich_help_panel=_JUDGE
        ),
    ] = None

    def check(self, wanted: bool) -> None:
        """Raise `TilebeamError` if something is said of a judge that nobody asks, or cannot be read."""
        if not wanted and self != JudgeOptions():
            raise TilebeamError("There are options for a judge, but none is asked: --scorer judge, --weighting judge.")
        if self.judge_template is not None:
            read_text(self.judge_template)


StepStop = Annotated[str, typer.Option("--step-stop", help="What ends a step (\\n allowed).", rich_help_panel=_STEPS)]


@dataclass(frozen=True)
class StepOptions:
    """What a step is."""

    max_steps: Annotated[
        int,
        typer.Option("--max-steps", min=1, help="Rounds; what has not ended then is cut.", rich_help_panel=_STEPS),
    ] = 10
    step_stop: StepStop = "\\n"
    max_step_tokens: Annotated[
        int,
        typer.Option(
            "--max-step-tokens",
            min=1,
            help="A longer step is rated as it is and goes on in the next round.",
            rich_help_panel=_STEPS,
        ),
    ] = 256


Width = Annotated[
    int, typer.Option("--beam-width", min=1, help="M, continuations of each survivor.", rich_help_panel=_STEPS)
]
Lookahead = Annotated[
    int,
    typer.Option(
        "--lookahead",
        min=0,
        help="Rate a continuation by what this many greedy steps make of it.",
        rich_help_panel=_STEPS,
    ),
]
Extract = Annotated[
    str,
    typer.Option(
        "--extract",
        help="A text's answer: last-number, boxed, choice, math (equal formulas count as one; needs tilebeam[math]), "
        "text (all of it), or a regular expression.",
    ),
]
ScorerOption = Annotated[
    ScorerName | None,
    typer.Option(
        "--scorer",
        help="logprob: the model's own mean log-probability (default); logprob-sum: of the whole text; majority: the "
        "share of candidates with the same answer; judge: a model is asked. Instead: --prm or --orm.",
    ),
]


# --- the commands -----------------------------------------------------------------------------------------------------


@grouped
def generate(
    model: ModelOptions,
    drawing: SamplingOptions,
    what: PromptOptions,
    n_samples: Annotated[int, typer.Option("-N", "--n-samples", min=1, help="Samples per prompt.")] = 1,
    json_: Json = False,
) -> None:
    """Generate text: one sample streams as it is written, several come as they are complete.

    Example: tilebeam generate -m model.gguf -p "Once upon a time" -N 4 -n 64
    """
    texts = what.read()
    params = drawing.params(n_samples, what.escape)
    total = n_samples * len(texts)
    with model.load(total) as lm:
        texts = [wrap(lm, text, what.chat) for text in texts]
        if total == 1 and not json_:
            outputs = [_streamed(lm, texts[0], params)]
        else:
            with console.generating("generate", total) as hook:
                outputs = lm.generate(texts, params, progress=hook)
            for output in outputs:
                if json_:
                    print(json.dumps(asdict(output) | {"device": lm.device}, indent=2 if len(outputs) == 1 else None))
                else:
                    _samples(output, titled=len(outputs) > 1)
    from tilebeam.cli import search_view

    search_view.account([output.usage for output in outputs], params.seed)


def _streamed(lm: LM, text: str, params: SamplingParams) -> RequestOutput:
    """Print a prompt and its one sample while that grows."""
    print(text, end="", flush=True)
    with lm.stream(text, params) as stream:
        for delta in stream:
            print(delta.text, end="", flush=True)
    print(flush=True)
    return stream.output


def _samples(output: RequestOutput, titled: bool) -> None:
    """Print complete samples, under their prompt where there are several."""
    from rich.rule import Rule
    from rich.text import Text

    from tilebeam.cli.search_view import one_line

    screen = console.out()
    if titled:
        screen.print(Text(one_line(output.prompt, 90), style="bold"))
    for sample in output.outputs:
        screen.print(Rule(f"sample {sample.index}, seed {sample.seed}, {sample.finish_reason}", align="left"))
        screen.print(Text(sample.text))


@grouped
def best_of_n(
    model: ModelOptions,
    what: PromptOptions,
    drawing: SamplingOptions,
    reward: RewardModelOptions,
    judge: JudgeOptions,
    n_samples: Budget = 16,
    scorer: ScorerOption = None,
    extract: Annotated[
        str | None, typer.Option("--extract", help="For --scorer majority: see tilebeam vote. [default: last-number]")
    ] = None,
    step_stop: StepStop = "\\n",
    json_: Json = False,
) -> None:
    """Draw N candidates for each prompt, rate them, choose the best.

    Example: tilebeam best-of-n -m model.gguf -f questions.jsonl -N 16 --prm prm.gguf --aggregate min

    Without a reward model: tilebeam best-of-n -m model.gguf --chat -p "Name a prime above 90." --scorer judge
    """
    from tilebeam.scoring.registry import named_scorer
    from tilebeam.scoring.scorers import Majority

    rates = reward.read()
    judge.check(scorer is ScorerName.judge)
    _check_step_stop(rates, step_stop)
    if rates is not None and scorer is not None:
        raise TilebeamError("Give a reward model or --scorer, not both.")
    if extract is not None and scorer is not ScorerName.majority:
        raise TilebeamError("--extract matters only for --scorer majority.")
    find = _extractor(extract or "last-number")
    with _opened("best-of-n", model, what, drawing, n_samples, json_) as search:
        if rates is not None:
            chosen = search.reward(rates, unescaped(step_stop))
        elif scorer is ScorerName.judge:
            chosen = search.judge(judge)
        elif scorer is ScorerName.majority:
            chosen = Majority(find)
        else:
            chosen = named_scorer(scorer or ScorerName.logprob)
        search.run({"scorer": chosen})


@grouped
def vote(
    model: ModelOptions,
    what: PromptOptions,
    drawing: SamplingOptions,
    reward: RewardModelOptions,
    judge: JudgeOptions,
    n_samples: Budget = 16,
    extract: Extract = "last-number",
    weighting: Annotated[
        WeightingName | None,
        typer.Option(
            "--weighting",
            help="plain: one vote each; logprob: by the model's mean probability per token; reward: by --prm or --orm "
            "(default with one of them); judge: by what a judge says.",
        ),
    ] = None,
    step_stop: StepStop = "\\n",
    json_: Json = False,
) -> None:
    """Self-consistency: draw N candidates, extract their answers, take the one with the most votes.

    Example: tilebeam vote -m model.gguf -f questions.jsonl -N 16 --extract math

    Weighted votes: tilebeam vote -m model.gguf -f quiz.jsonl --extract choice --prm prm.gguf
    """
    rates = reward.read()
    weights = weighting or (WeightingName.reward if rates is not None else WeightingName.plain)
    if (rates is not None) != (weights is WeightingName.reward):
        raise TilebeamError("--weighting reward needs a reward model (--prm or --orm), and only it takes one.")
    judge.check(weights is WeightingName.judge)
    _check_step_stop(rates, step_stop)
    rated = weights in (WeightingName.reward, WeightingName.judge)
    options: dict[str, Any] = {"extract": _extractor(extract), "weighting": "reward" if rated else weights.value}
    with _opened("self-consistency", model, what, drawing, n_samples, json_) as search:
        if rated:
            options["scorer"] = search.reward(rates, unescaped(step_stop)) if rates is not None else search.judge(judge)
        search.run(options)


def _by_steps(
    name: str,
    model: ModelOptions,
    what: PromptOptions,
    drawing: SamplingOptions,
    reward: RewardModelOptions,
    steps: StepOptions,
    n_samples: int,
    json_: bool,
    **options: Any,
) -> None:
    from tilebeam.search.beam import width_for

    rates = reward.read()
    if rates.outcome if rates is not None else name != "adaptive":
        raise TilebeamError(f"{name} needs a process reward model, which rates steps: --prm FILE.")
    if "beam_width" in options:
        width_for(options["beam_width"], n_samples)
    step_stop = unescaped(steps.step_stop)
    if rates is not None:
        options |= {"max_steps": steps.max_steps, "step_stop": step_stop, "max_step_tokens": steps.max_step_tokens}
    elif options.get("give_up") is not None or steps != StepOptions():
        raise TilebeamError("--give-up and what a step is matter only with a process reward model: --prm FILE.")
    with _opened(name, model, what, drawing, n_samples, json_) as search:
        if rates is not None:
            options["scorer"] = search.reward(rates, step_stop)
        search.run(options)


@grouped
def beam(
    model: ModelOptions,
    what: PromptOptions,
    drawing: SamplingOptions,
    reward: RewardModelOptions,
    steps: StepOptions,
    n_samples: Budget = 16,
    beam_width: Width = 4,
    lookahead: Lookahead = 0,
    json_: Json = False,
) -> None:
    """Beam search by steps: of N beginnings the best N / M go on, each in M ways, as the reward model rates them.

    A fork shares the KV cells of its beginning, in both models. The result is printed as a tree of steps with scores.

    Example: tilebeam beam -m model.gguf --prm prm.gguf -f questions.jsonl -N 16 --beam-width 4
    """
    _by_steps("beam", model, what, drawing, reward, steps, n_samples, json_, beam_width=beam_width, lookahead=lookahead)


@grouped
def dvts(
    model: ModelOptions,
    what: PromptOptions,
    drawing: SamplingOptions,
    reward: RewardModelOptions,
    steps: StepOptions,
    n_samples: Budget = 16,
    beam_width: Width = 4,
    lookahead: Lookahead = 0,
    json_: Json = False,
) -> None:
    """Diverse verifier tree search: N / M trees grow side by side, and in each the best of M continuations goes on.

    More diverse than beam search, where one good beginning can crowd out the others; better at large budgets.

    Example: tilebeam dvts -m model.gguf --prm prm.gguf -f questions.jsonl -N 32 --beam-width 4
    """
    _by_steps("dvts", model, what, drawing, reward, steps, n_samples, json_, beam_width=beam_width, lookahead=lookahead)


@grouped
def adaptive(
    model: ModelOptions,
    what: PromptOptions,
    drawing: SamplingOptions,
    reward: RewardModelOptions,
    steps: StepOptions,
    n_samples: Budget = 16,
    extract: Extract = "last-number",
    confidence: Annotated[
        float,
        typer.Option("--confidence", min=0.5, max=1.0, help="Stop when the leader stays ahead with this probability."),
    ] = 0.95,
    wave: Annotated[int, typer.Option("--wave", min=1, help="Candidates of a prompt that are drawn at a time.")] = 4,
    give_up: Annotated[
        float | None,
        typer.Option("--give-up", help="With --prm: give up a candidate that is rated below this; default 0.1."),
    ] = None,
    json_: Json = False,
) -> None:
    """Vote, but stop when the vote is settled: up to N candidates, as many as the question needs.

    With --prm, candidates grow step by step, and those that look hopeless are given up.

    Example: tilebeam adaptive -m model.gguf -f questions.jsonl -N 32

    With a reward model: tilebeam adaptive -m model.gguf -f questions.jsonl -N 32 --prm prm.gguf --give-up 0.2
    """
    options: dict[str, Any] = {"extract": _extractor(extract), "confidence": confidence, "wave": wave}
    if give_up is not None:
        options["give_up"] = give_up
    _by_steps("adaptive", model, what, drawing, reward, steps, n_samples, json_, **options)


# --- what they share --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Search:
    """A loaded model, its prompts, and what to do with them.

    Attributes:
        asked: from each prompt as the model sees it to what the user wrote.
        stack: closes whatever is opened besides.
    """

    name: str
    lm: LM
    model: ModelOptions
    texts: list[str]
    asked: dict[str, str]
    chat: bool
    params: SamplingParams
    budget: int
    as_json: bool
    stack: ExitStack

    def reward(self, spec: RewardSpec, step_stop: str) -> Scorer:
        """The reward model, loaded."""
        return self.stack.enter_context(
            open_scorer(
                spec,
                step_stop=step_stop,
                question=lambda prompt: self.asked.get(prompt, prompt),
                n_ctx=self.model.ctx_size,
                n_seq_max=self.model.parallel,
                **self.model.running(),
            )
        )

    def judge(self, options: JudgeOptions) -> Scorer:
        """The judge; a model of its own is loaded."""
        from tilebeam.scoring.judge import LLMJudge

        lm = self.lm
        if options.judge_model is not None:
            own = replace(self.model, model=options.judge_model, lora=None, lora_scaled=None)
            lm = self.stack.enter_context(own.load(self.model.parallel))
        return LLMJudge(
            lm,
            verdict=options.judge_verdict.value,
            template=read_text(options.judge_template) if options.judge_template else None,
            chat=self.chat if options.judge_chat is None else options.judge_chat,
            question=lambda prompt: self.asked.get(prompt, prompt),
        )

    def run(self, options: dict[str, Any]) -> None:
        """Search and print."""
        from tilebeam.cli import search_view
        from tilebeam.search import registry as methods

        algorithm = methods.create(self.name, **options)
        with console.generating(self.name, self.budget * len(self.texts)) as hook:
            results = algorithm.run(self.lm, self.texts, self.budget, sampling=self.params, progress=hook)
        if self.as_json:
            search_view.print_json(results, device=self.lm.device)
        else:
            screen = console.out()
            for result in results:
                search_view.show(screen, result)
        search_view.account([r.usage for r in results], self.params.seed)


@contextmanager
def _opened(
    name: str,
    model: ModelOptions,
    what: PromptOptions,
    drawing: SamplingOptions,
    budget: int,
    as_json: bool,
) -> Iterator[_Search]:
    """Loads the model once the prompts are read."""
    texts = what.read()
    params = drawing.params(escape=what.escape)
    with ExitStack() as stack:
        lm = stack.enter_context(model.load(budget * len(texts)))
        asked = {wrap(lm, text, what.chat): text for text in texts}
        wrapped = [wrap(lm, text, what.chat) for text in texts]
        yield _Search(name, lm, model, wrapped, asked, what.chat, params, budget, as_json, stack)


def _check_step_stop(rates: RewardSpec | None, step_stop: str) -> None:
    if rates is None and step_stop != "\\n":
        raise TilebeamError("--step-stop matters only with a reward model: --prm or --orm.")


def _extractor(name: str) -> Extractor:
    from tilebeam.answers.registry import extractor

    try:
        return extractor(name)
    except TilebeamError as error:
        raise TilebeamError(f"--extract: {error}") from None
