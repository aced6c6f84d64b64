"""Searches: algorithms that spend more compute on a prompt. The classes can be imported from here.

base       what an algorithm is, what it asks of a model, what it returns
sampled    over whole candidates: Best-of-N, self-consistency
beam       by steps: beam search, DVTS; steps: how texts grow step by step
tool_reasoning   samples whose programs run
adaptive   votes that stop once they are settled
algorithms   all of them by name, with options by keyword
events     what happens in a search, told while it runs
tree       the steps that a search drew, those that texts share once; result_from_json: results back from their JSON
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilebeam.errors import SearchCancelled
    from tilebeam.search.adaptive import Adaptive, AdaptiveResult
    from tilebeam.search.base import Algorithm, Pruned, SearchResult, Trajectory, VoteResult
    from tilebeam.search.beam import DVTS, BeamSearch, StepResult
    from tilebeam.search.sampled import BestOfN, SelfConsistency
    from tilebeam.search.search_defaults import Weighting
    from tilebeam.search.tool_reasoning import ToolReasoning

_HOME = {
    "Adaptive": "search.adaptive",
    "AdaptiveResult": "search.adaptive",
    "Algorithm": "search.base",
    "BeamSearch": "search.beam",
    "BestOfN": "search.sampled",
    "DVTS": "search.beam",
    "Pruned": "search.base",
    "SearchCancelled": "errors",
    "SearchResult": "search.base",
    "SelfConsistency": "search.sampled",
    "StepResult": "search.beam",
    "ToolReasoning": "search.tool_reasoning",
    "Trajectory": "search.base",
    "VoteResult": "search.base",
    "Weighting": "search.search_defaults",
}

__all__ = [
    "DVTS",
    "Adaptive",
    "AdaptiveResult",
    "Algorithm",
    "BeamSearch",
    "BestOfN",
    "Pruned",
    "SearchCancelled",
    "SearchResult",
    "SelfConsistency",
    "StepResult",
    "ToolReasoning",
    "Trajectory",
    "VoteResult",
    "Weighting",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tilebeam.search' has no attribute {name!r}")
    value = getattr(import_module(f"tilebeam.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
