"""What a reward head on the generator's own hidden states costs: decoding and rating with one, against decoding alone.

    python -m bench.head_cost [-m MODEL.gguf] [--reward-head HEAD.gguf] [-npl 1,4,16] [-n 128] [--json] [--quick]

Samples of one prompt decode side by side. With a head, every step also hands out the hidden states of its rows, adds
them to their texts' sums, and takes the log-probability of each token; at the end the head rates all texts, which is
in the time. The other side draws the same tokens from the same seeds and does none of this. Both take turns in one
model. A row's value is steps a second with the head, its ratio the share of the speed that is left: 0.98 and above is
the target. "added_us" is what a step takes more, "rating_us" what rating all texts takes once.

Without --reward-head the head is random, which costs the same; without -m the model is, with the shape of
Qwen2.5-0.5B.
"""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median
from typing import Any, get_args

import numpy as np
import tilebeam
from tilebeam import LM, SamplingParams
from tilebeam.cli import console
from tilebeam.cli.bench import numbers
from tilebeam.measure.machine import OtherLoad
from tilebeam.scoring.own_reward import OwnReward, maker_of
from tilebeam.scoring.reward_heads import Head, load_head, make_head
from tilebeam.text_state import Feature, width

from bench.lib import models, report
from bench.lib.options import Parser

PROMPT = 64


def random_head(lm: LM) -> Head:
    """A head that reads everything a text's states tell."""
    features = get_args(Feature)
    weight = np.random.default_rng(1).standard_normal(width(features, lm.n_embd)) / lm.n_embd
    return replace(make_head([(weight, None)]), features=features, layer=lm.info.hidden_layer, maker=maker_of(lm))


def measure(lm: LM, reward: OwnReward, samples: int, count: int, rounds: int) -> dict[str, Any]:
    """One row."""
    prompt = np.random.default_rng(2).integers(0, lm.n_vocab, PROMPT).tolist()
    plain = SamplingParams(n=samples, max_tokens=count, seed=0, ignore_eos=True)
    rating: list[float] = []

    def decode(params: SamplingParams) -> float:
        began = time.perf_counter()
        output = lm.generate([prompt], params)[0]
        decoded = time.perf_counter()
        if params.hidden:
            reward.score("", output.outputs)
            rating.append(time.perf_counter() - decoded)
        assert all(len(sample.token_ids) == count for sample in output.outputs)
        return time.perf_counter() - began

    turns = [(decode(replace(plain, hidden=True)), decode(plain)) for _ in range(rounds + 1)][1:]
    pairs = report.Pairs([with_head for with_head, _ in turns], [alone for _, alone in turns])
    added = median(with_head - alone for with_head, alone in turns) / count
    return report.row(
        f"{samples} {'sequence' if samples == 1 else 'sequences'}",
        pairs,
        count,
        "steps/s",
        added_us=round(1e6 * added, 1),
        rating_us=round(1e6 * median(rating[1:]), 1),
        inputs=reward.head.n_inputs,
    )


def main() -> None:
    """Measure and print."""
    p = Parser(__doc__, "a smaller model, fewer tokens")
    p.add_model()
    p.add_argument("--reward-head", help="file of `tilebeam reward train` (default: a random head)")
    p.add_argument("--layer", type=int, help="of the random head: hidden states behind this layer (default: the norm)")
    p.add_argument("-npl", "--n-parallel", default="1,4,16", help="sequences, comma separated")
    p.add_count("-n", "--n-predict", usual=128, quick=16, what="tokens per sequence and run")
    p.add_argument("--device", choices=("npu", "cpu"), default="npu")
    p.add_threads()
    p.add_rounds(9, 1)
    o = p.parse()
    counts = numbers(o.n_parallel, "-npl")
    path = o.model or models.synthetic("small" if o.quick else "bench-0.5b", "q8_0")
    room = PROMPT + max(counts) * (o.n_predict + 1)
    sizes = {"n_ctx": room, "n_seq_max": max(counts), "threads": o.threads}
    head = load_head(o.reward_head) if o.reward_head else None
    rows = report.Rows("head_cost", o.json)
    with (
        tilebeam.load(path, o.device, lookup=False, hidden_layer=head.layer if head else o.layer, **sizes) as lm,
        OtherLoad() as others,
        console.bar("head") as progress,
    ):
        reward = OwnReward(lm, head or random_head(lm))
        task = progress.add_task("", total=len(counts), note="")
        for samples in counts:
            rows.add(measure(lm, reward, samples, o.n_predict, o.rounds))
            progress.update(task, advance=1)
    rows.finish()
    report.warn_if_busy(others.share)


if __name__ == "__main__":
    report.start(main)
