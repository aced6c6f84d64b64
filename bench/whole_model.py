"""Whole models against the stock CPU backend: prefill of 512 tokens and decoding 1, 8 and 16 sequences, with Q4_0, Q8_0
and the paper's mix (Q4_0, FFN down in Q8_0), on one thread and on all, runs interleaved.

    python -m bench.whole_model [--kinds q4_0,q8_0,mix | -m FILE ..] [-t 1,2] [-p 512] [-npl 1,8,16] [-d 0]
        [--preset qwen3-30b-a3b [--one-choice]]
        [--ik-llama PROGRAM] [--json] [--quick] [--resume FILE --seconds S]

The models are random with the shapes of Qwen2.5-1.5B (--quick: 4 of their 28 layers, and all threads only), or files
of your own (-m). --preset has mixtures, too, whose router spreads tokens over all experts, or with --one-choice sends
all to the same ones. Both sides read the same ordinary file and have the same settings: one unified KV cache in F16,
flash attention, batches of 512, the same threads. The share of the limit is that of the streaming read bandwidth
(weight bytes, of experts as many as a token uses) for one sequence, of the int8 peak (two operations a weight and
token) for everything else, both measured beside each round.

With --ik-llama, the llama-batched-bench of an ik_llama.cpp build runs in each round too, with -rtr; it loads the model
each time, and where ours decodes at no depth it does so at one token. It feeds the same token everywhere, so that of a
mixture all sequences meet the same experts: it is compared with --one-choice only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilebeam import load
from tilebeam.cli.bench import numbers
from tilebeam.measure.throughput import Case, Runner

from bench.lib import limits, models, report, rounds, synth
from bench.lib.batched_bench import BatchedBench
from bench.lib.options import Parser
from bench.lib.rounds import Rounds

KINDS: dict[str, tuple[str, dict[str, str]]] = {
    "q4_0": ("q4_0", {}),
    "q8_0": ("q8_0", {}),
    "mix": ("q4_0", {"ffn_down": "q8_0"}),
    "q4_k_m": ("q4_k", dict.fromkeys(("ffn_down", "ffn_down_exps", "ffn_down_shexp", "attn_v", "output"), "q6_k")),
    "mxfp4": ("q8_0", dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), "mxfp4")),
}
TITLES = {
    "q4_0": "Q4_0",
    "q8_0": "Q8_0",
    "mix": "Q4_0 with FFN down in Q8_0",
    "q4_k_m": "Q4_K with FFN down in Q6_K",
    "mxfp4": "Q8_0 with experts in MXFP4",
}


@dataclass(frozen=True)
class Group:
    """What is loaded together: a model, by the title it has in the report, and a number of threads."""

    model: str
    path: Path
    threads: int
    cases: tuple[Case, ...]

    def label(self, case: Case) -> str:
        what = f"prefill {case.n_prompt}" if case.n_prompt else f"decode {case.n_parallel}"
        what += f" at {case.n_depth}" if case.n_depth else ""
        return f"{self.model}, {what}, {self.threads} thread{'s' if self.threads > 1 else ''}"

    def labels(self) -> Iterator[str]:
        return map(self.label, self.cases)


def file_of(kind: str, preset: str, quick: bool, one_choice: bool) -> Path:
    type, types = KINDS[kind]
    layers = 4 if quick and synth.PRESETS[preset].get("n_layer", 4) > 4 else None
    return models.synthetic(preset, type, types, tied=False, layers=layers, one_choice=one_choice)


def measure(group: Group, ik: BatchedBench | None, log: Rounds, wanted: int) -> bool:
    """Measure rounds of one group until each case has as many as wanted; False if the time was over before."""
    room, most = max(c.cells for c in group.cases), max(c.n_parallel for c in group.cases)
    with ExitStack() as stack:
        runners = {}
        for device in ("npu", "cpu"):
            lm = load(group.path, device=device, n_ctx=room, n_seq_max=most, threads=group.threads)
            runners[device] = Runner(stack.enter_context(lm))
            runners[device].warm_up(Case(0, 1, most))
        by_name = {group.label(case): case for case in group.cases}
        for name in log.turns(by_name, wanted):
            case = by_name[name]
            figures = {"ours": runners["npu"].run(case).seconds, "baseline": runners["cpu"].run(case).seconds}
            if ik is not None:
                figures["ik_llama"] = ik.seconds(group.path, case, group.threads)
            read, int8 = limits.read_gbs(group.threads), limits.int8_gops(group.threads, 0.05)
            log.end(**figures, read_gbs=read, int8_gops=int8)
    return log.fewest(group.labels()) >= wanted


def rows_of(groups: list[Group], log: Rounds) -> list[dict[str, Any]]:
    """Return the report's rows, of the cases that have rounds."""
    rows = []
    for group in groups:
        for case in group.cases:
            name = group.label(case)
            if name not in log:
                continue
            matrices = models.Matrices.of(group.path)
            row = log.row(name, case.tokens, "tokens/s", **log.against("ik_llama", name, case.tokens))
            weights = matrices.weights - (matrices.output_weights if case.n_prompt else 0)
            share = 2 * weights * row["value"] / (log.median(name, "int8_gops") * 1e9)
            if case.n_parallel == 1 and not case.n_prompt:
                share = matrices.bytes * row["value"] / (log.median(name, "read_gbs") * 1e9)
            rows.append(row | {"share_of_limit": report.three_digits(share)})
    return rows


def peaks_of(groups: list[Group], log: Rounds) -> dict[str, float]:
    peaks = {}
    for threads in sorted({g.threads for g in groups}):
        names = [name for g in groups if g.threads == threads for name in g.labels() if name in log]
        for figure in ("int8_gops", "read_gbs") if names else ():
            peaks[f"{figure}, {threads} thread{'s' if threads > 1 else ''}"] = log.overall(figure, names)
    return peaks


def ik_notes(row: dict[str, Any]) -> list[str]:
    return [f"{row['ik_llama_ratio']:.2f}x of ik_llama.cpp's {row['ik_llama']:.4g}"] if "ik_llama" in row else []


def main() -> None:
    p = Parser(__doc__, "fewer layers, fewer rounds")
    p.add_argument("--kinds", default="q4_0,q8_0,mix", help=f"models, of {', '.join(KINDS)}")
    p.add_argument("--preset", default="bench-1.4b", choices=tuple(synth.PRESETS), help="shapes")
    p.add_argument("--one-choice", action="store_true", help="a mixture whose tokens all go to the same experts")
    p.add_argument("-m", "--model", type=Path, action="append", default=[], help="GGUF file instead; may be repeated")
    p.add_argument("--ik-llama", type=Path, metavar="PROGRAM", help="llama-batched-bench of an ik_llama.cpp build")
    p.add_thread_counts()
    p.add_count("-p", "--n-prompt", usual=512, quick=128, what="prompt tokens; 0: none")
    p.add_argument("-npl", "--n-parallel", default="1,8,16", help="sequences")
    p.add_argument("-d", "--n-depth", type=int, default=0, help="tokens of each sequence before decoding begins")
    p.add_count("-n", "--n-gen", usual=16, quick=8, what="tokens per sequence and run")
    p.add_rounds(5, 2)
    rounds.add_options(p)
    a = p.parse()
    kinds = [] if a.model else a.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        p.error(f"--kinds: {', '.join(sorted(unknown))} is not among {', '.join(KINDS)}")
    cases = [Case(a.n_prompt)] if a.n_prompt else []
    cases += [Case(0, a.n_gen, n, a.n_depth) for n in numbers(a.n_parallel, "-npl") if n]
    for case in cases:
        case.validate()
    if a.ik_llama and not (a.one_choice or a.model) and synth.PRESETS[a.preset].get("n_expert"):
        p.error("--ik-llama feeds the same token everywhere, which meets the same experts: add --one-choice")
    threads = p.thread_counts(a)
    files = {path.stem: path for path in a.model} or {
        TITLES[k]: file_of(k, a.preset, a.quick, a.one_choice) for k in kinds
    }
    groups = [Group(model, path, n, tuple(cases)) for model, path in files.items() for n in threads]
    ik = BatchedBench(a.ik_llama, ("-rtr",)) if a.ik_llama else None
    setting = {
        "bench": "whole_model",
        "preset": a.preset,
        **({"one_choice": True} if a.one_choice else {}),
        "quick": a.quick,
        "n_prompt": a.n_prompt,
        "n_gen": a.n_gen,
        **({"n_depth": a.n_depth} if a.n_depth else {}),
        **({"ik_llama": str(a.ik_llama)} if ik else {}),
    }
    log = Rounds(a.resume, setting, a.seconds)
    for group in sorted(groups, key=lambda g: log.fewest(g.labels())):
        if log.fewest(group.labels()) < a.rounds and not measure(group, ik, log, a.rounds):
            break
    rows = report.Rows("whole_model", a.json)
    for row in rows_of(groups, log):
        rows.add(row, *ik_notes(row))
    rows.finish(peaks_of(groups, log))
    log.warn()


if __name__ == "__main__":
    report.start(main)
