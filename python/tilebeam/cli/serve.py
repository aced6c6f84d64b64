"""`tilebeam serve`: its options, named as llama-server names them, and what becomes of them."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilebeam.cli import console
from tilebeam.cli.options import (
    BudgetOptions,
    CtxSize,
    LoraOptions,
    NamedModels,
    RunOptions,
    Sequences,
    SpeculationOptions,
    TokenOptions,
    drawing_option,
    grouped,
    model_option,
    named_file,
    option,
    tell_thoughtless,
)
from tilebeam.cli.reward_options import STEP_STOP_TEXT, RewardModelOptions, StepStop
from tilebeam.errors import TilebeamError, gguf_errors
from tilebeam.model.load_options import LoadOptions
from tilebeam.sampling_params import SamplingParams
from tilebeam.server.logs import LogFormat
from tilebeam.server.settings import ReasoningFormat, Settings
from tilebeam.text_files import read_text, unescaped

if TYPE_CHECKING:
    from tilebeam.server.model_host import LoadedModel
    from tilebeam.server.models import Models

log = logging.getLogger("tilebeam.server")

_limit = partial(option, rich_help_panel="Queue and limits")
_access = partial(option, rich_help_panel="Who may ask")
_logs = partial(option, rich_help_panel="Logs")
_KEY_VARIABLE = "TILEBEAM_API_KEY"
_CTX_SIZE = 8192  # conversations of several clients share the cells: more than for one program's own calls


@dataclass(frozen=True, kw_only=True)
class ModelsOptions:
    """The models, and how they run."""

    model: NamedModels
    lora: LoraOptions
    speculation: SpeculationOptions
    alias: str | None = option(
        None,
        "-a",
        "--alias",
        help="Names of a single model in requests, comma separated; default: NAME, or FILE's name.",
    )
    run: RunOptions
    ctx_size: CtxSize = _CTX_SIZE
    parallel: Sequences = LoadOptions.n_seq_max
    batch_size: int = model_option(
        LoadOptions.n_batch, "-b", "--batch-size", min=1, help="Most tokens per llama_decode."
    )

    def named(self) -> list[tuple[tuple[str, ...], str]]:
        """Give names and file of each model.

        Raises:
            TilebeamError: one alias for several models.
        """
        models: list[tuple[tuple[str, ...], str]] = [((name,), path) for name, path in map(named_file, self.model)]
        if self.alias is None:
            return models
        if len(models) > 1:
            raise TilebeamError("--alias names one model: name several with -m NAME=FILE.")
        if not (names := tuple(part.strip() for part in self.alias.split(",") if part.strip())):
            raise TilebeamError(f"--alias {self.alias!r} is no name.")
        return [(names, models[0][1])]

    def shared(self) -> dict[str, Any]:
        """Give the arguments of `tilebeam.load` for every model."""
        slots = {"n_seq_max": self.parallel, "n_batch": max(self.batch_size, self.parallel)}
        return self.run.arguments() | {"n_ctx": self.ctx_size} | slots

    def own(self) -> dict[str, Any]:
        """Give the arguments of `tilebeam.load` that a reward model beside a model does not get.

        Raises:
            TilebeamError: there are several models, and one cannot be served or an option fits one only.
        """
        from tilebeam.gguf import open_gguf

        own = {"lora": self.lora.adapters(), **self.speculation.arguments()}
        if len(self.model) == 1:
            return own
        if own["lora"] or own["draft"]:
            raise TilebeamError(
                "--lora, --lora-scaled and --draft are made for one model: serve one, without a second -m."
            )
        for _, path in map(named_file, self.model):  # a model is loaded when it is asked for
            with gguf_errors(f"{path} cannot be served"), open_gguf(path):
                pass
        return own


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options of chats: their prompts, and the messages that texts become."""

    chat_template: str | None = option(
        None, help="A Jinja template, or the name of one of llama.cpp's (chatml, llama3 ..); default: the model's."
    )
    chat_template_kwargs: str = option(
        "{}",
        help="Variables of the chat template, as JSON: '{\"enable_thinking\": false}'. A request's own come first.",
    )
    reasoning_format: ReasoningFormat = option(
        Settings.reasoning_format,
        help="Thoughts of chats: apart from the text, in reasoning_content (deepseek, which auto is), or none.",
    )

    def settings(self) -> dict[str, Any]:
        """Give their fields of `Settings`.

        Raises:
            TilebeamError: the template or its variables are invalid; refused now, not in every answer.
        """
        from tilebeam.chat.chat_template import check_template

        try:
            variables = json.loads(self.chat_template_kwargs)
        except (ValueError, RecursionError):
            variables = None
        if not isinstance(variables, dict):
            raise TilebeamError(
                '--chat-template-kwargs must be a JSON object like {"enable_thinking": false}: '
                f"{self.chat_template_kwargs!r}"
            )
        if self.chat_template is not None:
            check_template(self.chat_template, variables)
        return vars(self) | {"chat_template_kwargs": variables}


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """Limits of the server, and how long it waits."""

    max_waiting: int = _limit(
        Settings.max_waiting, "--max-queue", min=0, help="Samples that may wait for a slot; then 429."
    )
    max_samples: int = _limit(Settings.max_samples, min=1, help="Samples of one request.")
    max_searches: int = _limit(Settings.max_searches, min=1, help="Searches at the same time.")
    programs: bool = _limit(
        Settings.programs,
        "--programs",
        help='Let searches run Python programs that the model writes, confined: method tir, "programs": true.',
    )
    max_body: int = _limit(Settings.max_body, min=1, help="Bytes of a request's body.")
    shutdown_seconds: float = _limit(
        Settings.shutdown_seconds, "--shutdown-timeout", min=0, help="Seconds that running requests have to finish."
    )


@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    """Whose requests are answered."""

    api_key: list[str] | None = _access(
        None,
        help=f"Requests must bring one of these keys; repeatable. Also from {_KEY_VARIABLE}, which other users of "
        "the machine do not see.",
    )
    api_key_file: Path | None = _access(None, help="A file with a key on each line.")
    cors_origin: list[str] | None = _access(None, help="A web page's origin that may ask from a browser; repeatable.")

    def settings(self) -> dict[str, Any]:
        """Give their fields of `Settings`.

        Raises:
            TilebeamError: an empty key, or a file without any: the server would be open to all.
        """
        keys = list(self.api_key or [])
        if (from_environment := os.environ.get(_KEY_VARIABLE)) is not None:
            keys.append(from_environment)
        if self.api_key_file is not None:
            lines = [line.strip() for line in read_text(self.api_key_file).splitlines()]
            if not any(lines):
                raise TilebeamError(f"{self.api_key_file} holds no API key.")
            keys += [line for line in lines if line]
        if not all(key.strip() for key in keys):
            raise TilebeamError(f"An API key (--api-key or {_KEY_VARIABLE}) is empty.")
        return {"api_keys": tuple(keys), "cors_origins": tuple(self.cors_origin or ())}


@dataclass(frozen=True, kw_only=True)
class DefaultOptions:
    """Defaults of requests that do not say how texts are drawn."""

    n_predict: int | None = drawing_option(
        None,
        "-n",
        "--n-predict",
        min=1,
        help="max_tokens of chats that do not say; default: until the context is full.",
    )
    drawing: TokenOptions
    thoughts: BudgetOptions

    def settings(self) -> dict[str, Any]:
        """Give their fields of `Settings`."""
        sampling = SamplingParams(**self.drawing.fields(), **self.thoughts.fields())
        return {"sampling": sampling, "max_tokens": self.n_predict}


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """What the server writes to stderr while it runs."""

    log_format: LogFormat = _logs("text", help="A line for each request, as text or as a JSON object.")
    quiet: bool = _logs(False, "-q", "--quiet", help="Log warnings and errors only.")
    verbose: bool = _logs(False, "-v", "--verbose", help="Log requests of /health and /metrics, too.")

    @property
    def level(self) -> int:
        """The least level that is logged."""
        return logging.WARNING if self.quiet else logging.DEBUG if self.verbose else logging.INFO


@grouped
def serve(
    *,
    models: ModelsOptions,
    host: str = option(Settings.host, help="Address to listen on; 0.0.0.0 is every one."),
    port: int = option(Settings.port, min=0, max=65535, help="0 lets the system choose."),
    chat: ChatOptions,
    cache_prompt: bool = option(
        True,
        "--cache-prompt/--no-cache-prompt",
        help="Keep the KV cells of finished requests while there is room: a conversation's next turn reads only "
        "what is new.",
    ),
    limits: LimitOptions,
    access: AccessOptions,
    defaults: DefaultOptions,
    reward_model: RewardModelOptions,
    step_stop: StepStop = STEP_STOP_TEXT,
    logs: LogOptions,
) -> None:
    """Serve models over HTTP: the APIs of OpenAI and Anthropic, with searches as an extension, and a page.

    Requests of all clients share batches. Of several models (-m repeated) each is loaded when a request names it.
    It answers on this machine only, unless --host says otherwise; then give it an --api-key.

    Example: tilebeam serve -m model.gguf --port 8080 & curl localhost:8080/v1/completions -d '{"prompt":
    "The capital of France is", "max_tokens": 8}'
    """
    from tilebeam.server import check_packages

    check_packages()
    from tilebeam.server import main as process
    from tilebeam.server.logs import log_to_stderr
    from tilebeam.server.security import is_loopback
    from tilebeam.server.served_model import ServedModel

    if limits.programs:
        from tilebeam.sandbox import need_confinement

        need_confinement()
    spec, shared = reward_model.read(), models.shared()
    more = {**vars(limits), **chat.settings(), **access.settings(), **defaults.settings()}
    settings = Settings(host=host, port=port, **more)
    named, own, stop = models.named(), models.own(), unescaped(step_stop)
    served = [ServedModel(names, path, shared, spec, stop, own, cache_prompt) for names, path in named]
    log_to_stderr(logs.log_format, logs.level)
    if not settings.api_keys and not is_loopback(settings.host):
        log.warning("anyone who can reach %s can send requests: no --api-key is set", settings.host)
    process.serve(served, settings, ready=_say_ready if logs.log_format == "text" else _log_ready)


def _say_ready(models: Models, loaded: LoadedModel | None, url: str) -> None:
    err = console.err()
    if loaded is None:
        names = ", ".join(service.name for service in models.services)
        err.print(f"models: {names}; each is loaded when it is asked for", style="dim", highlight=False)
    else:
        err.print(console.about(loaded.lm), style="dim", highlight=False)
        tell_thoughtless(models.settings.sampling, models.settings.chat_template or loaded.lm.chat_template)
        if loaded.scorer is not None:
            err.print(console.about_reward(loaded.scorer), style="dim", highlight=False)
    err.print(f"page: {url}/   API: {url}/v1", highlight=False, soft_wrap=True)


def _log_ready(models: Models, _: LoadedModel | None, url: str) -> None:
    from tilebeam.server.logs import tell

    names = [service.name for service in models.services]
    tell("listening", page=f"{url}/", api=f"{url}/v1", models=names)
