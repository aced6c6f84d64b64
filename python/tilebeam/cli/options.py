"""Options that several commands share: their typer declarations in one place, and groups of them (see `grouped`).

Names are llama.cpp's where it has them. Choices and defaults are those of `SamplingParams` and of `tilebeam.load`.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilebeam.chat.thoughts import has_thoughts
from tilebeam.cli import console
from tilebeam.cli.read_prompts import prompts
from tilebeam.errors import TilebeamError
from tilebeam.gguf.option_groups import grouped as grouped
from tilebeam.gguf.option_groups import option as option
from tilebeam.gguf.whole_file import check_target
from tilebeam.model.load_options import MAX_DEVICES, MAX_SEQUENCES, Device, KvType, LoadOptions
from tilebeam.native.npu_options import Executor
from tilebeam.sampling_params import ANSWER_TOKENS, SamplingParams
from tilebeam.text_files import unescaped

if TYPE_CHECKING:
    from tilebeam.evaluation.question_files import UserQuestion
    from tilebeam.evaluation.tasks.task import Task
    from tilebeam.model.lm import LM
    from tilebeam.prompt import Prompt as Asked

_of_models = partial(typer.Option, rich_help_panel="Model")
_of_samples = partial(typer.Option, rich_help_panel="Sampling")
model_option = partial(option, rich_help_panel="Model")
drawing_option = partial(option, rich_help_panel="Sampling")

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

# --- the model --------------------------------------------------------------------------------------------------------

Model = Annotated[
    Path, typer.Option("-m", "--model", help="GGUF file, ordinary or from gguf-repack.", show_default=False)
]
NamedModels = Annotated[
    list[str], typer.Option("-m", "--model", help="GGUF file, or NAME=FILE; repeat for several.", show_default=False)
]


Threads = Annotated[int | None, _of_models("-t", "--threads", min=1, help="Worker threads; default: all usable cores.")]
ExecutorOption = Annotated[
    Executor | None,
    _of_models("--executor", help="The device as threads, as a process, or as Hexagon code in an emulator."),
]
Devices = Annotated[
    int | None,
    _of_models(
        "--devices", min=1, max=MAX_DEVICES, help="Devices to spread the model over; default: one, or as needed."
    ),
]
MemoryLimit = Annotated[
    str | None,
    _of_models("--memory-limit", help="Address space of a device, such as 2GiB, or a list such as 2GiB,4GiB."),
]


Deterministic = Annotated[
    bool,
    _of_models(
        "--deterministic",
        help="The same bits whatever else runs, for however many samples; slower, and guesses nothing.",
    ),
]
CtxSize = Annotated[
    int, _of_models("-c", "--ctx-size", min=1, help="KV cells, shared by all sequences; 256 or a multiple.")
]
Sequences = Annotated[
    int, _of_models("-np", "--parallel", min=1, max=MAX_SEQUENCES, help="Samples that decode together.")
]


def check_npu_only(options: Mapping[str, object], npu: bool) -> None:
    """Raise `TilebeamError` if options were given that only Tilebeam has, and nothing runs there.

    Args:
        options: their values by their names.
    """
    if not npu and (given := [name for name, value in options.items() if value is not None]):
        raise TilebeamError(f"{', '.join(given)}: for Tilebeam only, which --device cpu leaves aside.")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of the device and of how models run on it."""

    device: Device = model_option(
        LoadOptions.device,
        "--device",
        "-dev",
        help="tilebeam (or npu); cpu: llama.cpp's own CPU backend; auto: tilebeam, unless the CPU backend alone is "
        "faster.",
    )
    n_gpu_layers: int = model_option(
        LoadOptions.n_gpu_layers,
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        min=-1,
        help="Layers on Tilebeam's device; -1: all.",
    )
    flash_attn: bool = model_option(
        LoadOptions.flash_attn, "-fa/-nofa", "--flash-attn/--no-flash-attn", help="Flash attention."
    )
    threads: Threads = LoadOptions.threads
    executor: ExecutorOption = LoadOptions.executor
    devices: Devices = LoadOptions.devices
    memory_limit: MemoryLimit = None
    type_k: KvType = model_option(LoadOptions.type_k, "-ctk", "--cache-type-k", help="KV cache type for K.")
    type_v: KvType = model_option(LoadOptions.type_v, "-ctv", "--cache-type-v", help="KV cache type for V.")
    cache_ram: str = model_option(
        str(LoadOptions.cache_ram),
        "--cache-ram",
        "-cram",
        help="MiB, or a size such as 2GiB, for states that prompts of models with recurrent layers go on from; 0: "
        "none.",
    )
    packed_cache: str | None = model_option(
        LoadOptions.packed_cache,
        "--packed-cache",
        metavar="SIZE",
        help="Keep packed files for the next load, up to this size in all, such as 20GiB; 0: none.",
    )
    swa_full: bool | None = model_option(
        LoadOptions.swa_full,
        "--swa-full/--no-swa-full",
        help="KV cells of sliding windows: as many as other layers have, or for the windows; by memory if not given.",
    )
    deterministic: Deterministic = LoadOptions.deterministic

    def arguments(self) -> dict[str, Any]:
        """Return them as arguments of `tilebeam.load`.

        Raises:
            TilebeamError: the CPU backend is asked for, and something that only Tilebeam has.
        """
        npu_only = {"--executor": self.executor, "--devices": self.devices, "--memory-limit": self.memory_limit}
        check_npu_only(npu_only | {"--deterministic": self.deterministic or None}, self.device != "cpu")
        return vars(self) | {"memory_limit": self.memory_limit.split(",") if self.memory_limit else None}


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Adapters of the model; a reward model or judge beside it has none."""

    lora: list[str] | None = model_option(None, metavar="FILE,...", help="LoRA adapters (GGUF); repeatable.")
    lora_scaled: list[str] | None = model_option(
        None, metavar="FILE:SCALE,...", help="LoRA adapters with a scale each; repeatable."
    )

    def adapters(self) -> list[tuple[str, float]]:
        """Return files and scales, from options that each take a comma-separated list (in quotes where a name has a
        comma).

        Raises:
            TilebeamError: a scale is missing or no number.
        """
        found = [(name, 1.0) for given in self.lora or [] for name in _listed(given)]
        for entry in (entry for given in self.lora_scaled or [] for entry in _listed(given)):
            name, colon, scale = entry.rpartition(":")
            try:
                found.append((name, float(scale)))
            except ValueError:
                colon = ""
            if not name or not colon:
                raise TilebeamError(f"--lora-scaled takes FILE:SCALE, for instance adapter.gguf:0.5, not {entry!r}.")
        return found


def check_gguf(out: Path, what: str) -> None:
    """Check that a GGUF file can be written there, before the work that makes it.

    Raises:
        TilebeamError, OSError: it cannot.
    """
    if out.suffix != ".gguf":
        raise TilebeamError(f"The {what} is written as a GGUF file: {out} should end in .gguf.")
    check_target(out)


def named_file(given: str) -> tuple[str, str]:
    """Name and path of a model given as NAME=FILE or as FILE, whose name is the file's without its suffix."""
    name, equals, path = given.partition("=")
    return (name, path) if equals and not Path(given).exists() else (Path(given).stem, given)


def _listed(given: str) -> list[str]:
    return next(csv.reader([given]), [])


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """Guessing tokens ahead."""

    draft: Path | None = model_option(
        None,
        "--draft",
        "-md",
        help="What guesses tokens ahead: a small GGUF model with the same vocabulary, or a draft head of the model.",
        show_default=False,
    )
    lookup: bool | None = model_option(
        LoadOptions.lookup,
        "--lookup/--no-lookup",
        help="Guess tokens ahead from the prompt, the other samples and earlier texts; default: while at most four "
        "samples decode together, without --draft.",
        show_default=False,
    )
    no_speculation: bool = model_option(
        False, "--no-speculation", help="Guess nothing, neither by --draft nor by --lookup."
    )

    def arguments(self) -> dict[str, Any]:
        """Return them as arguments of `tilebeam.load`."""
        return {"draft": None, "lookup": False} if self.no_speculation else {"draft": self.draft, "lookup": self.lookup}


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model, and how it runs."""

    model: Model
    lora: LoraOptions
    speculation: SpeculationOptions
    run: RunOptions
    ctx_size: CtxSize = LoadOptions.n_ctx
    parallel: Sequences = LoadOptions.n_seq_max

    def load(self, sequences: int, *, hidden_layer: int | None = LoadOptions.hidden_layer) -> LM:
        """Load the model, with slots for so many sequences, but no more than were asked for; print what was loaded.

        Args:
            hidden_layer: see `tilebeam.load`.
        """
        from tilebeam.model.loader import load

        arguments, lora = self.run.arguments() | self.speculation.arguments(), self.lora.adapters()
        slots = min(self.parallel, sequences)
        arguments |= {"n_ctx": self.ctx_size, "n_seq_max": slots, "lora": lora, "hidden_layer": hidden_layer}
        with console.loading(str(self.model)) as show:
            lm = load(self.model, progress=show, **arguments)
        console.err().print(console.about(lm), style="dim")
        if self.ctx_size < 256 <= lm.n_ctx:
            console.err().print(f"-c {self.ctx_size}: a context has at least {lm.n_ctx} cells", style="dim")
        return lm


# --- prompts ----------------------------------------------------------------------------------------------------------

Prompt = Annotated[str | None, typer.Option("-p", "--prompt", help="The prompt; - reads it from stdin.")]
PromptsFile = Annotated[
    Path | None,
    typer.Option(
        "-f", "--file", help="Prompts: a .jsonl file with a prompt, question, problem or messages a line, or one text."
    ),
]


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """The prompts."""

    prompt: Prompt = None
    file: PromptsFile = None
    field: str | None = option(None, help="What the lines of a .jsonl file call the question.")
    escape: bool = option(
        True, "--escape/--no-escape", "-e", help="Expand \\n, \\t, \\\\ and \\x41 in -p and --stop, as llama.cpp does."
    )
    chat: bool | None = option(
        None,
        "--chat/--no-chat",
        "-cnv/-no-cnv",
        " /--raw",
        help="Wrap the prompt in the model's chat template, or take it as it is; default: if the file has one.",
        show_default=False,
    )

    def chats(self, lm: LM) -> bool:
        """Tell whether prompts go through the chat template: as was said, else if the model has one, and say so."""
        if self.chat is None and lm.chat_template is not None:
            console.err().print("chat template applied; --raw turns it off", style="dim")
        return lm.chat_template is not None if self.chat is None else self.chat

    def read(self) -> list[UserQuestion]:
        """Read the prompts, without the chat template.

        Raises:
            TilebeamError: as `tilebeam.cli.read_prompts.prompts`.
        """
        return prompts(self.prompt, self.file, self.escape, self.field)


# --- programs ---------------------------------------------------------------------------------------------------------

Programs = Annotated[
    bool,
    typer.Option(
        "--programs",
        help="Run the last block of Python in each text, confined, and take what it prints as the text's answer; where "
        "the words say the same, it counts twice.",
    ),
]
UnsafeCode = Annotated[
    bool, typer.Option("--unsafe-code", help="Run programs that a model wrote even where they cannot be confined.")
]

# --- sampling ---------------------------------------------------------------------------------------------------------


NPredict = Annotated[int | None, _of_samples("-n", "--n-predict", min=1, help="Most tokens per sample.")]

Stop = Annotated[list[str] | None, _of_samples("--stop", help="End a sample at this text (\\n allowed); repeatable.")]
Seed = Annotated[int | None, _of_samples("-s", "--seed", min=0, help="Repeat a run; default: a new one, printed.")]


@dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """Options of thoughts, which come before an answer."""

    reasoning_budget: int = drawing_option(
        -1, min=-1, help="Most tokens of thoughts, then the model answers; 0: none, -1: any number."
    )
    reasoning_budget_message: str = drawing_option(
        SamplingParams.budget_message, help="Text that ends thoughts at their budget (\\n allowed)."
    )

    def fields(self, escape: bool = True) -> dict[str, Any]:
        """Return them as fields of `SamplingParams`; `escape`: as for `TextOptions`."""
        message = unescaped(self.reasoning_budget_message) if escape else self.reasoning_budget_message
        told: dict[str, Any] = {"budget_message": message} if message else {}
        return told if self.reasoning_budget < 0 else told | {"thinking_budget": self.reasoning_budget}


@dataclass(frozen=True, kw_only=True)
class ForcingOptions(BudgetOptions):
    """Options of what is forced upon a text."""

    force_answer: str = drawing_option(
        SamplingParams.force_answer,
        help="Text that a sample goes on with which is about to be cut without an answer (\\n allowed), such as "
        f"'\\n\\nThe answer is \\boxed{{'; it comes {ANSWER_TOKENS} tokens before the end.",
    )

    def fields(self, escape: bool = True) -> dict[str, Any]:
        """Return them as fields of `SamplingParams`; only those that say something, as they name an evaluation."""
        answer = unescaped(self.force_answer) if escape else self.force_answer
        return super().fields(escape) | ({"force_answer": answer} if answer else {})


def tell_thoughtless(params: SamplingParams, template: str | None) -> None:
    """Say that a budget of thoughts has no effect where the chat template has none."""
    if params.thinking_budget is not None and not has_thoughts(template or ""):
        what = "--reasoning-budget has no effect: the chat template of this model tells nothing of thoughts"
        console.err().print(what, style="yellow")


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """Options of drawing a token."""

    temp: float = drawing_option(SamplingParams.temperature, min=0.0, help="Temperature; 0 is greedy.")
    top_p: float = drawing_option(SamplingParams.top_p, help="Likeliest tokens up to this probability; 1 is off.")
    top_k: int = drawing_option(SamplingParams.top_k, min=0, help="The k likeliest tokens; 0 is off.")
    min_p: float = drawing_option(SamplingParams.min_p, help="Tokens this likely relative to the best; 0 is off.")

    def fields(self) -> dict[str, Any]:
        """Return them as fields of `SamplingParams`."""
        return {"temperature": self.temp, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Options of drawing a text."""

    tokens: TokenOptions
    n_predict: int | None = drawing_option(
        None,
        "-n",
        "--n-predict",
        min=-2,
        help="Most tokens per sample; -1 or -2: until the context is full. Default: a sample's share of the context, "
        "in a chat at least 1024.",
        show_default=False,
    )
    stop: Stop = None
    forcing: ForcingOptions

    def fields(self, escape: bool = True) -> dict[str, Any]:
        """Return them as fields of `SamplingParams`.

        Args:
            escape: expand escapes in stop strings and forced texts.
        """
        stop = [unescaped(s) if escape else s for s in self.stop or []]
        most = None if self.n_predict in (-1, -2) else self.n_predict
        return self.tokens.fields() | self.forcing.fields(escape) | {"max_tokens": most, "stop": stop}


@dataclass(frozen=True, kw_only=True)
class TaskTextOptions(TextOptions):
    """The same for a task, whose own length and stop strings hold unless others are given."""

    n_predict: NPredict = None

    def sampling(self, task: Task) -> dict[str, Any]:
        """Return them as fields of `SamplingParams`, filled in by the task."""
        own = {"max_tokens": task.defaults.max_tokens, "stop": list(task.defaults.stop)}
        found = self.fields()
        return found | {name: value for name, value in own.items() if not found[name]}


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options of drawing samples."""

    text: TextOptions
    seed: Seed = None

    def params(self, n: int = 1, escape: bool = True) -> SamplingParams:
        """Return them as `SamplingParams`, with a seed.

        Args:
            n: samples per prompt.
            escape: expand escapes in stop strings.
        """
        return SamplingParams(n=n, seed=self.seed, **self.text.fields(escape)).resolved()

    def fitted(self, params: SamplingParams, lm: LM, prompts: Sequence[Asked], samples: int) -> SamplingParams:
        """Return the parameters with the length that fits `samples` of each prompt, if none was given."""
        from tilebeam.search.limits import CHAT_TOKENS, share_of_context

        if self.text.n_predict is not None:
            return params
        at_least = CHAT_TOKENS if all(p.token_ids is not None for p in prompts) else 1
        ids = [p.tokens(lm) for p in prompts]
        return replace(params, max_tokens=share_of_context(lm.n_ctx, lm.n_seq_max, ids, samples, at_least))
