"""Defaults stand in one place: those of sampling in SamplingParams, those of loading in LoadOptions, those of searches
in the algorithms. Commands, the evaluation and the server take them from there."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import tilebeam
from tilebeam import SamplingParams
from tilebeam.answers.extractors import extractor
from tilebeam.cli.main import app
from tilebeam.cli.options import SpeculationOptions
from tilebeam.model.load_options import LoadOptions
from tilebeam.native import control, npu_options
from tilebeam.scoring.scorer_names import named_scorer
from tilebeam.scoring.scoring_defaults import STEP_STOP, ScorerName, VoteScorer
from tilebeam.search import algorithms
from tilebeam.search.search_defaults import EXTRACTOR
from tilebeam.server.requests import Search
from tilebeam.text_files import escaped, unescaped
from typer.main import get_command
from typer.testing import CliRunner

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
LOAD = {name: p.default for name, p in inspect.signature(tilebeam.load).parameters.items()}
DEFAULTS = {
    "--temp": SamplingParams.temperature,
    "--top-p": SamplingParams.top_p,
    "--top-k": SamplingParams.top_k,
    "--min-p": SamplingParams.min_p,
    "--n-predict": None,  # what fits the context
    "--seed": SamplingParams.seed,
    "--device": LOAD["device"],
    "--ctx-size": LOAD["n_ctx"],
    "--parallel": LOAD["n_seq_max"],
    "--threads": LOAD["threads"],
    "--batch-size": LOAD["n_batch"],
    "--executor": LOAD["executor"],
    "--cache-type-k": LOAD["type_k"],
    "--cache-type-v": LOAD["type_v"],
    "--cache-ram": str(LOAD["cache_ram"]),
    "--packed-cache": LOAD["packed_cache"],
    "--devices": LOAD["devices"],
    "--memory-limit": LOAD["memory_limit"],
    "--flash-attn": LOAD["flash_attn"],
}
# Where a command means something else by an option, as llama.cpp's program of its kind does.
OTHERS = {
    ("serve", "--ctx-size"): 8192,  # for the conversations of several clients
    ("trace", "--n-predict"): 32,  # a timeline is to be read
    ("bench", "--batch-size"): "2048",  # lists
    ("bench", "--device"): "cpu,tilebeam",
    ("eval", "--device"): "tilebeam",  # results say where they were made
}


def options() -> Iterator[tuple[str, str, Any]]:
    """Command, option and default, for every option of every command."""
    for name, command in COMMANDS.items():
        for parameter in command.params:
            for flag in parameter.opts:
                yield name, flag, parameter.default


@cache
def help_of(command: str) -> str:
    """The help as people see it, on one line."""
    return " ".join(CliRunner().invoke(app, [command, "--help"]).stdout.split())


def test_options_have_the_librarys_defaults() -> None:
    checked = 0
    for command, flag, default in options():
        if flag in DEFAULTS:
            expected = OTHERS.get((command, flag), DEFAULTS[flag])
            assert default == expected, f"tilebeam {command} {flag} is {default!r}, not {expected!r}"
            checked += 1
    assert checked > 100
    known = {(command, flag) for command, flag, _ in options()}
    for command, flag in OTHERS:
        assert (command, flag) in known, f"tilebeam {command} has no {flag} any more"


def test_help_shows_them() -> None:
    for command, flag, default in options():
        if flag in DEFAULTS and default is not None and not isinstance(default, bool):
            assert f"default: {default}" in help_of(command)


@pytest.mark.parametrize(("command", "method"), [("beam", "beam"), ("dvts", "dvts"), ("adaptive", "adaptive")])
def test_searches_have_the_algorithms_defaults(command: str, method: str) -> None:
    own = {p.name: p.default for p in COMMANDS[command].params}
    for option in algorithms.options(method):
        if option.name in own and option.name != "extract" and option.default is not None:
            default = own[option.name]
            assert (unescaped(default) if option.name == "step_stop" else default) == option.default
    run = inspect.signature(tilebeam.Algorithm.run).parameters
    assert own["budget"] == run["budget"].default == Search.model_fields["budget"].default
    assert extractor(EXTRACTOR) is inspect.signature(tilebeam.SelfConsistency).parameters["extract"].default


def test_steps_end_alike_everywhere() -> None:
    for command, flag, default in options():
        if flag == "--step-stop":
            assert default == escaped(STEP_STOP), command
    for kind in (tilebeam.load_reward_model, tilebeam.BeamSearch, tilebeam.TokenReward):
        assert inspect.signature(kind).parameters["step_stop"].default == STEP_STOP


def test_load_takes_what_load_options_have() -> None:
    own = {f: getattr(LoadOptions, f) for f in LoadOptions.__dataclass_fields__}
    assert {name: LOAD[name] for name in own} == own


def test_choices_are_those_of_the_library() -> None:
    assert tuple(control.NUMERICS) == get_args(npu_options.Numerics)
    assert tuple(control.SOFTMAX) == get_args(npu_options.Softmax)
    for name in get_args(ScorerName):
        assert name == "judge" or named_scorer(name)
    for command, flag, values in (
        ("generate", "--executor", get_args(npu_options.Executor)),
        ("vote", "--weighting", ("plain", "logprob", "reward", "softmax")),
        ("vote", "--scorer", get_args(VoteScorer)),
    ):
        assert f"{flag} <{'|'.join(values)}>" in help_of(command)
    told = help_of("best-of-n").split("Options:")[1]  # --scorer is a list with explanations, for narrow terminals
    assert [name for name in get_args(ScorerName) if f" {name}: " not in told and f" {name} " not in told] == []


def test_no_speculation_means_neither_source() -> None:
    given = SpeculationOptions(draft=Path("d.gguf"), lookup=True)
    assert given.arguments() == {"draft": Path("d.gguf"), "lookup": True}
    assert replace(given, no_speculation=True).arguments() == {"draft": None, "lookup": False}
    assert SpeculationOptions().arguments() == {"draft": None, "lookup": LoadOptions.lookup}
