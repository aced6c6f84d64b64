"""What an evaluation is: its setting, the digest that names it, and the units of work that it consists of.

Logits depend, in their last bits, on what shares a batch. A unit is therefore a fixed list of items that run together,
beginning with an empty KV cache, and what comes out depends on the setting alone: not on the units before it, on the
process it runs in, or on whether the run was interrupted.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tilebeam._version import __version__
from tilebeam.errors import TilebeamError
from tilebeam.evaluation import named_scorers as scoring
from tilebeam.evaluation.functions import is_function_name
from tilebeam.evaluation.task_options import SEEDS, UNIT_ITEMS, TaskOptions
from tilebeam.evaluation.tasks import KINDS
from tilebeam.model.load_options import LoadOptions
from tilebeam.search import algorithms as methods
from tilebeam.search.tool_reasoning import ToolReasoning

SAMPLED = ("best-of-n", "self-consistency")  # all budgets of these come out of one run of N samples
# One answer at temperature 0, as most people ask for: what every search is compared with. No budget or seed changes it.
GREEDY = "greedy"


def versions() -> dict[str, str]:
    """Return the versions of what a run depends on."""
    return {"tilebeam": __version__, "llama-cpp-python": importlib.metadata.version("llama-cpp-python")}


class Named(ABC):
    """What all records of a log depend on."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON, which also shows what differs."""

    @property
    def digest(self) -> str:
        """SHA-256 of all of it."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class ModelFile:
    """A model by name.

    Attributes:
        name: in reports.
        path: where the file is; not part of the setting.
        fingerprint: of its content, see `fingerprint`.
    """

    name: str
    path: str
    fingerprint: str


@dataclass(frozen=True)
class Method:
    """A search method and its options.

    Attributes:
        name: as `tilebeam.search.algorithms` knows it, or `GREEDY`.
        options: of the algorithm, as texts.
        spec: as the user wrote it.
        label: in reports: the name, or the spec if several methods have that name or votes have options.
    """

    name: str
    options: Mapping[str, str]
    spec: str
    label: str

    @property
    def sampled(self) -> bool:
        """Return whether its budgets come out of one run of samples; with options it runs at every budget, like a
        search by steps."""
        return self.name in SAMPLED and not self.options


@dataclass(frozen=True)
class Setting(Named):
    """All that results depend on.

    Attributes:
        models: files; every one runs on every device.
        devices: "npu", "cpu".
        task: options; task_digest: of prompts, answers and judges.
        methods, budgets: what is evaluated, budgets in rising order.
        scorers: names, see `tilebeam.evaluation.named_scorers`; sources: digests of those that are functions.
        reward: what the reward model is.
        seeds: every item is run once with each.
        sampling: fields of `SamplingParams` but n, seed and logprobs.
        n_ctx, n_seq_max, threads, executor: how models are loaded.
        deterministic: results do not depend on what else is computed; on the CPU models cannot be loaded so.
        unit_items: items of a unit.
        versions: of Tilebeam and what it computes with.
    """

    models: tuple[ModelFile, ...]
    devices: tuple[str, ...]
    task: TaskOptions
    task_digest: str
    methods: tuple[str, ...]
    budgets: tuple[int, ...]
    scorers: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    reward: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = SEEDS
    sampling: Mapping[str, Any] = field(default_factory=dict)
    n_ctx: int = LoadOptions.n_ctx
    n_seq_max: int = LoadOptions.n_seq_max
    threads: int = 1
    executor: str | None = None
    deterministic: bool = False
    unit_items: int = UNIT_ITEMS
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise `TilebeamError` for what cannot be run."""
        for name in ("models", "devices", "methods", "budgets", "seeds"):
            values = getattr(self, name)
            keys = [m.name for m in values] if name == "models" else list(values)
            if not keys:
                raise TilebeamError(f"An evaluation needs at least one of its {name}.")
            if len(set(keys)) != len(keys):
                raise TilebeamError(f"The {name} must differ: {', '.join(map(str, keys))}.")
        if min(self.budgets) < 1 or list(self.budgets) != sorted(self.budgets):
            raise TilebeamError(f"Budgets must be whole numbers of at least 1 in rising order, not {self.budgets}.")
        if self.unit_items < 1:
            raise TilebeamError(f"A unit must have at least one item, not {self.unit_items}.")

    @property
    def n_samples(self) -> int:
        """Samples of the run from which all budgets come."""
        return self.budgets[-1]

    def parsed_methods(self) -> list[Method]:
        """Parse the methods.

        Raises:
            TilebeamError: there is no such method; options are checked when it is made.
        """
        parsed = [methods.parse(spec) for spec in self.methods]
        names = [methods.canonical(name, GREEDY) for name, _ in parsed]
        if ToolReasoning.name in names:
            raise TilebeamError("Programs in samples are run for all methods alike: use --tir, not --method tir.")
        return [
            Method(name, options, spec, spec if names.count(name) > 1 or (name in SAMPLED and options) else name)
            for name, (_, options), spec in zip(names, parsed, self.methods, strict=True)
        ]

    def scorers_of(self, method: Method) -> list[str]:
        """List the scorers that a method is run with, "" for none.

        Best-of-n takes every one, self-consistency those that can weigh votes and none (with options all but the
        verifier, whose votes would be its own verdict), a search by steps those that rate steps; what runs without a
        scorer does.
        """
        if method.name == GREEDY:
            return [""]
        if method.name == "best-of-n":
            return list(self.scorers)
        if method.name == "self-consistency":
            others = [name for name in self.scorers if name != scoring.VERIFIER]
            return ["", *filter(scoring.is_weight, others)] if method.sampled else others
        try:
            methods.create(method.name, **method.options)
        except TilebeamError:
            return [name for name in self.scorers if scoring.rates_steps(name)]
        return [""]

    def series(self, method: Method, scorer: str = "") -> str:
        """Name a method with its scorer as reports do: "beam[prm]"; functions go by their own name if that tells them
        apart."""
        if not scorer:
            return method.label
        short = [s.rpartition(":")[2] for s in self.scorers]
        own = scorer.rpartition(":")[2]
        return f"{method.label}[{own if short.count(own) == 1 else scorer}]"

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON. Where files lie is left out: digests tell what is in them."""
        result = asdict(self)
        for model in result["models"]:
            del model["path"]
        if not self.deterministic:
            del result["deterministic"]
        # Earlier versions had these, too: their logs stay those of the same setting.
        task = result["task"] = {"item_seed": 1, "shot_seed": 777, "prefix": "", "question": None} | result["task"]
        for key in ("spec", "shots_file", "checker", "extract"):
            if task[key] is not None:
                task[key] = _without_folder(task[key])
        for key, unsaid in (("tir", False), ("programs", False), ("field", None), ("tools_grammar", True)):
            if task[key] == unsaid:
                del task[key]
        plain: dict[str, Any] = json.loads(json.dumps(result))
        return plain


def _without_folder(text: str) -> str:
    """Turn "gsm8k:a/b.jsonl", "a/b.jsonl" and "a/b.py:f" into what they are without a/; leave other texts."""
    kind, colon, rest = text.partition(":")
    if kind in KINDS and colon:
        return f"{kind}:{Path(rest).name}"
    if text.endswith((".jsonl", ".jsonl.gz")) or is_function_name(text):
        return Path(text).name
    return text


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Tell what keeps a log of the old setting from going on with the new one, both as dicts, one phrase each.

    Methods that were added do not: they add units and change none.
    """
    found: list[str] = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b and not (key == "methods" and set(a or ()) <= set(b or ())):
            found.append(f"{prefix}{key} was {json.dumps(a)}, is {json.dumps(b)}")
    return found


@dataclass(frozen=True)
class Unit:
    """Items that run together from an empty cache.

    Attributes:
        model, device: which model, where.
        seed: what the items' seeds derive from.
        items: positions in the task, first .. last - 1.
        budget: candidates per item; of samples the greatest.
        method, scorer: of a search, as the setting spells them, or `GREEDY`; "" for samples.
        series: what reports call it.
    """

    model: str
    device: str
    seed: int
    first: int
    last: int
    budget: int
    method: str = ""
    scorer: str = ""
    series: str = "samples"

    @property
    def key(self) -> str:
        """Unique in an evaluation, whichever methods it has later: what reports call one depends on the others."""
        work = work_of(self.method, self.scorer) or self.series
        return f"{self.model}/{self.device}/{work}@{self.budget}/seed {self.seed}/{self.first}-{self.last - 1}"


def work_of(method: str, scorer: str) -> str:
    """Name what is done, by a method as the user wrote it."""
    return f"{method}[{scorer}]" if scorer else method


def units(setting: Setting, n_items: int) -> Iterator[Unit]:
    """Make all units of a task of `n_items`, in the order of reports."""
    spans = [(first, min(first + setting.unit_items, n_items)) for first in range(0, n_items, setting.unit_items)]
    parsed = setting.parsed_methods()
    searches = [
        (method.spec, scorer, setting.series(method, scorer))
        for method in parsed
        if not method.sampled and method.name != GREEDY
        for scorer in setting.scorers_of(method)
    ]
    for model, device in itertools.product((m.name for m in setting.models), setting.devices):
        if GREEDY in [method.name for method in parsed]:
            for first, last in spans:
                yield Unit(model, device, setting.seeds[0], first, last, 1, GREEDY, series=GREEDY)
        if setting.methods == (GREEDY,):
            continue
        for seed, (first, last) in itertools.product(setting.seeds, spans):
            yield Unit(model, device, seed, first, last, setting.n_samples)
        for search, budget, seed, span in itertools.product(searches, setting.budgets, setting.seeds, spans):
            yield Unit(model, device, seed, *span, budget, *search)


def item_seed(seed: int, item_id: str) -> int:
    """Derive the seed of an item's samples: items draw independently of each other."""
    name = f"{seed}/{item_id}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.sha256(name).digest()[:4]) % (2**32 - 1)
