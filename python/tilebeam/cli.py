"""The `tilebeam` command: doctor, generate, best-of-n, vote, eval, bench, perplexity, imatrix, trace, serve.

Options have llama.cpp's names where it has them. Only this module knows typer; what the commands do is in the library
and in the modules named after them, imported when needed so that `--help` is quick.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from tilebeam import console, eval_cli, score_cli, serve_cli

app = typer.Typer(
    name="tilebeam",
    help="Test-time scaling for GGUF models on local hardware. Start with: tilebeam doctor",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)


class Device(StrEnum):
    """Where a model runs."""

    npu = "npu"
    cpu = "cpu"


class Executor(StrEnum):
    """How the NPU runs."""

    thread = "thread"
    process = "process"
    qemu_hexagon = "qemu-hexagon"


class Numerics(StrEnum):
    """The NPU's matrix arithmetic."""

    int8 = "int8"
    int8_256 = "int8-256"
    fp16 = "fp16"


class Softmax(StrEnum):
    """The NPU's exponentials in flash attention."""

    table = "table"
    exact = "exact"


class CacheType(StrEnum):
    """Types of the KV cache."""

    f16 = "f16"
    f32 = "f32"
    q8_0 = "q8_0"


class Output(StrEnum):
    """llama-bench's output formats."""

    md = "md"
    json = "json"
    jsonl = "jsonl"
    csv = "csv"


# --- options that several commands share ------------------------------------------------------------------------------

Model = Annotated[
    Path, typer.Option("-m", "--model", help="GGUF file, ordinary or from gguf-repack.", show_default=False)
]
Prompt = Annotated[str | None, typer.Option("-p", "--prompt", help="The prompt; - reads it from stdin.")]
PromptFile = Annotated[Path | None, typer.Option("-f", "--file", help="Read the prompt from this file.")]
NPredict = Annotated[int, typer.Option("-n", "--n-predict", min=1, help="Most tokens per sample.")]
Temp = Annotated[float, typer.Option("--temp", min=0.0, help="Temperature; 0 is greedy.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the likeliest tokens up to this probability; 1 is off.")]
TopK = Annotated[int, typer.Option("--top-k", min=0, help="Keep the k likeliest tokens; 0 is off.")]
MinP = Annotated[float, typer.Option("--min-p", help="Keep tokens this likely relative to the best; 0 is off.")]
Seed = Annotated[int | None, typer.Option("-s", "--seed", min=0, help="Repeat a run; default: a new one, printed.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End a sample at this text (\\n allowed); repeatable.")]
DeviceOption = Annotated[Device, typer.Option("--device", help="npu: Tilebeam; cpu: llama.cpp's own CPU backend.")]
Threads = Annotated[int | None, typer.Option("-t", "--threads", min=1, help="Worker threads; default: all CPUs.")]
CtxSize = Annotated[int, typer.Option("-c", "--ctx-size", min=1, help="KV cells, shared by all sequences.")]
Sequences = Annotated[int, typer.Option("-np", "--parallel", min=1, max=256, help="Samples that decode together.")]
ExecutorOption = Annotated[
    Executor | None, typer.Option("--executor", help="NPU as threads, as a process, or as Hexagon code in an emulator.")
]
Devices = Annotated[
    int | None,
    typer.Option("--devices", min=1, max=15, help="NPU sessions to spread the model over; default: one, or as needed."),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option("--memory-limit", help="Address space of a session, such as 2GiB, or a list such as 2GiB,4GiB."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Chat = Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")]
Budget = Annotated[int, typer.Option("-N", "--n-samples", min=1, help="Candidates per prompt.")]


def _version(value: bool) -> None:
    if value:
        from tilebeam import __version__

        typer.echo(f"tilebeam {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


# --- commands ---------------------------------------------------------------------------------------------------------


@app.command()
@console.sentences
def doctor(json_: Json = False) -> None:
    """Check the installation: versions, ABI, plugin, devices, kernels (each against a reference).

    Exit code 1 if something is wrong; it then says what to do.
    """
    from tilebeam import doctor as checks

    report = checks.examine()
    if json_:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        checks.show(report, console.out())
    if not report.healthy:
        raise typer.Exit(1)


@app.command()
@console.sentences
def generate(
    model: Model,
    prompt: Prompt = None,
    file: PromptFile = None,
    n_predict: NPredict = 256,
    n_samples: Annotated[int, typer.Option("-N", "--n-samples", min=1, help="Samples.")] = 1,
    temp: Temp = 0.8,
    top_p: TopP = 0.95,
    top_k: TopK = 40,
    min_p: MinP = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    chat: Chat = False,
    device: DeviceOption = Device.npu,
    threads: Threads = None,
    ctx_size: CtxSize = 4096,
    parallel: Sequences = 16,
    executor: ExecutorOption = None,
    devices: Devices = None,
    memory_limit: MemoryLimit = None,
    json_: Json = False,
) -> None:
    """Generate text: one sample streams as it is written, several come as they are complete."""
    from tilebeam import search_cli

    text = search_cli.one_prompt(prompt, file)
    params = _params(n_samples, temp, top_p, top_k, min_p, n_predict, stop, seed)
    n_seq_max = min(parallel, n_samples)
    with _load(model, device, threads, ctx_size, n_seq_max, executor, devices, memory_limit) as lm:
        search_cli.generate(lm, search_cli.wrap(lm, text, chat), params, json_)


@app.command("best-of-n")
@console.sentences
def best_of_n(
    model: Model,
    prompt: Prompt = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", help='Prompts: a .jsonl file of {"prompt": ..}, or one text.')
    ] = None,
    n_predict: NPredict = 256,
    n_samples: Budget = 16,
    scorer: Annotated[
        str, typer.Option("--scorer", help="logprob: mean log-probability; logprob-sum: of the whole sample.")
    ] = "logprob",
    temp: Temp = 0.8,
    top_p: TopP = 0.95,
    top_k: TopK = 40,
    min_p: MinP = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    chat: Chat = False,
    device: DeviceOption = Device.npu,
    threads: Threads = None,
    ctx_size: CtxSize = 4096,
    parallel: Sequences = 16,
    executor: ExecutorOption = None,
    devices: Devices = None,
    memory_limit: MemoryLimit = None,
    json_: Json = False,
) -> None:
    """Draw N candidates for each prompt, score them, choose the best."""
    from tilebeam import scorers, search_cli

    prompts = search_cli.prompts(prompt, file)
    chosen = scorers.named_scorer(scorer)
    params = _params(1, temp, top_p, top_k, min_p, n_predict, stop, seed)
    n_seq_max = min(parallel, n_samples)
    with _load(model, device, threads, ctx_size, n_seq_max, executor, devices, memory_limit) as lm:
        search_cli.best_of_n(lm, [search_cli.wrap(lm, p, chat) for p in prompts], chosen, n_samples, params, json_)


@app.command()
@console.sentences
def vote(
    model: Model,
    prompt: Prompt = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", help='Prompts: a .jsonl file of {"prompt": ..}, or one text.')
    ] = None,
    n_predict: NPredict = 256,
    n_samples: Budget = 16,
    extract: Annotated[
        str,
        typer.Option("--extract", help="How a sample's answer is found: last-number, text, or a regular expression."),
    ] = "last-number",
    temp: Temp = 0.8,
    top_p: TopP = 0.95,
    top_k: TopK = 40,
    min_p: MinP = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    chat: Chat = False,
    device: DeviceOption = Device.npu,
    threads: Threads = None,
    ctx_size: CtxSize = 4096,
    parallel: Sequences = 16,
    executor: ExecutorOption = None,
    devices: Devices = None,
    memory_limit: MemoryLimit = None,
    json_: Json = False,
) -> None:
    """Self-consistency: draw N candidates, extract their answers, take the most frequent one."""
    from tilebeam import search_cli
    from tilebeam.extract import extractor

    prompts = search_cli.prompts(prompt, file)
    find = extractor(extract)
    params = _params(1, temp, top_p, top_k, min_p, n_predict, stop, seed)
    n_seq_max = min(parallel, n_samples)
    with _load(model, device, threads, ctx_size, n_seq_max, executor, devices, memory_limit) as lm:
        search_cli.vote(lm, [search_cli.wrap(lm, p, chat) for p in prompts], find, n_samples, params, json_)


@app.command()
@console.sentences
def bench(
    model: Annotated[
        list[Path], typer.Option("-m", "--model", help="GGUF file; repeat for several.", show_default=False)
    ],
    n_prompt: Annotated[
        str, typer.Option("-p", "--n-prompt", help="Prompt tokens per sequence; 0: no such test.")
    ] = "512",
    n_gen: Annotated[
        str, typer.Option("-n", "--n-gen", help="Generated tokens per sequence; 0: no such test.")
    ] = "128",
    n_parallel: Annotated[str, typer.Option("-npl", "--n-parallel", help="Parallel sequences.")] = "1",
    n_depth: Annotated[str, typer.Option("-d", "--n-depth", help="Tokens per sequence already in the cache.")] = "0",
    shared: Annotated[
        bool, typer.Option("-pps", "--prompt-shared", help="The -d tokens are one prompt that all sequences share.")
    ] = False,
    batch: Annotated[str, typer.Option("-b", "--batch-size", help="Most tokens per llama_decode.")] = "2048",
    ubatch: Annotated[str, typer.Option("-ub", "--ubatch-size", help="Most tokens per graph.")] = "512",
    threads: Annotated[str | None, typer.Option("-t", "--threads", help="Threads; default: all CPUs.")] = None,
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", help="Timed runs of each test.")] = 5,
    output: Annotated[Output, typer.Option("-o", "--output", help="Format on stdout.")] = Output.md,
    device: Annotated[
        str, typer.Option("--device", "-dev", help="Devices, comma separated; their runs alternate.")
    ] = "cpu,npu",
    no_warmup: Annotated[bool, typer.Option("--no-warmup", help="No untimed run before the timed ones.")] = False,
    executor: ExecutorOption = None,
    devices: Devices = None,
    memory_limit: MemoryLimit = None,
    cpu_model: Annotated[
        Path | None, typer.Option("--cpu-model", help="Ordinary file for the CPU if -m is a repacked one.")
    ] = None,
) -> None:
    """Measure throughput as llama-bench does, with parallel sequences, devices interleaved (A B A B).

    Numbers may be lists and ranges as for llama-bench: 1,2,4 or 1-8+2 or 1-16*2. Every prompt length (-p) and every
    generation length (-n) is a test of its own. Tokens are random, nothing is sampled. The last column is the median
    of the ratios of adjacent runs, with the least and the greatest.
    """
    from tilebeam import bench_cli

    what = bench_cli.plan(
        model,
        n_prompt=n_prompt,
        n_gen=n_gen,
        n_parallel=n_parallel,
        n_depth=n_depth,
        batch=batch,
        ubatch=ubatch,
        threads=threads,
        device=device,
        repetitions=repetitions,
        warmup=not no_warmup,
        shared=shared,
        executor=executor.value if executor else None,
        n_devices=devices,
        memory_limit=memory_limit.split(",") if memory_limit else None,
        cpu_model=cpu_model,
    )
    bench_cli.run(what, output.value)


@app.command()
@console.sentences
def perplexity(
    model: Model,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="The text; - reads it from stdin.")] = None,
    kl_base: Annotated[
        Path | None,
        typer.Option(
            "--kl-base",
            "--kl-divergence-base",
            help="What to compare with: a GGUF file of the unquantized model, run beside; or a file of "
            "--save-all-logits, which brings its own text.",
        ),
    ] = None,
    kl_divergence: Annotated[
        bool, typer.Option("--kl-divergence", help="llama-perplexity's flag; --kl-base is enough.")
    ] = False,
    base_device: Annotated[
        Device | None,
        typer.Option("--kl-base-device", help="Where a GGUF base runs; default: cpu, unless it is repacked."),
    ] = None,
    save_all_logits: Annotated[
        Path | None, typer.Option("--save-all-logits", help="Write all log-probabilities, in llama.cpp's format.")
    ] = None,
    device: Annotated[
        Device, typer.Option("-dev", "--device", help="npu: Tilebeam; cpu: llama.cpp's own CPU backend.")
    ] = Device.npu,
    numerics: Annotated[
        Numerics | None, typer.Option("--numerics", help="NPU: 8-bit activations (default), or FP16 operands.")
    ] = None,
    softmax: Annotated[
        Softmax | None,
        typer.Option("--softmax", help="NPU: exponentials from the FP16 table (default), or in float32."),
    ] = None,
    ctx_size: Annotated[int, typer.Option("-c", "--ctx-size", min=4, help="Tokens per window.")] = 512,
    batch_size: Annotated[
        int,
        typer.Option("-b", "--batch-size", min=1, help="Most tokens per llama_decode; several windows if they fit."),
    ] = 2048,
    ubatch_size: Annotated[int, typer.Option("-ub", "--ubatch-size", min=1, help="Most tokens per graph.")] = 512,
    threads: Threads = None,
    cache_type_k: Annotated[CacheType, typer.Option("-ctk", "--cache-type-k", help="KV cache type for K.")] = (
        CacheType.f16
    ),
    cache_type_v: Annotated[CacheType, typer.Option("-ctv", "--cache-type-v", help="KV cache type for V.")] = (
        CacheType.f16
    ),
    chunks: Annotated[int, typer.Option("--chunks", min=-1, help="Measure so many windows; -1: all.")] = -1,
    flash_attn: Annotated[
        bool, typer.Option("-fa/-nofa", "--flash-attn/--no-flash-attn", help="Flash attention.")
    ] = True,
    executor: ExecutorOption = None,
    json_: Json = False,
) -> None:
    """Perplexity of a model on a text, as llama-perplexity measures it.

    The text is cut into windows of -c tokens; the second half of each is scored. With --kl-base also the KL divergence
    from that model's predictions, and how often both think the same token likeliest.

    Example: tilebeam perplexity -m model-q4_0.gguf -f text.txt --kl-base model-f16.gguf
    """
    from tilebeam import perplexity_cli

    if kl_divergence and kl_base is None:
        raise typer.BadParameter("--kl-divergence needs --kl-base: what to compare with")
    perplexity_cli.run(
        perplexity_cli.Request(
            model=model,
            file=file,
            kl_base=kl_base,
            base_device=base_device.value if base_device else None,
            save_all_logits=save_all_logits,
            device=device.value,
            numerics=numerics.value if numerics else None,
            softmax=softmax.value if softmax else None,
            ctx_size=ctx_size,
            batch_size=batch_size,
            ubatch_size=ubatch_size,
            threads=threads,
            cache_type_k=cache_type_k.value,
            cache_type_v=cache_type_v.value,
            chunks=chunks,
            flash_attn=flash_attn,
            executor=executor.value if executor else None,
            json=json_,
        )
    )


@app.command()
@console.sentences
def imatrix(
    model: Model,
    file: Annotated[Path, typer.Option("-f", "--file", help="The text; - reads it from stdin.", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")] = Path("imatrix.gguf"),
    ctx_size: Annotated[int, typer.Option("-c", "--ctx-size", min=16, help="Tokens per window.")] = 512,
    chunks: Annotated[int, typer.Option("--chunks", min=-1, help="Read so many windows; -1: all.")] = -1,
    process_output: Annotated[
        bool, typer.Option("--process-output", help="Collect for the output matrix, too (tied or not).")
    ] = False,
    threads: Threads = None,
    json_: Json = False,
) -> None:
    """Measure how much each input of every weight matrix matters, as llama-imatrix does; runs on the CPU.

    The file is llama.cpp's importance matrix. gguf-repack pack --imatrix uses it to put the error of quantization
    where it matters least, and so does llama-quantize.

    Example: tilebeam imatrix -m model-f16.gguf -f text.txt -o model.imatrix.gguf
    """
    from tilebeam import imatrix_cli

    imatrix_cli.run(
        imatrix_cli.Request(
            model=model,
            file=file,
            output=output,
            ctx_size=ctx_size,
            chunks=chunks,
            threads=threads,
            process_output=process_output,
            json=json_,
        )
    )


@app.command()
@console.sentences
def trace(
    model: Model,
    out: Annotated[Path, typer.Option("-o", "--out", help="Where the timeline goes.")] = Path("trace.json"),
    prompt: Prompt = None,
    file: PromptFile = None,
    n_prompt: Annotated[
        int, typer.Option("--n-prompt", min=1, help="Without -p and -f: a prompt of so many random tokens.")
    ] = 128,
    n_predict: NPredict = 32,
    n_samples: Annotated[int, typer.Option("-N", "--n-samples", min=1, help="Samples, side by side.")] = 1,
    temp: Temp = 0.8,
    seed: Seed = None,
    threads: Threads = None,
    ctx_size: CtxSize = 4096,
    parallel: Sequences = 16,
    executor: ExecutorOption = None,
    devices: Devices = None,
    memory_limit: MemoryLimit = None,
    json_: Json = False,
) -> None:
    """Record what CPU side and NPU do, op by op: a timeline for Perfetto, and a table per kind of op.

    The timeline (-o) opens at https://ui.perfetto.dev: calls of llama.cpp, lowering, messages and waiting on the CPU
    side; messages and every worker's part of every op on the NPU. The table says how long the ops took, what they read
    and computed, and how near that is to what this machine can do, which is measured right after the run.
    """
    from tilebeam import search_cli, trace_cli

    trace_cli.check_target(out)
    random = prompt is None and file is None
    text = "" if random else search_cli.one_prompt(prompt, file)
    params = _params(n_samples, temp, 1.0, 0, 0.0, n_predict, None, seed)
    n_seq_max = min(parallel, n_samples)
    with _load(model, Device.npu, threads, ctx_size, n_seq_max, executor, devices, memory_limit) as lm:
        if random:
            params = replace(params, ignore_eos=True)
            trace_cli.run(lm, trace_cli.random_prompt(lm, n_prompt, params.seed or 0), params, out, json_)
        else:
            trace_cli.run(lm, text, params, out, json_)


# Their options fill a module each.
app.command("score")(console.sentences(score_cli.score))
app.command("reward-head")(console.sentences(score_cli.reward_head))
app.command("eval")(console.sentences(eval_cli.evaluate))
app.command("serve")(console.sentences(serve_cli.serve))


# --- helpers ----------------------------------------------------------------------------------------------------------


def _params(
    n: int,
    temp: float,
    top_p: float,
    top_k: int,
    min_p: float,
    n_predict: int,
    stop: list[str] | None,
    seed: int | None,
) -> Any:
    from tilebeam import SamplingParams

    stops = [s.replace("\\n", "\n").replace("\\t", "\t") for s in stop or []]
    return SamplingParams(
        n=n,
        temperature=temp,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        max_tokens=n_predict,
        stop=stops,
        seed=seed,
    ).resolved()


def _load(
    model: Path,
    device: Device,
    threads: int | None,
    ctx_size: int,
    n_seq_max: int,
    executor: Executor | None,
    devices: int | None,
    memory_limit: str | None,
) -> Any:
    import tilebeam

    with console.loading(str(model)):
        lm = tilebeam.load(
            model,
            device=device.value,
            n_ctx=ctx_size,
            n_seq_max=n_seq_max,
            threads=threads,
            executor=executor.value if executor else None,
            devices=devices,
            memory_limit=memory_limit.split(",") if memory_limit else None,
        )
    console.err().print(console.about(lm), style="dim")
    return lm


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except BrokenPipeError:
        # The reader (head, less) has gone; nothing is wrong.
        sys.stderr.close()
        sys.exit(141)


if __name__ == "__main__":
    main()
