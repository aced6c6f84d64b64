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

from tilebeam.errors import NpuError, TilebeamError

if TYPE_CHECKING:
    from tilebeam.adaptive import Adaptive, AdaptiveResult
    from tilebeam.algorithm import Algorithm, SearchCancelled, SearchResult, Trajectory, VoteResult
    from tilebeam.extract import after, boxed, choice, last_number, normalize_answer, regex
    from tilebeam.judge import LLMJudge
    from tilebeam.lm import LM
    from tilebeam.loading import load
    from tilebeam.math_answer import MathAnswer
    from tilebeam.outputs import CompletionOutput, Delta, Progress, RequestOutput, Usage
    from tilebeam.reading import Reading
    from tilebeam.registration import register
    from tilebeam.reward_formats import RewardFormat
    from tilebeam.reward_heads import Head, classifier_of, load_head
    from tilebeam.rewards import HeadReward, RewardModel, StepScorer, TokenReward
    from tilebeam.sampling import SamplingParams
    from tilebeam.scorers import LogProb, Majority, Scorer, Verifier
    from tilebeam.search import BestOfN, SelfConsistency
    from tilebeam.step_search import DVTS, BeamSearch, StepResult
    from tilebeam.streaming import AsyncStream, Stream

__version__ = "0.1.0"

_HOME = {
    "LM": "lm",
    "load": "loading",
    "register": "registration",
    "SamplingParams": "sampling",
    "CompletionOutput": "outputs",
    "Delta": "outputs",
    "Stream": "streaming",
    "AsyncStream": "streaming",
    "RequestOutput": "outputs",
    "Usage": "outputs",
    "Progress": "outputs",
    "BestOfN": "search",
    "SelfConsistency": "search",
    "Adaptive": "adaptive",
    "AdaptiveResult": "adaptive",
    "Algorithm": "algorithm",
    "SearchResult": "algorithm",
    "VoteResult": "algorithm",
    "Trajectory": "algorithm",
    "SearchCancelled": "algorithm",
    "BeamSearch": "step_search",
    "DVTS": "step_search",
    "StepResult": "step_search",
    "StepScorer": "rewards",
    "RewardModel": "rewards",
    "TokenReward": "rewards",
    "HeadReward": "rewards",
    "RewardFormat": "reward_formats",
    "Head": "reward_heads",
    "load_head": "reward_heads",
    "classifier_of": "reward_heads",
    "Reading": "reading",
    "Scorer": "scorers",
    "LogProb": "scorers",
    "Verifier": "scorers",
    "Majority": "scorers",
    "LLMJudge": "judge",
    "MathAnswer": "math_answer",
    "after": "extract",
    "boxed": "extract",
    "choice": "extract",
    "last_number": "extract",
    "regex": "extract",
    "normalize_answer": "extract",
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
    "CompletionOutput",
    "Delta",
    "Head",
    "HeadReward",
    "LLMJudge",
    "LogProb",
    "Majority",
    "MathAnswer",
    "NpuError",
    "Progress",
    "Reading",
    "RequestOutput",
    "RewardFormat",
    "RewardModel",
    "SamplingParams",
    "Scorer",
    "SearchCancelled",
    "SearchResult",
    "SelfConsistency",
    "StepResult",
    "StepScorer",
    "Stream",
    "TilebeamError",
    "TokenReward",
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
