"""`tilebeam serve`: its options, named as llama-server names them, and what becomes of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilebeam.cli import console
from tilebeam.cli.options import (
    CtxSize,
    LoraOptions,
    NamedModels,
    RunOptions,
    Sequences,
    SpeculationOptions,
    TokenOptions,
    grouped,
    named_file,
)
from tilebeam.cli.reward_options import STEP_STOP_TEXT, RewardModelOptions, StepStop
from tilebeam.errors import TilebeamError
from tilebeam.model.load_options import LoadOptions, default_threads
from tilebeam.ray_cluster import package
from tilebeam.sampling_params import SamplingParams
from tilebeam.server.settings import ReasoningFormat, Settings
from tilebeam.text_files import read_text, unescaped

if TYPE_CHECKING:
    from tilebeam.server.model_host import Loaded
    from tilebeam.server.models import Models
    from tilebeam.server.served_model import ServedModel, States

_LIMITS = "Queue and limits"
_ACCESS = "Who may ask"
_CLUSTER = "Several machines"
_KEY_VARIABLE = "TILEBEAM_API_KEY"
_CTX_SIZE = 8192  # conversations of several clients share the cells: more than for one program's own calls


@grouped
def serve(
    *,
    model: NamedModels,
    lora: LoraOptions,
    speculation: SpeculationOptions,
    alias: Annotated[
        str | None,
        typer.Option(
            "-a", "--alias", help="Names of a single model in requests, comma separated; default: NAME, or FILE's name."
        ),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 is every one.")] = Settings.host,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 lets the system choose.")] = Settings.port,
    run: RunOptions,
    ctx_size: CtxSize = _CTX_SIZE,
    parallel: Sequences = LoadOptions.n_seq_max,
    batch_size: Annotated[
        int, typer.Option("-b", "--batch-size", min=1, help="Most tokens per llama_decode.", rich_help_panel="Model")
    ] = LoadOptions.n_batch,
    chat_template: Annotated[
        str | None,
        typer.Option(
            "--chat-template",
            help="A Jinja template, or the name of one of llama.cpp's (chatml, llama3 ..); default: the model's.",
        ),
    ] = None,
    chat_template_kwargs: Annotated[
        str,
        typer.Option(
            "--chat-template-kwargs",
            help="Variables of the chat template, as JSON: '{\"enable_thinking\": false}'. A request's own come first.",
        ),
    ] = "{}",
    reasoning_format: Annotated[
        ReasoningFormat,
        typer.Option(
            "--reasoning-format",
            help="Thoughts of chats: apart from the text, in reasoning_content (deepseek, which auto is), or none.",
        ),
    ] = Settings.reasoning_format,
    cache_prompt: Annotated[
        bool,
        typer.Option(
            "--cache-prompt/--no-cache-prompt",
            help="Keep the KV cells of finished requests while there is room: a conversation's next turn reads only "
            "what is new.",
        ),
    ] = True,
    models_max: Annotated[
        int | None,
        typer.Option(
            "--models-max",
            min=1,
            help="Models loaded at the same time: the one idle longest makes room; default: all.",
            rich_help_panel=_LIMITS,
        ),
    ] = Settings.models_max,
    idle_unload: Annotated[
        float,
        typer.Option(
            "--idle-unload",
            min=0,
            metavar="SECONDS",
            help="Unload a model after so long without requests; the next one loads it again. 0: never.",
            rich_help_panel=_LIMITS,
        ),
    ] = 0.0,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            "--state-dir",
            help="Folder that keeps KV cells of finished requests while the server is down or a model is unloaded.",
            rich_help_panel="Model",
        ),
    ] = None,
    state_limit: Annotated[
        str,
        typer.Option(
            "--state-limit", help="Size of its files; those used longest ago are deleted.", rich_help_panel="Model"
        ),
    ] = "4GiB",
    max_waiting: Annotated[
        int,
        typer.Option("--max-queue", min=0, help="Samples that may wait for a slot; then 429.", rich_help_panel=_LIMITS),
    ] = Settings.max_waiting,
    max_samples: Annotated[
        int, typer.Option("--max-samples", min=1, help="Samples of one request.", rich_help_panel=_LIMITS)
    ] = Settings.max_samples,
    max_searches: Annotated[
        int, typer.Option("--max-searches", min=1, help="Searches at the same time.", rich_help_panel=_LIMITS)
    ] = Settings.max_searches,
    programs: Annotated[
        bool,
        typer.Option(
            "--programs",
            help="Let searches run Python programs that the model writes, confined: the method tir.",
            rich_help_panel=_LIMITS,
        ),
    ] = Settings.programs,
    max_body: Annotated[
        int, typer.Option("--max-body", min=1, help="Bytes of a request's body.", rich_help_panel=_LIMITS)
    ] = Settings.max_body,
    shutdown: Annotated[
        float,
        typer.Option(
            "--shutdown-timeout", min=0, help="Seconds that running requests have to finish.", rich_help_panel=_LIMITS
        ),
    ] = Settings.shutdown_seconds,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            help=f"Requests must bring one of these keys; repeatable. Also from {_KEY_VARIABLE}, which other users of "
            "the machine do not see.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="A file with a key on each line.", rich_help_panel=_ACCESS)
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--cors-origin",
            help="A web page's origin that may ask from a browser; repeatable.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    n_predict: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--n-predict",
            min=1,
            help="max_tokens of chats that do not say; default: until the context is full.",
            rich_help_panel="Sampling",
        ),
    ] = None,
    drawing: TokenOptions,
    reward_model: RewardModelOptions,
    step_stop: StepStop = STEP_STOP_TEXT,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            help="Serve from processes on the Ray cluster at this address; auto: the one this machine is in.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option("--replicas", min=1, help="Processes on it, each with the models.", rich_help_panel=_CLUSTER),
    ] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Log every request (not with --ray).")] = False,
) -> None:
    """Serve models over HTTP: OpenAI's API, with searches as an extension.

    Requests of all clients share batches. Of several models (-m repeated) each is loaded when a request names it.
    /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics
    (Prometheus). It answers on this machine only, unless --host says otherwise; then give it an --api-key.

    Example: tilebeam serve -m model.gguf --port 8080 & curl localhost:8080/v1/completions -H 'content-type:
    application/json' -d '{"prompt": "The capital of France is", "max_tokens": 8}'
    """
    from tilebeam.server import check_packages

    check_packages()
    from tilebeam.chat.chat_template import check_template
    from tilebeam.server import main as process
    from tilebeam.server.security import is_loopback
    from tilebeam.server.served_model import ServedModel

    if programs:
        from tilebeam.sandbox import need_confinement

        need_confinement()
    spec = reward_model.read()
    arguments, adapters = run.arguments(), lora.adapters()
    variables = _variables(chat_template_kwargs)
    if chat_template is not None:
        check_template(chat_template, variables)  # refused now, not in every answer
    settings = Settings(
        host=host,
        port=port,
        api_keys=tuple(_keys(api_key, api_key_file)),
        max_waiting=max_waiting,
        max_samples=max_samples,
        max_searches=max_searches,
        max_body=max_body,
        programs=programs,
        sampling=SamplingParams(**drawing.fields()),
        max_tokens=n_predict,
        chat_template=chat_template,
        chat_template_kwargs=variables,
        reasoning_format=reasoning_format,
        cors_origins=tuple(cors_origin or ()),
        shutdown_seconds=shutdown,
        models_max=models_max,
        idle_seconds=idle_unload or None,
    )
    if not settings.api_keys and not is_loopback(host):
        console.err().print(
            f"warning: anyone who can reach {host} can send requests: no --api-key is set", style="yellow"
        )
    load = arguments | {"n_ctx": ctx_size, "n_seq_max": parallel, "n_batch": max(batch_size, parallel)}
    states = _states(state_dir, state_limit, cache_prompt)
    own = {"lora": adapters, **speculation.arguments()}
    models = _named(model, alias)
    if len(models) > 1:
        _check_several([path for _, path in models], own)
    stop = unescaped(step_stop)
    served = [ServedModel(names, path, load, spec, stop, own, cache_prompt, states) for names, path in models]
    if ray is not None:
        if verbose:
            raise TilebeamError("--verbose: replicas write into Ray's own log files; leave it out with --ray.")
        _serve_on_cluster(ray, served, settings, replicas or 1)
        return
    if replicas is not None:
        raise TilebeamError("--replicas are processes on a Ray cluster: give its address with --ray.")
    process.serve(served, settings, ready=_say_ready, verbose=verbose)


def _variables(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise TilebeamError(f'--chat-template-kwargs must be a JSON object like {{"enable_thinking": false}}: {text!r}')
    return given


def _serve_on_cluster(address: str, served: Sequence[ServedModel], settings: Settings, replicas: int) -> None:
    if settings.port == 0:
        raise TilebeamError("--port 0: Ray Serve cannot choose a port; give one.")
    package("ray.serve", "--ray", "replicas")
    from tilebeam.server.replicas.ray_serve import Size, serve_replicas

    load = served[0].load
    size = Size(replicas, cpus=load["threads"] or default_threads(), slots=load["n_seq_max"], cells=load["n_ctx"])

    def ready(url: str) -> None:
        names = ", ".join(one.names[0] for one in served)
        console.err().print(f"replicas: {replicas}; models: {names}", style="dim", highlight=False)
        console.err().print(f"listening on {url}", highlight=False)

    serve_replicas(served, settings, size, address, ready=ready)


def _named(given: Sequence[str], alias: str | None) -> list[tuple[tuple[str, ...], str]]:
    """Names and file of each model.

    Raises:
        TilebeamError: one alias for several models.
    """
    models: list[tuple[tuple[str, ...], str]] = [((name,), path) for name, path in map(named_file, given)]
    if alias is None:
        return models
    if len(models) > 1:
        raise TilebeamError("--alias names one model: name several with -m NAME=FILE.")
    return [(tuple(part.strip() for part in alias.split(",") if part.strip()), models[0][1])]


def _check_several(paths: Sequence[str], own: Mapping[str, Any]) -> None:
    """Raise `TilebeamError` for what several models cannot have, or a file that is no model: they are loaded later."""
    from tilebeam.gguf import GGUFError, open_gguf

    if own["lora"] or own["draft"]:
        raise TilebeamError("--lora, --lora-scaled and --draft are made for one model: serve one, without a second -m.")
    for path in paths:
        try:
            with open_gguf(path):
                pass
        except (GGUFError, OSError) as error:
            raise TilebeamError(f"{path} cannot be served: {error}") from None


def _states(folder: Path | None, limit: str, cache_prompt: bool) -> States | None:
    """Where KV cells outlast the server.

    Raises:
        TilebeamError: they cannot.
    """
    from tilebeam.engine.state_folder import state_folder
    from tilebeam.model.load_options import parse_limits
    from tilebeam.server.served_model import States

    if folder is None:
        return None
    if not cache_prompt:
        raise TilebeamError("--state-dir keeps what --no-cache-prompt does not keep: leave out one of them.")
    try:
        (size,) = parse_limits(limit)
    except TilebeamError:
        raise TilebeamError(f'--state-limit must be bytes, or a size such as "2GiB", not {limit!r}.') from None
    return States(state_folder(folder), size)


def _say_ready(models: Models, loaded: Loaded | None, url: str) -> None:
    err = console.err()
    if loaded is None:
        names = ", ".join(service.name for service in models.services)
        err.print(f"models: {names}; each is loaded when it is asked for", style="dim", highlight=False)
    else:
        err.print(console.about(loaded.lm), style="dim", highlight=False)
        if loaded.scorer is not None:
            err.print(console.about_reward(loaded.scorer), style="dim", highlight=False)
    err.print(f"listening on {url}", highlight=False)


def _keys(given: list[str] | None, file: Path | None) -> list[str]:
    """The keys of options, file and environment.

    Raises:
        TilebeamError: an empty key, or a file without any: the server would be open to all.
    """
    keys = list(given or [])
    if (from_environment := os.environ.get(_KEY_VARIABLE)) is not None:
        keys.append(from_environment)
    if file is not None:
        lines = [line.strip() for line in read_text(file).splitlines()]
        if not any(lines):
            raise TilebeamError(f"{file} holds no API key.")
        keys += [line for line in lines if line]
    if not all(key.strip() for key in keys):
        raise TilebeamError(f"An API key (--api-key or {_KEY_VARIABLE}) is empty.")
    return keys
