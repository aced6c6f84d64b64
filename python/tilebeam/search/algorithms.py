"""Search algorithms by name, with options by keyword: for the command line, the evaluation and the server alike.

    methods.create("beam", scorer=prm, beam_width=4, max_steps=8).run(lm, prompts, budget=16)
    name, options = methods.parse("beam:beam_width=4,max_steps=8")   # options are texts; create() reads them

Options are the arguments of the algorithms' classes, so that there is one list of them.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tilebeam.answers.extract import Extractor
from tilebeam.answers.extractors import extractor
from tilebeam.answers.normalize import Equal
from tilebeam.errors import TilebeamError
from tilebeam.scoring.scorer_names import named_scorer
from tilebeam.scoring.scorers import Scorer
from tilebeam.search.adaptive import Adaptive
from tilebeam.search.beam import DVTS, BeamSearch
from tilebeam.search.contract import Algorithm, SearchResult
from tilebeam.search.sampled import BestOfN, SelfConsistency
from tilebeam.search.tool_reasoning import ToolReasoning
from tilebeam.text_files import unescaped

_CLASSES: tuple[type[Algorithm[SearchResult]], ...] = (
    BestOfN,
    SelfConsistency,
    BeamSearch,
    DVTS,
    Adaptive,
    ToolReasoning,
)
_OBJECTS = ("scorer", "run")  # arguments that no text gives
_ALIASES = {"vote": "self-consistency"}


@dataclass(frozen=True)
class Option:
    """An option of an algorithm.

    Attributes:
        name: the keyword.
        type: what it takes, in words.
        default: its value if not given.
    """

    name: str
    type: str
    default: Any


def names() -> list[str]:
    """List all algorithms, without aliases."""
    return [c.name for c in _CLASSES]


def canonical(name: str, *others: str) -> str:
    """Return the algorithm's own name.

    Args:
        others: names that the caller takes besides.

    Raises:
        TilebeamError: there is none of that name.
    """
    known = _ALIASES.get(name, name)
    if known not in (taken := [*others, *names()]):
        raise TilebeamError(f"Unknown search method {name!r}: choose from {', '.join([*taken, *_ALIASES])}.")
    return known


def options(name: str) -> list[Option]:
    """List the options of an algorithm, besides its scorer."""
    return [
        Option(option, _in_words(hint), default)
        for option, (hint, default) in _parameters(name).items()
        if option not in _OBJECTS
    ]


def create(
    name: str,
    *,
    scorer: Scorer | Callable[[str, str], float | bool] | str | None = None,
    **options: Any,
) -> Algorithm[SearchResult]:
    """Make an algorithm.

    Args:
        name: one of `names`, or an alias ("vote").
        scorer: what rates candidates or steps, or the name of a scorer (see
            `tilebeam.scoring.scorer_names.named_scorer`). best-of-n can do without one; beam and dvts need a
            `StepScorer`.
        options: see `options`. Values may be texts, as they come from a command line; extractors go by name (see
            `tilebeam.answers.extractors.extractor`).

    Raises:
        TilebeamError: an unknown name or option, a value that does not fit, a scorer that is missing.
    """
    name = canonical(name)
    known = _parameters(name)
    if unknown := [key for key in options if key not in known or key in _OBJECTS]:
        listed = ", ".join(f"{o.name} ({o.type})" for o in _options(name)) or "none"
        raise TilebeamError(f"{name} has no option {unknown[0]!r}: it has {listed}.")
    arguments = {key: _read(name, key, value, known[key][0]) for key, value in options.items()}
    if scorer is None and known["scorer"][1] is inspect.Parameter.empty:
        raise TilebeamError(f"{name} needs a process reward model as its scorer.")
    if scorer is not None:
        arguments["scorer"] = named_scorer(scorer) if isinstance(scorer, str) else scorer
    return _class(name)(**arguments)


def parse(text: str) -> tuple[str, dict[str, str]]:
    """Read name and options of "name" or "name:option=value,option=value"; escapes in values are expanded, but for
    ``extract``, whose regular expressions have escapes of their own.

    Raises:
        TilebeamError: an option without a value. (Whether there is such an option, `create` says.)
    """
    name, _, rest = text.partition(":")
    found: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise TilebeamError(f"{text!r}: {part!r} should be option=value.")
        found[key.strip()] = value if key.strip() == "extract" else unescaped(value)
    return name.strip(), found


_options = options  # create() has an argument of that name


def _class(name: str) -> type[Algorithm[SearchResult]]:
    return next(c for c in _CLASSES if c.name == canonical(name))


def _parameters(name: str) -> Mapping[str, tuple[Any, Any]]:
    """Return type and default of every argument."""
    init = _class(name).__init__
    hints = get_type_hints(init)
    return {p.name: (hints[p.name], p.default) for p in inspect.signature(init).parameters.values() if p.name != "self"}


def _choices(hint: Any) -> list[Any]:
    """Return the types that an argument takes."""
    return list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]


def _in_words(hint: Any) -> str:
    words = {int: "whole number", float: "number", bool: "true or false", str: "text", Extractor: "extractor"}
    words |= {Equal: "function of two answers"}
    found = []
    for kind in _choices(hint):
        if get_origin(kind) is Literal:
            found += [str(value) for value in get_args(kind)]
        elif kind is not type(None) and not (kind is str and Extractor in _choices(hint)):
            found.append(words.get(kind) or str(kind))
    return ", ".join(found)


def _read(name: str, key: str, value: Any, hint: Any) -> Any:
    """Read a value, which may be a text. What the class itself checks is left to it."""
    kinds = _choices(hint)
    functions = Extractor in kinds or Equal in kinds
    if functions and not isinstance(value, str) and value is not None and not callable(value):
        raise TilebeamError(f"{name}: {key} takes {_in_words(hint)}, not {value!r}.")
    if Extractor in kinds and isinstance(value, str):
        return extractor(value)
    if not isinstance(value, str) or str in kinds or any(get_origin(k) is Literal for k in kinds):
        return value
    readers: dict[Any, Callable[[str], Any]] = {int: int, float: float, bool: _truth}
    for kind in kinds:
        if kind in readers:
            try:
                return readers[kind](value)
            except ValueError:
                continue
    raise TilebeamError(f"{name}: {key} takes {_in_words(hint)}, not {value!r}.")


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise ValueError(text)
    return text.lower() in ("true", "1", "yes")
