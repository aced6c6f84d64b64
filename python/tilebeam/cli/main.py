"""The `tilebeam` command. Commands with many options are in modules of their own (`search_cli`, `eval_cli` ..).

Options have llama.cpp's names where it has them; those that several commands share are in `options`. What the commands
do is in the library, imported when needed so that `--help` is quick.
"""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tilebeam.cli import console
from tilebeam.cli import evaluate as eval_cli
from tilebeam.cli import score as score_cli
from tilebeam.cli import search as search_cli
from tilebeam.cli import serve as serve_cli
from tilebeam.cli.options import (
    CacheType,
    CacheTypeK,
    CacheTypeV,
    CtxSize,
    Device,
    Devices,
    Escape,
    ExecutorOption,
    Json,
    Lora,
    LoraScaled,
    MemoryLimit,
    Model,
    ModelOptions,
    NPredict,
    Prompt,
    PromptsFile,
    SamplingOptions,
    Seed,
    Sequences,
    Temp,
    Threads,
    adapters,
)
from tilebeam.cli.prompts import prompts
from tilebeam.gguf.help_text import App

app = App(
    name="tilebeam",
    help="Test-time scaling for GGUF models on local hardware. Start with: tilebeam doctor",
    no_args_is_help=True,
)


class Numerics(StrEnum):
    """The NPU's matrix arithmetic."""

    int8 = "int8"
    int8_256 = "int8-256"
    fp16 = "fp16"


class Softmax(StrEnum):
    """The NPU's exponentials in flash attention."""

    table = "table"
    exact = "exact"


class Output(StrEnum):
    """llama-bench's output formats."""

    md = "md"
    json = "json"
    jsonl = "jsonl"
    csv = "csv"


def _version(value: bool) -> None:
    if value:
        from tilebeam._version import __version__

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
    from tilebeam.measure import doctor as checks

    report = checks.examine()
    if json_:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        checks.show(report, console.out())
    if not report.healthy:
        raise typer.Exit(1)


app.command("generate")(console.sentences(search_cli.generate))
app.command("best-of-n")(console.sentences(search_cli.best_of_n))
app.command("vote")(console.sentences(search_cli.vote))
app.command("beam")(console.sentences(search_cli.beam))
app.command("dvts")(console.sentences(search_cli.dvts))
app.command("adaptive")(console.sentences(search_cli.adaptive))


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
    lora: Lora = None,
    lora_scaled: LoraScaled = None,
    cpu_model: Annotated[
        Path | None, typer.Option("--cpu-model", help="Ordinary file for the CPU if -m is a repacked one.")
    ] = None,
) -> None:
    """Measure throughput as llama-bench does, with parallel sequences, devices interleaved (A B A B).

    Numbers may be lists and ranges as for llama-bench: 1,2,4 or 1-8+2 or 1-16*2. Every prompt length (-p) and every
    generation length (-n) is a test of its own. Tokens are random, nothing is sampled. The last column is the median
    of the ratios of adjacent runs, with the least and the greatest.

    Example: tilebeam bench -m model.gguf -p 512 -n 64 -npl 1,8,16 -r 5
    """
    from tilebeam.cli import bench as bench_cli

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
        lora=adapters(lora, lora_scaled),
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
        Numerics | None,
        typer.Option("--numerics", help="NPU: int8 per 32 inputs (default) or, in prompts, per 256; or FP16 operands."),
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
    cache_type_k: CacheTypeK = CacheType.f16,
    cache_type_v: CacheTypeV = CacheType.f16,
    chunks: Annotated[int, typer.Option("--chunks", min=-1, help="Measure so many windows; -1: all.")] = -1,
    flash_attn: Annotated[
        bool, typer.Option("-fa/-nofa", "--flash-attn/--no-flash-attn", help="Flash attention.")
    ] = True,
    executor: ExecutorOption = None,
    lora: Lora = None,
    lora_scaled: LoraScaled = None,
    json_: Json = False,
) -> None:
    """Perplexity of a model on a text, as llama-perplexity measures it.

    The text is cut into windows of -c tokens; the second half of each is scored. With --kl-base also the KL divergence
    from that model's predictions, and how often both think the same token likeliest.

    Example: tilebeam perplexity -m model-q4_0.gguf -f text.txt --kl-base model-f16.gguf
    """
    from tilebeam.cli import perplexity as perplexity_cli

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
            lora=adapters(lora, lora_scaled),
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
    from tilebeam.cli import imatrix as imatrix_cli

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
    file: PromptsFile = None,
    escape: Escape = True,
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
    lora: Lora = None,
    lora_scaled: LoraScaled = None,
    json_: Json = False,
) -> None:
    """Record what CPU side and NPU do, op by op: a timeline for Perfetto, and a table per kind of op.

    Example: tilebeam trace -m model.gguf -p "Once upon a time" -n 16 -o trace.json

    The timeline (-o) opens at https://ui.perfetto.dev: calls of llama.cpp, lowering, messages and waiting on the CPU
    side; messages and every worker's part of every op on the NPU. The table says how long the ops took, what they read
    and computed, and how near that is to what this machine can do, which is measured right after the run.
    """
    from tilebeam.cli import trace as trace_cli
    from tilebeam.gguf.whole_file import check_target

    check_target(out)
    random = prompt is None and file is None
    texts = [] if random else prompts(prompt, file, escape)
    drawing = SamplingOptions(n_predict=n_predict, temp=temp, top_p=1.0, top_k=0, min_p=0.0, seed=seed)
    params = drawing.params(n_samples)
    options = ModelOptions(
        model, Device.npu, threads, ctx_size, parallel, executor, devices, memory_limit, lora, lora_scaled
    )
    with options.load(n_samples * max(1, len(texts))) as lm:
        if random:
            params = replace(params, ignore_eos=True)
            trace_cli.run(lm, [trace_cli.random_prompt(lm, n_prompt, params.seed or 0)], params, out, json_)
        else:
            trace_cli.run(lm, texts, params, out, json_)


# Their options fill a module each.
app.command("score")(console.sentences(score_cli.score))
app.command("reward-head")(console.sentences(score_cli.reward_head))
app.command("eval")(console.sentences(eval_cli.evaluate))
app.command("serve")(console.sentences(serve_cli.serve))


def main() -> None:
    """Entry point of the console script."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # an exception: no partial output stays
    try:
        app()
    except BrokenPipeError:
        # The reader (head, less) has gone; nothing is wrong.
        sys.stderr.close()
        sys.exit(141)


if __name__ == "__main__":
    main()
