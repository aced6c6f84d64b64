"""Time that the engine spends outside llama_decode: at 16 sequences, of models with a small vocabulary.

    python -m bench.engine_overhead [-m MODEL] [-np 16] [-n 128] [--device npu|cpu] [--json] [--quick]

The smaller a model, the more of a step is scheduling, drawing tokens and turning them into text. Without -m random
models of three sizes are written, all with a vocabulary of 576 tokens. The baseline is what one writes with
llama-cpp-python's C API: one batch for all sequences, then llama_sampler_sample, an end-of-text check and
llama_token_to_piece for each. Both run in turn on the same context; a ratio above 1 says how many times less time the
engine spends outside llama_decode. The value is the share of the whole, per cent; the target is below 5.

`samplers` are chains: "default" (top-k 40, top-p 0.95, temperature 0.8), "greedy", "plain" (temperature only: the whole
vocabulary is drawn from) and "logprobs" (default, with log-probabilities).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import llama_cpp.llama_cpp as C
from tilebeam import LM, SamplingParams, load
from tilebeam.cli import console
from tilebeam.measure.machine import OtherLoad
from tilebeam.native.llama import Context

from bench.lib import CACHE, report, synth
from bench.lib.llama_chain import LlamaChain
from bench.lib.options import Parser

SHAPES: dict[str, dict[str, int]] = {
    "1M": {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_head_kv": 4, "head_dim": 32, "n_ff": 384},
    "5M": {"n_layer": 6, "n_embd": 256, "n_head": 4, "n_head_kv": 4, "n_ff": 768},
    "24M": {"n_layer": 8, "n_embd": 512, "n_head": 8, "n_head_kv": 4, "n_ff": 1408},
}
SAMPLERS = {
    "default": SamplingParams(),
    "greedy": SamplingParams(temperature=0),
    "plain": SamplingParams(top_k=0, top_p=1),
    "logprobs": SamplingParams(logprobs=True),
}
PROMPT = [5, 6, 7]


@dataclass
class Spent:
    """Seconds of one run, per step."""

    inside: float
    outside: float

    @property
    def share(self) -> float:
        return self.outside / (self.inside + self.outside)


class Clock:
    """Times a context's llama_decode while entered."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.seconds, self.steps = 0.0, 0

    def __enter__(self) -> Clock:
        self._context.on_decode = self._decoded
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        total = time.perf_counter() - self._began
        self._context.on_decode = None
        self.spent = Spent(self.seconds / self.steps, (total - self.seconds) / self.steps)

    def _decoded(self, begin_ns: int, end_ns: int) -> None:
        self.seconds += (end_ns - begin_ns) / 1e9
        self.steps += 1


def engine(lm: LM, params: SamplingParams) -> Spent:
    with Clock(lm._context) as clock:
        lm.generate(PROMPT, params)
    return clock.spent


def plain_loop(lm: LM, params: SamplingParams) -> Spent:
    """Do the same by hand. Log-probabilities are left out: llama.cpp has none."""
    vocab, n = lm.engine.vocab, params.n
    with lm.raw_decode() as c, Clock(c) as clock:
        size = len(PROMPT)
        samplers = [LlamaChain(params, vocab.size, PROMPT, seed) for seed in range(n)]
        c.token[:size], c.pos[:size], c.seq[:size], c.output[:size] = PROMPT, range(size), 0, 0
        c.output[size - 1] = 1
        lm.check_decode(c.decode(size))
        for seq in range(1, n):
            c.fork(0, seq, size)
        entries, texts = [size - 1] * n, [b""] * n
        for step in range(params.max_tokens or 1):
            for seq, sampler in enumerate(samplers):
                token = C.llama_sampler_sample(sampler.pointer, c.pointer, entries[seq])
                texts[seq] += b"" if vocab.is_end(token) else vocab.piece(token)
                c.token[seq], c.pos[seq], c.seq[seq], c.output[seq] = token, size + step, seq, 1
            entries = list(range(n))
            if step + 1 < (params.max_tokens or 1):
                lm.check_decode(c.decode(n))
        for sampler in samplers:
            sampler.close()
    return clock.spent


def model(name: str) -> Path:
    path = CACHE / f"overhead-{name}-f16.gguf"
    if not path.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        synth.write_model(path, synth.preset("tiny", arch="llama", type="f16", n_vocab=576, **SHAPES[name]))
    return path


def measure(lm: LM, name: str, sampler: str, params: SamplingParams, rounds: int) -> dict[str, Any]:
    engine(lm, params)
    plain_loop(lm, params)
    ours, baseline = [], []
    for _ in range(rounds):
        ours.append(engine(lm, params))
        baseline.append(plain_loop(lm, params))
    ratios = [b.outside / o.outside for o, b in zip(ours, baseline, strict=True)]
    against, value = (round(100 * median(s.share for s in side), 2) for side in (baseline, ours))
    return report.figures(
        f"{name}, {params.n} sequences, {sampler}",
        against,
        value,
        "% outside",
        ratios,
        None,
        least=round(100 * min(o.share for o in ours), 2),
        outside_us=round(1e6 * median(o.outside for o in ours), 1),
        decode_us=round(1e6 * median(o.inside for o in ours), 1),
        baseline_outside_us=round(1e6 * median(b.outside for b in baseline), 1),
        parameters=lm.n_params,
        vocabulary=lm.n_vocab,
    )


def main() -> None:
    p = Parser(__doc__, "the smallest model, short runs")
    p.add_model(default="the random models")
    p.add_argument("-np", "--parallel", type=int, default=16, help="sequences (default 16)")
    p.add_count("-n", "--n-predict", usual=128, quick=24, what="tokens per sequence and run")
    p.add_threads()
    p.add_rounds(9, 2)
    p.add_argument("--device", choices=("npu", "cpu"), default="npu")
    o = p.parse()
    names = [o.model.stem] if o.model else ["1M"] if o.quick else list(SHAPES)
    rows = report.Rows("engine_overhead", o.json)
    with OtherLoad() as others, console.bar("overhead") as progress:
        task = progress.add_task("", total=len(names) * len(SAMPLERS), note="")
        for name in names:
            room = o.parallel * (o.n_predict + 1) + len(PROMPT)
            path = o.model or model(name)
            with load(path, o.device, n_ctx=room, n_seq_max=o.parallel, threads=o.threads, lookup=False) as lm:
                for sampler, params in SAMPLERS.items():
                    progress.update(task, description=f"{name}, {sampler}")
                    params = replace(params, n=o.parallel, max_tokens=o.n_predict, seed=0, ignore_eos=True)
                    rows.add(measure(lm, name, sampler, params, o.rounds))
                    progress.update(task, advance=1)
    rows.finish()
    report.warn_if_busy(others.share)


if __name__ == "__main__":
    report.start(main)
