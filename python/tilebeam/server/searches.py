"""Searches on behalf of requests: the algorithms of `tilebeam.search.algorithms`, as a request may ask
for them; and work in threads, whose calls share batches with everybody else's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from tilebeam.answers.extractors import extractor
from tilebeam.answers.program_answers import ProgramAnswer
from tilebeam.errors import TilebeamError
from tilebeam.scoring.scorer_names import named_scorer
from tilebeam.search import algorithms as methods
from tilebeam.search.contract import Algorithm, SearchResult
from tilebeam.search.search_defaults import EXTRACTOR
from tilebeam.search.tool_reasoning import ToolReasoning
from tilebeam.server.errors import bad_request

if TYPE_CHECKING:
    from tilebeam.model.lm import LM
    from tilebeam.scoring.own_reward import OwnReward
    from tilebeam.scoring.reward_model import RewardModel
    from tilebeam.scoring.scorers import Scorer
    from tilebeam.server.requests import Generation, Search

T = TypeVar("T")

# A regular expression out of a request could keep a thread busy for ever.
EXTRACTORS = ("last-number", "text", "choice", "boxed", "json", "calls")
# "examples" would run programs for a request.
_SCORERS = ("consensus", "logprob", "logprob-sum", "tail-entropy")


def reasons_with_tools(search: Search | None) -> bool:
    """Return whether programs run inside a request's samples, for which its messages should ask."""
    return search is not None and search.method == ToolReasoning.name


def algorithm_of(
    search: Search,
    lm: LM,
    reward: RewardModel | OwnReward | None,
    body: Generation | None = None,
    *,
    programs: bool = False,
) -> Algorithm[SearchResult]:
    """Return the algorithm that a request asks for.

    Args:
        search: its "search".
        lm: the server's model.
        reward: the server's reward model.
        body: the request, whose form says what votes where the search does not.
        programs: the server runs programs that models write.

    Raises:
        ApiError: 400, there is no such method, option or scorer, or a value does not fit.
    """
    given = dict(search.model_extra or {})
    computed = given.get("programs") is True
    if (computed or reasons_with_tools(search)) and not programs:
        raise bad_request(
            "search: this server runs no programs that models write; start it with --programs.",
            param="search.programs" if computed else "search.method",
            code="programs_off",
        )
    try:
        name = methods.canonical(search.method)
        known = {option.name: option for option in methods.options(name)}
        if "extract" in known and body is not None and (form := body.votes_by) is not None:
            given.setdefault("extract", form)
        for key, value in given.items():
            param = f"search.{key}"
            if not isinstance(value, (str, int, float, bool)):
                raise bad_request(f"{param}: must be a number, a text or a boolean.", param=param)
            if key == "programs" and not isinstance(value, bool):
                raise bad_request(f"{param}: must be true or false.", param=param)
            if (key in known and "function" in known[key].type) or key == "unsafe_code":
                raise bad_request(f"{param}: cannot be given in a request.", param=param)
            if key in known and "extractor" in known[key].type and value not in EXTRACTORS:
                raise bad_request(f"{param}: must be one of {', '.join(EXTRACTORS)}.", param=param)
        if "programs" in given and "extract" in known:
            words = extractor(given.get("extract", EXTRACTOR))
            given["extract"] = ProgramAnswer(words) if given.pop("programs") else words
        return methods.create(name, scorer=_scorer(search, lm, name, given, reward), **given)
    except TilebeamError as error:
        raise bad_request(f"search: {error}", param="search", code="invalid_search") from None


def _scorer(
    search: Search, lm: LM, name: str, given: Mapping[str, Any], reward: RewardModel | OwnReward | None
) -> Scorer | None:
    """Return the named scorer, or the reward model where the method can use one and the request does not say."""
    if search.scorer == "reward":
        if reward is None:
            raise TilebeamError("this server has no reward model (--prm, --orm, --reward-head).")
        return reward
    if search.scorer is not None:
        if search.scorer not in _SCORERS:
            raise TilebeamError(f"scorer must be one of reward, {', '.join(_SCORERS)}, not {search.scorer!r}.")
        return named_scorer(search.scorer, lm)
    weighting = given.get("weighting", "plain" if name == "self-consistency" else "reward")
    return None if weighting in ("plain", "logprob") else reward


async def in_thread(pool: ThreadPoolExecutor, work: Callable[[], T], cancelled: threading.Event) -> T:
    """Return what the work of a pool's thread returns. Cancelling sets the event and waits until it has ended."""
    begun = pool.submit(work)
    future = asyncio.wrap_future(begun)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        cancelled.set()
        if not begun.cancel():  # what waits for a thread is not begun any more
            await asyncio.wait([future])
            future.exception()  # looked at, so that nothing complains
        raise
