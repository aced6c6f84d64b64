"""A command per search algorithm."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilebeam.cli import batch, console
from tilebeam.cli.options import (
    Json,
    LoraOptions,
    ModelOptions,
    Programs,
    PromptOptions,
    SamplingOptions,
    SpeculationOptions,
    UnsafeCode,
    grouped,
    option,
    tell_thoughtless,
)
from tilebeam.cli.read_prompts import wrap
from tilebeam.cli.reward_options import STEP_STOP_TEXT, RewardModelOptions, StepStop, open_scorer
from tilebeam.errors import TilebeamError
from tilebeam.gguf.whole_file import check_target, whole_file
from tilebeam.scoring.scoring_defaults import RUN_PROGRAMS, ScorerName, VoteScorer
from tilebeam.search.search_defaults import (
    BEAM_WIDTH,
    BUDGET,
    CONFIDENCE,
    EXTRACTOR,
    MAX_STEP_TOKENS,
    MAX_STEPS,
    ROUNDS,
    SHARPNESS,
    Weighting,
)
from tilebeam.text_files import read_text, unescaped

if TYPE_CHECKING:
    from tilebeam.answers.extract import Extractor
    from tilebeam.evaluation.question_files import UserQuestion
    from tilebeam.model.lm import LM
    from tilebeam.prompt import Prompt
    from tilebeam.scoring.load_reward import RewardSpec
    from tilebeam.scoring.scorers import Scorer

_judge = partial(option, rich_help_panel="Judge")
_steps = partial(option, rich_help_panel="Steps")

# --- options ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of all searches."""

    model: ModelOptions
    prompts: PromptOptions
    drawing: SamplingOptions
    reward: RewardModelOptions
    budget: int = option(BUDGET, "-N", "--n-samples", "--budget", min=1, help="Candidates per prompt.")
    to_file: batch.BatchOptions
    json_: Json = False
    verbose: bool = option(False, "-v", "--verbose", help="Also show all candidates, or the tree of steps, on stderr.")
    html: Path | None = option(None, help="Also write a page to this file: answer, votes, tree of steps, candidates.")


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """A model that is asked what it thinks of candidates."""

    judge_model: Path | None = _judge(None, help="GGUF file; default: the model itself.")
    judge_template: Path | None = _judge(
        None, help="File with its question, holding {answer}, and {prompt} if it is to see it."
    )
    judge_chat: bool | None = _judge(
        None, "--judge-chat/--no-judge-chat", help="Use its chat template; default: if it has one."
    )

    def check(self, wanted: bool) -> None:
        """Raise `TilebeamError` if something is said of a judge that nobody asks, or cannot be read."""
        if not wanted and self != JudgeOptions():
            raise TilebeamError("Judge options need a judge: use --scorer judge.")
        if self.judge_template is not None:
            read_text(self.judge_template)


@dataclass(frozen=True, kw_only=True)
class BeamOptions:
    """Options of searches by steps, which keep beams."""

    beam_width: int = _steps(BEAM_WIDTH, min=1, help="M, continuations of each survivor.")
    max_steps: int = _steps(MAX_STEPS, min=1, help="Most rounds; texts that have not ended by then are cut.")
    step_stop: StepStop = STEP_STOP_TEXT
    max_step_tokens: int = _steps(
        MAX_STEP_TOKENS,
        min=1,
        help="Most tokens of a step; a longer one is rated as it is and continued in the next round.",
    )

    extract: str | None = _steps(
        None,
        show_default="the best text is chosen",
        help="Let the answers of all texts that ended vote, weighted by their scores: see tilebeam vote.",
    )

    def arguments(self) -> dict[str, Any]:
        """Return them as arguments of the algorithms."""
        found = None if self.extract is None else _extractor(self.extract)
        return vars(self) | {"extract": found, "step_stop": unescaped(self.step_stop)}


Extract = Annotated[
    str,
    typer.Option(
        "--extract",
        help="A text's answer: last-number, gsm8k (the number behind ####), text (all of it), choice, boxed, code, "
        "json (the last JSON value; its fields vote one by one), calls (of functions, likewise), program (what the "
        "last one prints), math (equal formulas are one answer; needs tilebeam[math]), or a regular expression whose "
        "first group it is.",
    ),
]


# --- the commands -----------------------------------------------------------------------------------------------------


@grouped
def best_of_n(
    options: SearchOptions,
    judge: JudgeOptions,
    step_stop: StepStop = STEP_STOP_TEXT,
    scorer: ScorerName | None = option(
        None,
        metavar="NAME",
        help="consensus: how many words a text shares with the other candidates (default); logprob: the model's "
        "own mean log-probability; logprob-sum: of the whole text; tail-entropy: how sure it was of the last 64 "
        "tokens; examples: the share of the examples in the docstring of the Python function that is asked for which "
        "the program passes; behavior: the same, then how many programs give the same values; judge: a model is "
        "asked. Instead of a scorer: --prm, --orm or --reward-head.",
    ),
    unsafe_code: UnsafeCode = False,
) -> None:
    """Draw N candidates for each prompt, rate them, choose the best.

    Example: tilebeam best-of-n -m model.gguf -f questions.jsonl -N 16 --prm prm.gguf --aggregate min

    Without a reward model: tilebeam best-of-n -m model.gguf -p "Name a prime above 90." --scorer judge
    """
    from tilebeam.sandbox import need_confinement
    from tilebeam.scoring.scorer_names import named_scorer

    rates = options.reward.read()
    judge.check(scorer == "judge")
    if rates is not None and scorer is not None:
        raise TilebeamError("Give a reward model or --scorer, not both.")
    if scorer in RUN_PROGRAMS:
        need_confinement(unsafe=unsafe_code)
    named = partial(named_scorer, scorer or "consensus", unsafe_code=unsafe_code)
    _run("best-of-n", options, rates, step_stop, {}, judge if scorer == "judge" else named)


@grouped
def vote(
    options: SearchOptions,
    step_stop: StepStop = STEP_STOP_TEXT,
    extract: Extract = EXTRACTOR,
    weighting: Weighting | None = option(
        None,
        help="plain: one vote each; logprob: by the model's mean probability per token; reward: by --prm, --orm or "
        "--reward-head (default with one of them); softmax: by how a candidate is rated among the others, under the "
        "reward model or --scorer.",
    ),
    scorer: VoteScorer | None = option(
        None, help="For --weighting softmax: see tilebeam best-of-n.", show_default="logprob"
    ),
    sharpness: float | None = option(
        None,
        min=0,
        help="For --weighting softmax: how much good ratings count, 0: not at all.",
        show_default=str(SHARPNESS),
    ),
    programs: Programs = False,
    unsafe_code: UnsafeCode = False,
) -> None:
    """Let answers vote (self-consistency): draw N candidates, extract their answers, take the one with the most votes.

    Example: tilebeam vote -m model.gguf -f questions.jsonl -N 16 --extract math

    Weighted votes: tilebeam vote -m model.gguf -f quiz.jsonl --extract choice --prm prm.gguf
    """
    from tilebeam.scoring.scorer_names import named_scorer

    rates = options.reward.read()
    weights = weighting or ("reward" if rates is not None else "plain")
    relative = weights == "softmax"
    _check_weighting(weights, rates)
    if (scorer is not None or sharpness is not None) and not relative:
        raise TilebeamError("--scorer and --sharpness matter only for --weighting softmax.")
    if rates is not None and scorer is not None:
        raise TilebeamError("Give a reward model or --scorer, not both.")
    found = _extractor(extract, programs=programs, unsafe_code=unsafe_code)
    arguments: dict[str, Any] = {"extract": found, "sharpness": sharpness, "weighting": weights}
    named = partial(named_scorer, scorer or "logprob") if relative else None
    _run("self-consistency", options, rates, step_stop, arguments, named)


@grouped
def beam(options: SearchOptions, beams: BeamOptions) -> None:
    """Search by steps with beams: of N beginnings the best N / M go on, each in M ways, as a reward model rates them.

    A fork shares the KV cells of its beginning, in both models. The result is printed as a tree of steps with scores.

    Example: tilebeam beam -m model.gguf --prm prm.gguf -f questions.jsonl -N 16 --extract boxed
    """
    _by_steps("beam", options, beams)


@grouped
def dvts(options: SearchOptions, beams: BeamOptions) -> None:
    """Search N / M trees side by side (diverse verifier tree search): in each the best of M continuations is kept.

    More diverse than beam search, where one good beginning can crowd out the others; better at large budgets.

    Example: tilebeam dvts -m model.gguf --prm prm.gguf -f questions.jsonl -N 32 --extract boxed
    """
    _by_steps("dvts", options, beams)


@grouped
def adaptive(
    options: SearchOptions,
    step_stop: StepStop = STEP_STOP_TEXT,
    extract: Extract = EXTRACTOR,
    confidence: float = option(
        CONFIDENCE, min=0.5, max=1.0, help="Stop when the leader stays ahead with this probability."
    ),
    weighting: Weighting | None = option(
        None, help="As of tilebeam vote; reward with --prm, --orm or --reward-head.", show_default="plain"
    ),
    programs: Programs = False,
    unsafe_code: UnsafeCode = False,
) -> None:
    """Vote, but stop when the vote is settled: up to N candidates, as many as the question needs.

    Example: tilebeam adaptive -m model.gguf -f questions.jsonl -N 32

    Weighted votes: tilebeam adaptive -m model.gguf -f questions.jsonl -N 32 --reward-head head.gguf
    """
    found = _extractor(extract, programs=programs, unsafe_code=unsafe_code)
    rates = options.reward.read()
    _check_weighting(weighting, rates)
    _run("adaptive", options, rates, step_stop, {"extract": found, "confidence": confidence, "weighting": weighting})


@grouped
def tir(
    options: SearchOptions,
    step_stop: StepStop = STEP_STOP_TEXT,
    extract: Extract = "gsm8k",
    rounds: int = option(ROUNDS, min=1, help="Programs of a candidate at most."),
    example: bool | None = option(
        None, "--example/--no-example", help="Show the model one worked example; if not given, where words explain."
    ),
    unsafe_code: UnsafeCode = False,
) -> None:
    """Reason with tools: candidates write Python programs, which are run; they go on behind the real output, and their
    answers vote.

    For instruct models: the question goes through the chat template, behind a system prompt that asks for programs;
    with --raw it is taken as it is.
    Programs run confined: no files, no network, seconds of CPU time.

    Example: tilebeam tir -m model.gguf -f problems.jsonl -N 8

    One greedy answer whose programs run: tilebeam tir -m model.gguf -p "What is 17.5 % of 2340?" -N 1 --temp 0
    """
    from tilebeam.search.tool_forms import conversation, needs_words

    rates = options.reward.read()
    arguments = {"extract": _extractor(extract), "rounds": rounds}

    def asked(lm: LM, question: UserQuestion) -> Prompt:
        words = needs_words(lm.chat_template)
        return lm.chat_prompt(conversation(question.alone, example=example, words=words))

    _run("tir", options, rates, step_stop, arguments | {"unsafe_code": unsafe_code}, wrapped=asked)


def _run(
    name: str,
    options: SearchOptions,
    rates: RewardSpec | None,
    step_stop: str,
    arguments: dict[str, Any],
    otherwise: JudgeOptions | Callable[[LM], Scorer] | None = None,
    wrapped: Callable[[LM, UserQuestion], Prompt] | None = None,
) -> None:
    """Read the prompts, load the models, search, and print results or write them to a file.

    Args:
        rates: the reward model, which is not opened yet.
        step_stop: ends a step, as it was typed.
        arguments: of the algorithm, but for its scorer.
        otherwise: the scorer where there is no reward model: a judge, or what makes one; None: the algorithm has none.
        wrapped: makes a chat's prompt of what the user wrote; None: the chat template alone does.
    """
    from tilebeam.cli import search_view
    from tilebeam.search import algorithms as methods
    from tilebeam.search.contract import VoteResult

    if rates is None and step_stop != STEP_STOP_TEXT:
        raise TilebeamError("--step-stop matters only with a reward model: --prm, --orm or --reward-head.")
    given, model, budget = options.prompts, options.model, options.budget
    asked = given.read()
    options.to_file.check(page=options.html is not None)
    if options.html is not None:
        check_target(options.html)
    params = options.drawing.params(escape=given.escape)
    with ExitStack() as stack:
        layer = None if rates is None else rates.hidden_layer(model.model)
        lm = stack.enter_context(model.load(budget * len(asked), hidden_layer=layer))
        chat = given.chats(lm) or (wrapped is not None and given.chat is None)
        prompts = [wrapped(lm, text) if wrapped and chat else wrap(lm, text, chat) for text in asked]
        tell_thoughtless(params, lm.chat_template)
        params = options.drawing.fitted(params, lm, prompts, budget)
        if rates is not None:
            same = {"n_ctx": model.ctx_size, "n_seq_max": model.parallel, **model.run.arguments()}
            arguments["scorer"] = stack.enter_context(open_scorer(rates, lm, step_stop=unescaped(step_stop), **same))
        elif isinstance(otherwise, JudgeOptions):
            arguments["scorer"] = _judge_of(otherwise, lm, model, chat, stack)
        elif otherwise is not None:
            arguments["scorer"] = otherwise(lm)
        algorithm = methods.create(name, **arguments)
        if options.to_file.out is not None:
            at_once = -(-2 * lm.n_seq_max // budget)  # as many as keep all slots in use
            complete = partial(algorithm.completed, lm, budget=budget, at_once=at_once)
            batch.write(options.to_file, lm, asked, prompts, params, complete)
            return
        with console.generating(name, budget * len(prompts)) as hook:
            results = algorithm.run(lm, prompts, budget, sampling=params, progress=hook)
        candidates, max_steps = [c for r in results for c in r.candidates], arguments.get("max_steps")
        search_view.account([r.usage for r in results], params.seed)
        search_view.tell_cut("candidates", candidates, params, lm, max_steps)
        search_view.tell_loops(results)
        if options.json_:
            for result in results:
                print(json.dumps(result.as_dict() | {"device": lm.device}, indent=2 if len(results) == 1 else None))
        else:
            for prompt, result in zip(prompts, results, strict=True):
                search_view.show(result, prompt.asked, titled=len(results) > 1, verbose=options.verbose)
        if options.html is not None:
            from tilebeam.pages.search_page import search_page

            details = {"Model": model.model.name, "Device": lm.device}
            page = search_page(algorithm.name, results, [p.asked for p in prompts], details)
            with whole_file(options.html) as file:
                file.write_text(page, encoding="utf-8")
        if all(isinstance(r, VoteResult) and r.answer is None for r in results):
            console.fail("No candidate has an answer. Does --extract fit their texts? -v shows them.")


def _by_steps(name: str, options: SearchOptions, beams: BeamOptions) -> None:
    """Run a search by steps."""
    from tilebeam.search.beam import width_for

    rates = options.reward.read()
    if rates is None or rates.outcome:
        raise TilebeamError(
            f"{name} needs a process reward model, which rates steps: --prm FILE or --reward-head FILE."
        )
    width_for(beams.beam_width, options.budget)
    _run(name, options, rates, beams.step_stop, beams.arguments())


# --- what they share --------------------------------------------------------------------------------------------------


def _judge_of(judge: JudgeOptions, lm: LM, model: ModelOptions, chat: bool, stack: ExitStack) -> Scorer:
    """Make the judge; load a model of its own if it has one."""
    from tilebeam.scoring.llm_judge import LLMJudge

    if judge.judge_model is not None:
        own = replace(model, model=judge.judge_model, lora=LoraOptions(), speculation=SpeculationOptions())
        lm = stack.enter_context(own.load(model.parallel))
        chat = lm.chat_template is not None
    return LLMJudge(
        lm,
        template=read_text(judge.judge_template) if judge.judge_template else None,
        chat=chat if judge.judge_chat is None else judge.judge_chat,
    )


def _check_weighting(weighting: str | None, rates: RewardSpec | None) -> None:
    """Raise `TilebeamError` if a reward model is missing, or there is one that these votes do not ask."""
    takes = weighting in (None, "reward", "softmax")
    if (rates is None and weighting == "reward") or (rates is not None and not takes):
        raise TilebeamError(
            "--weighting reward needs a reward model (--prm, --orm or --reward-head), which only it and softmax take."
        )


def _extractor(name: str, *, programs: bool = False, unsafe_code: bool = False) -> Extractor:
    from tilebeam.answers.extractors import extractor
    from tilebeam.answers.program_answers import ProgramAnswer

    try:
        words = extractor(name)
    except TilebeamError as error:
        raise TilebeamError(f"--extract: {error}") from None
    return ProgramAnswer(words, unsafe=unsafe_code) if programs else words
