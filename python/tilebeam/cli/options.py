"""Options that several commands share: their typer declarations in one place, and groups of them.

A group is a dataclass whose fields are declared as options. A command takes it as one parameter and gets it filled in:

    @grouped
    def beam(model: ModelOptions, drawing: SamplingOptions, width: Annotated[int, typer.Option(..)] = 4) -> None: ...

Names are llama.cpp's where it has them.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from tilebeam.cli import console
from tilebeam.cli.prompts import prompts
from tilebeam.errors import TilebeamError
from tilebeam.text_files import unescaped

if TYPE_CHECKING:
    from tilebeam.model.lm import LM
    from tilebeam.sampling_params import SamplingParams

R = TypeVar("R")

MODEL_PANEL = "Model"
_DRAWING = "Sampling"


class Device(StrEnum):
    """Where a model runs."""

    npu = "npu"
    cpu = "cpu"


class Executor(StrEnum):
    """How the NPU runs."""

    thread = "thread"
    process = "process"
    qemu_hexagon = "qemu-hexagon"


class CacheType(StrEnum):
    """Types of the KV cache."""

    f16 = "f16"
    f32 = "f32"
    q8_0 = "q8_0"


Model = Annotated[
    Path, typer.Option("-m", "--model", help="GGUF file, ordinary or from gguf-repack.", show_default=False)
]
Prompt = Annotated[str | None, typer.Option("-p", "--prompt", help="The prompt; - reads it from stdin.")]
PromptsFile = Annotated[
    Path | None, typer.Option("-f", "--file", help='Prompts: a .jsonl file of {"prompt": ..}, or one text.')
]
Escape = Annotated[
    bool,
    typer.Option(
        "--escape/--no-escape",
        "-e",
        help="Expand \\n, \\t, \\\\ and \\x41 in -p and --stop, as llama.cpp does.",
    ),
]
Chat = Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")]
Budget = Annotated[int, typer.Option("-N", "--n-samples", "--budget", min=1, help="Candidates per prompt.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

NPredict = Annotated[
    int, typer.Option("-n", "--n-predict", min=1, help="Most tokens per sample.", rich_help_panel=_DRAWING)
]
Temp = Annotated[float, typer.Option("--temp", min=0.0, help="Temperature; 0 is greedy.", rich_help_panel=_DRAWING)]
TopP = Annotated[
    float,
    typer.Option("--top-p", help="Likeliest tokens up to this probability; 1 is off.", rich_help_panel=_DRAWING),
]
TopK = Annotated[
    int, typer.Option("--top-k", min=0, help="The k likeliest tokens; 0 is off.", rich_help_panel=_DRAWING)
]
MinP = Annotated[
    float, typer.Option("--min-p", help="Tokens this likely relative to the best; 0 is off.", rich_help_panel=_DRAWING)
]
Seed = Annotated[
    int | None,
    typer.Option("-s", "--seed", min=0, help="Repeat a run; default: a new one, printed.", rich_help_panel=_DRAWING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", help="End a sample at this text (\\n allowed); repeatable.", rich_help_panel=_DRAWING),
]

DeviceOption = Annotated[
    Device,
    typer.Option("--device", help="npu: Tilebeam; cpu: llama.cpp's own CPU backend.", rich_help_panel=MODEL_PANEL),
]
Threads = Annotated[
    int | None,
    typer.Option("-t", "--threads", min=1, help="Worker threads; default: all CPUs.", rich_help_panel=MODEL_PANEL),
]
CtxSize = Annotated[
    int, typer.Option("-c", "--ctx-size", min=1, help="KV cells, shared by all sequences.", rich_help_panel=MODEL_PANEL)
]
Sequences = Annotated[
    int,
    typer.Option(
        "-np", "--parallel", min=1, max=256, help="Samples that decode together.", rich_help_panel=MODEL_PANEL
    ),
]
ExecutorOption = Annotated[
    Executor | None,
    typer.Option(
        "--executor",
        help="NPU as threads, as a process, or as Hexagon code in an emulator.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Devices = Annotated[
    int | None,
    typer.Option(
        "--devices",
        min=1,
        max=15,
        help="NPU sessions to spread the model over; default: one, or as needed.",
        rich_help_panel=MODEL_PANEL,
    ),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        help="Address space of a session, such as 2GiB, or a list such as 2GiB,4GiB.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Lora = Annotated[
    list[str] | None,
    typer.Option("--lora", metavar="FILE,...", help="LoRA adapters (GGUF); repeatable.", rich_help_panel=MODEL_PANEL),
]
LoraScaled = Annotated[
    list[str] | None,
    typer.Option(
        "--lora-scaled",
        metavar="FILE:SCALE,...",
        help="LoRA adapters with a scale each; repeatable.",
        rich_help_panel=MODEL_PANEL,
    ),
]


CacheTypeK = Annotated[
    CacheType, typer.Option("-ctk", "--cache-type-k", help="KV cache type for K.", rich_help_panel=MODEL_PANEL)
]
CacheTypeV = Annotated[
    CacheType, typer.Option("-ctv", "--cache-type-v", help="KV cache type for V.", rich_help_panel=MODEL_PANEL)
]


def check_npu_options(device: Device, executor: Executor | None, devices: int | None, memory_limit: str | None) -> None:
    """Raise `TilebeamError` if the CPU backend is asked for, and something that only the NPU has."""
    given = {"--executor": executor, "--devices": devices, "--memory-limit": memory_limit}
    if device is Device.cpu and (said := [name for name, value in given.items() if value is not None]):
        raise TilebeamError(f"{', '.join(said)}: for the NPU only, which --device cpu leaves aside.")


def adapters(lora: list[str] | None, lora_scaled: list[str] | None) -> list[tuple[str, float]]:
    """LoRA files and scales, from options that each take a comma-separated list (in quotes where a name has a comma).

    Raises:
        TilebeamError: a scale is missing or no number.
    """
    found = [(name, 1.0) for given in lora or [] for name in _listed(given)]
    for entry in (entry for given in lora_scaled or [] for entry in _listed(given)):
        name, colon, scale = entry.rpartition(":")
        try:
            found.append((name, float(scale)))
        except ValueError:
            colon = ""
        if not name or not colon:
            raise TilebeamError(f"--lora-scaled takes FILE:SCALE, for instance adapter.gguf:0.5, not {entry!r}.")
    return found


def _listed(given: str) -> list[str]:
    return next(csv.reader([given]), [])


@dataclass(frozen=True)
class ModelOptions:
    """The model, and how it runs."""

    model: Model
    device: DeviceOption = Device.npu
    threads: Threads = None
    ctx_size: CtxSize = 4096
    parallel: Sequences = 16
    executor: ExecutorOption = None
    devices: Devices = None
    memory_limit: MemoryLimit = None
    lora: Lora = None
    lora_scaled: LoraScaled = None

    def load(self, sequences: int) -> LM:
        """The model, with slots for so many sequences, but no more than were asked for; says what it loaded."""
        from tilebeam.model.loader import load

        check_npu_options(self.device, self.executor, self.devices, self.memory_limit)
        with console.loading(str(self.model)):
            lm = load(
                self.model,
                n_ctx=self.ctx_size,
                n_seq_max=min(self.parallel, sequences),
                devices=self.devices,
                memory_limit=self.memory_limit.split(",") if self.memory_limit else None,
                lora=adapters(self.lora, self.lora_scaled),
                **self.running(),
            )
        console.err().print(console.about(lm), style="dim")
        return lm

    def running(self) -> dict[str, Any]:
        """Where and how it runs, for `tilebeam.load`: what a second model beside it has, too."""
        executor = self.executor.value if self.executor else None
        return {"device": self.device.value, "threads": self.threads, "executor": executor}


@dataclass(frozen=True)
class PromptOptions:
    """The prompts."""

    prompt: Prompt = None
    file: PromptsFile = None
    escape: Escape = True
    chat: Chat = False

    def read(self) -> list[str]:
        """The prompts, without the chat template.

        Raises:
            TilebeamError: as `tilebeam.cli.prompts.prompts`.
        """
        return prompts(self.prompt, self.file, self.escape)


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn."""

    n_predict: NPredict = 256
    temp: Temp = 0.8
    top_p: TopP = 0.95
    top_k: TopK = 40
    min_p: MinP = 0.0
    seed: Seed = None
    stop: Stop = None

    def params(self, n: int = 1, escape: bool = True) -> SamplingParams:
        """What they mean, with a seed.

        Args:
            n: samples per prompt.
            escape: expand escapes in stop strings.
        """
        from tilebeam.sampling_params import SamplingParams

        return SamplingParams(
            n=n,
            temperature=self.temp,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_tokens=self.n_predict,
            stop=[unescaped(s) if escape else s for s in self.stop or []],
            seed=self.seed,
        ).resolved()


def grouped(command: Callable[..., R]) -> Callable[..., R]:
    """Let a command take groups: typer sees their fields as options, the command gets the dataclasses."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    fields: dict[str, inspect.Parameter] = {}
    for parameter in inspect.signature(command).parameters.values():
        for field in _fields(groups[parameter.name]) if parameter.name in groups else [parameter]:
            annotation = hints[parameter.name] if field is parameter else field.annotation
            if field.name in fields:
                raise TypeError(f"{command.__name__} has two options {field.name}.")
            fields[field.name] = field.replace(annotation=annotation, kind=inspect.Parameter.KEYWORD_ONLY)

    @functools.wraps(command)
    def run(**given: Any) -> R:
        for name, group in groups.items():
            given[name] = group(**{f.name: given.pop(f.name) for f in _fields(group)})
        return command(**given)

    run.__signature__ = inspect.Signature(list(fields.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: field.annotation for name, field in fields.items()}
    return run


def _fields(group: Any) -> list[inspect.Parameter]:
    """The fields of a group as parameters."""
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if f.default is dataclasses.MISSING else f.default,
            annotation=hints[f.name],
        )
        for f in dataclasses.fields(group)
    ]
