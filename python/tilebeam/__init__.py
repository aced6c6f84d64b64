"""Tilebeam: test-time scaling on local hardware.

    import tilebeam
    lm = tilebeam.load("model.gguf")
    best = tilebeam.BestOfN(tilebeam.LogProb()).infer(lm, "Question: ...", budget=16)

Importing the package is cheap: llama_cpp, numpy and the native libraries are loaded on first use.
"""

from __future__ import annotations

import platform
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.platform != "linux" or platform.machine().lower() not in ("x86_64", "amd64", "aarch64", "arm64"):
    raise ImportError(
        f"Tilebeam runs on Linux on x86-64 and aarch64; this is {platform.system()} on {platform.machine()}."
    )

from tilebeam._version import __version__
from tilebeam.errors import NpuError, PlacementWarning, SearchCancelled, StateWarning, TilebeamError

if TYPE_CHECKING:
    from tilebeam.answers.choice import choice
    from tilebeam.answers.extract import after, boxed, last_number, regex
    from tilebeam.answers.math import MathAnswer
    from tilebeam.answers.normalize import normalize_answer
    from tilebeam.engine.reading import Reading
    from tilebeam.engine.streams import AsyncStream, Stream
    from tilebeam.model.lm import LM
    from tilebeam.model.loader import load
    from tilebeam.model.progress_bar import ProgressBar
    from tilebeam.native.stock import register
    from tilebeam.outputs import CompletionOutput, Delta, Likelihood, Progress, RequestOutput, Usage
    from tilebeam.prompt import Prompt
    from tilebeam.sampling_params import SamplingParams
    from tilebeam.scoring.judge import LLMJudge
    from tilebeam.scoring.load_reward import load_reward_model
    from tilebeam.scoring.own_reward import OwnReward
    from tilebeam.scoring.reward_formats import RewardFormat
    from tilebeam.scoring.reward_heads import Head, classifier_of, load_head
    from tilebeam.scoring.reward_model import HeadReward, RewardModel, StepScorer, TokenReward
    from tilebeam.scoring.scorers import LogProb, Majority, Rating, Scorer, Verifier
    from tilebeam.search.adaptive import Adaptive, AdaptiveResult
    from tilebeam.search.base import Algorithm, SearchResult, Trajectory, VoteResult
    from tilebeam.search.beam import DVTS, BeamSearch, StepResult
    from tilebeam.search.sampled import BestOfN, SelfConsistency
    from tilebeam.search.tool_reasoning import ToolReasoning

_HOME = {
    "LM": "model.lm",
    "Prompt": "prompt",
    "load": "model.loader",
    "register": "native.stock",
    "SamplingParams": "sampling_params",
    "CompletionOutput": "outputs",
    "Delta": "outputs",
    "Likelihood": "outputs",
    "Stream": "engine.streams",
    "AsyncStream": "engine.streams",
    "RequestOutput": "outputs",
    "Usage": "outputs",
    "Progress": "outputs",
    "ProgressBar": "model.progress_bar",
    "BestOfN": "search.sampled",
    "SelfConsistency": "search.sampled",
    "Adaptive": "search.adaptive",
    "AdaptiveResult": "search.adaptive",
    "Algorithm": "search.base",
    "SearchResult": "search.base",
    "VoteResult": "search.base",
    "Trajectory": "search.base",
    "BeamSearch": "search.beam",
    "DVTS": "search.beam",
    "StepResult": "search.beam",
    "ToolReasoning": "search.tool_reasoning",
    "StepScorer": "scoring.reward_model",
    "RewardModel": "scoring.reward_model",
    "TokenReward": "scoring.reward_model",
    "HeadReward": "scoring.reward_model",
    "OwnReward": "scoring.own_reward",
    "RewardFormat": "scoring.reward_formats",
    "load_reward_model": "scoring.load_reward",
    "Head": "scoring.reward_heads",
    "load_head": "scoring.reward_heads",
    "classifier_of": "scoring.reward_heads",
    "Reading": "engine.reading",
    "Scorer": "scoring.scorers",
    "Rating": "scoring.scorers",
    "LogProb": "scoring.scorers",
    "Verifier": "scoring.scorers",
    "Majority": "scoring.scorers",
    "LLMJudge": "scoring.judge",
    "CodeExamples": "scoring.code_examples",
    "MathAnswer": "answers.math",
    "after": "answers.extract",
    "boxed": "answers.extract",
    "choice": "answers.choice",
    "last_number": "answers.extract",
    "regex": "answers.extract",
    "normalize_answer": "answers.normalize",
}

__all__ = [
    "DVTS",
    "LM",
    "Adaptive",
    "AdaptiveResult",
    "Algorithm",
    "AsyncStream",
    "BeamSearch",
    "BestOfN",
    "CodeExamples",
    "CompletionOutput",
    "Delta",
    "Head",
    "HeadReward",
    "LLMJudge",
    "Likelihood",
    "LogProb",
    "Majority",
    "MathAnswer",
    "NpuError",
    "OwnReward",
    "PlacementWarning",
    "Progress",
    "ProgressBar",
    "Prompt",
    "Rating",
    "Reading",
    "RequestOutput",
    "RewardFormat",
    "RewardModel",
    "SamplingParams",
    "Scorer",
    "SearchCancelled",
    "SearchResult",
    "SelfConsistency",
    "StateWarning",
    "StepResult",
    "StepScorer",
    "Stream",
    "TilebeamError",
    "TokenReward",
    "ToolReasoning",
    "Trajectory",
    "Usage",
    "Verifier",
    "VoteResult",
    "__version__",
    "after",
    "boxed",
    "choice",
    "classifier_of",
    "last_number",
    "load",
    "load_head",
    "load_reward_model",
    "normalize_answer",
    "regex",
    "register",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tilebeam' has no attribute {name!r}")
    try:
        value = getattr(import_module(f"tilebeam.{_HOME[name]}"), name)
    except ImportError as error:
        if "libtilebeam_ext" not in str(error):
            raise
        # It lies beside the plugin, so a lost or wrong folder is first noticed here.
        raise TilebeamError(f"The libraries libggml-tilebeam.so and libtilebeam_ext.so are needed: {error}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
