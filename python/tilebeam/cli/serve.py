"""`tilebeam serve`: its options, named as llama-server names them, and what becomes of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilebeam.cli import console
from tilebeam.cli.options import (
    MODEL_PANEL,
    CacheType,
    CacheTypeK,
    CacheTypeV,
    CtxSize,
    Device,
    DeviceOption,
    Devices,
    ExecutorOption,
    Lora,
    LoraScaled,
    MemoryLimit,
    Model,
    Sequences,
    Threads,
    adapters,
    check_npu_options,
    grouped,
)
from tilebeam.cli.reward_options import RewardModelOptions
from tilebeam.errors import TilebeamError
from tilebeam.text_files import read_text

if TYPE_CHECKING:
    from tilebeam.server.model_host import Loaded

_LIMITS = "Queue and limits"
_ACCESS = "Who may ask"
_DEFAULTS = "Defaults of requests"
_KEY_VARIABLE = "TILEBEAM_API_KEY"


@grouped
def serve(
    *,
    model: Model,
    alias: Annotated[
        str | None,
        typer.Option("-a", "--alias", help="Names of the model in requests, comma separated; default: FILE."),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 lets the system choose.")] = 8080,
    device: DeviceOption = Device.npu,
    threads: Threads = None,
    ctx_size: CtxSize = 8192,
    parallel: Sequences = 16,
    batch_size: Annotated[
        int,
        typer.Option("-b", "--batch-size", min=1, help="Most tokens per llama_decode.", rich_help_panel=MODEL_PANEL),
    ] = 512,
    executor: ExecutorOption = None,
    devices: Devices = None,
    memory_limit: MemoryLimit = None,
    lora: Lora = None,
    lora_scaled: LoraScaled = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            "--chat-template",
            help="A Jinja template, or the name of one of llama.cpp's (chatml, llama3 ..); default: the model's.",
        ),
    ] = None,
    cache_prompt: Annotated[
        bool,
        typer.Option(
            "--cache-prompt/--no-cache-prompt",
            help="Keep the KV cells of finished requests while there is room: a conversation's next turn reads only "
            "what is new.",
        ),
    ] = True,
    cache_type_k: CacheTypeK = CacheType.f16,
    cache_type_v: CacheTypeV = CacheType.f16,
    max_waiting: Annotated[
        int,
        typer.Option("--max-queue", min=0, help="Samples that may wait for a slot; then 429.", rich_help_panel=_LIMITS),
    ] = 256,
    max_samples: Annotated[
        int, typer.Option("--max-samples", min=1, help="Samples of one request.", rich_help_panel=_LIMITS)
    ] = 128,
    max_searches: Annotated[
        int, typer.Option("--max-searches", min=1, help="Searches at the same time.", rich_help_panel=_LIMITS)
    ] = 8,
    max_body: Annotated[
        int, typer.Option("--max-body", min=1, help="Bytes of a request's body.", rich_help_panel=_LIMITS)
    ] = 1 << 20,
    shutdown: Annotated[
        float,
        typer.Option("--shutdown-timeout", min=0, help="Seconds that requests get to end.", rich_help_panel=_LIMITS),
    ] = 30.0,
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
            rich_help_panel=_DEFAULTS,
        ),
    ] = None,
    temp: Annotated[float, typer.Option("--temp", min=0.0, help="Temperature.", rich_help_panel=_DEFAULTS)] = 0.8,
    top_p: Annotated[float, typer.Option("--top-p", help="1 is off.", rich_help_panel=_DEFAULTS)] = 0.95,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="0 is off.", rich_help_panel=_DEFAULTS)] = 40,
    min_p: Annotated[float, typer.Option("--min-p", help="0 is off.", rich_help_panel=_DEFAULTS)] = 0.0,
    reward_model: RewardModelOptions,
    step_stop: Annotated[
        str,
        typer.Option("--step-stop", help="What ends a step for the reward model.", rich_help_panel="Reward model"),
    ] = "\\n",
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="A line for every request.")] = False,
) -> None:
    """Serve a model over HTTP: OpenAI's API, with searches as an extension.

    Requests of all clients share batches. /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics
    (Prometheus). It answers on this machine only, unless --host says otherwise; then give it an --api-key.

    Example: tilebeam serve -m model.gguf --port 8080 & curl localhost:8080/v1/completions -H 'content-type:
    application/json' -d '{"prompt": "The capital of France is", "max_tokens": 8}'
    """
    from tilebeam.server import check_packages

    check_packages()
    from tilebeam.native.chat_template import check_template
    from tilebeam.sampling_params import SamplingParams
    from tilebeam.server import main as run
    from tilebeam.server.searches import SearchPool
    from tilebeam.server.security import is_loopback
    from tilebeam.server.settings import Settings

    spec = reward_model.read()
    check_npu_options(device, executor, devices, memory_limit)
    if chat_template is not None:
        check_template(chat_template)  # refused now, not in every answer
    settings = Settings(
        names=tuple(part.strip() for part in (alias or model.stem).split(",") if part.strip()),
        host=host,
        port=port,
        api_keys=tuple(_keys(api_key, api_key_file)),
        max_waiting=max_waiting,
        max_samples=max_samples,
        max_searches=max_searches,
        max_body=max_body,
        sampling=SamplingParams(temperature=temp, top_p=top_p, top_k=top_k, min_p=min_p),
        max_tokens=n_predict,
        chat_template=chat_template,
        cors_origins=tuple(cors_origin or ()),
        shutdown_seconds=shutdown,
    )
    if not settings.api_keys and not is_loopback(host):
        console.err().print(f"warning: anybody who reaches {host} may ask: there is no --api-key", style="yellow")
    searches = SearchPool(max_searches)
    load = {
        "device": device.value,
        "n_ctx": ctx_size,
        "n_seq_max": parallel,
        "threads": threads,
        "type_k": cache_type_k.value,
        "type_v": cache_type_v.value,
        "n_batch": max(batch_size, parallel),
        "executor": executor.value if executor else None,
        "devices": devices,
        "memory_limit": memory_limit.split(",") if memory_limit else None,
        "lora": adapters(lora, lora_scaled),
    }
    make = run.loader(
        str(model), load, spec, step_stop.replace("\\n", "\n"), searches.questions, cache_prompt=cache_prompt
    )
    run.serve(make, settings, searches, ready=_say_ready, verbose=verbose)


def _say_ready(loaded: Loaded, url: str) -> None:
    err = console.err()
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
