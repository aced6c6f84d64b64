"""What rating texts costs: a reward model that reads a growing beam, and a head on the generator's own hidden states.

    python -m bench.scoring [-m MODEL.gguf] [--only head] [--reward-head HEAD.gguf] [-npl 1,4,16] [--json] [--quick]

"beams": N of them, scripted, for 8 rounds; each round the best N / M grow by M random steps. Tilebeam's reward models
keep the cells of what they have read and fork them; the baseline decodes every text of every round from its beginning,
as libraries do that send texts to a reward model, in the same batches on the same model. A row is a kind of reward
model, its value texts scored per second; "tokens" is what was decoded, exactly, "tokens_whole" what whole texts have.

"head": samples of one prompt decode side by side. With a head, every step also hands out the hidden states of its rows,
adds them to their texts' sums, and takes the log-probability of each token; at the end the head rates all texts, which
is in the time. The other side draws the same tokens and does none of this. The value is steps a second with the head,
the ratio the share of the speed that is left (the target is 0.98); "added_us" is what a step takes more, "rating_us"
what rating all texts takes once. Without --reward-head the head is random, which costs the same.

Without -m it writes a random model with the shape of Qwen2.5-0.5B (--quick: a smaller one, shorter steps).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, get_args

import numpy as np
import tilebeam
from tilebeam import LM, SamplingParams
from tilebeam.cli.bench import numbers
from tilebeam.measure.machine import OtherLoad
from tilebeam.scoring.own_reward import OwnReward, maker_of
from tilebeam.scoring.reward_heads import Head, load_head, make_head
from tilebeam.scoring.reward_model import HeadReward, RewardModel, TokenReward
from tilebeam.text_state import Feature, width

from bench.lib import models, report
from bench.lib.options import Parser

ROUNDS = 8
PROMPT = 64  # tokens of the samples' prompt


@dataclass
class Beams:
    """A search without a model: words instead of samples."""

    lm: LM
    beams: int
    width: int
    n_prompt: int
    n_step: int

    def __post_init__(self) -> None:
        rng = np.random.default_rng(1)
        words = [self.lm.detokenize([int(t)]) for t in rng.integers(300, 700, 200)]
        words = [w for w in words if w.strip() and "\n" not in w]
        self._draw = lambda n: "".join(rng.choice(words, n))
        self.prompt = self._draw(self.n_prompt)
        self._steps = [[self._draw(self.n_step) + "\n" for _ in range(self.beams)] for _ in range(ROUNDS)]

    def search(self, scorer: RewardModel) -> tuple[list[list[list[str]]], tilebeam.Usage]:
        """Grow and rate; the texts of each round, and what rating them cost."""
        alive: list[list[str]] = [[]]
        history = []
        spent = tilebeam.Usage()
        with scorer.session():
            for steps in self._steps:
                parents = [p for p in alive for _ in range(self.beams // len(alive))]
                grown = [[*p, s] for p, s in zip(parents, steps, strict=True)]
                ratings = scorer.rate_steps([self.prompt] * self.beams, grown)
                spent = sum((r.usage for r in ratings), spent)
                best = sorted(range(self.beams), key=lambda i: -ratings[i].scores[-1])[: self.beams // self.width]
                alive = [grown[i] for i in best]
                history.append(grown)
        return history, spent


def whole(scorer: RewardModel, prompt: str, history: list[list[list[str]]]) -> int:
    """Decode every text of every round from its beginning, reading its last verdict; tokens decoded."""
    tokens = 0
    layout = scorer._layout
    for texts in history:
        ids = []
        for i, steps in enumerate(texts):
            text = layout.head(prompt)
            for step in steps:
                text = text + layout.step(step, first=False) + layout.tag
            ids.append([300 + i, *text[1:]])  # texts that share no beginning share no cells
        for reading in scorer._read(ids, [[-1]] * len(ids)):
            tokens += reading.decoded_tokens
    return tokens


def beam_rows(lm: LM, a: Any) -> Iterator[dict[str, Any]]:
    """Make two rows: for a reward model without hidden states, and for one with them."""
    beams = Beams(lm, a.beams, a.width, a.n_prompt, a.n_step)
    weight = np.random.default_rng(2).standard_normal(lm.n_embd) / lm.n_embd**0.5
    form = tilebeam.RewardFormat(tag=" ?", strip="\n")
    scorers: dict[str, RewardModel] = {
        "token": TokenReward(lm, good="1", bad="2", format=form),
        "value head": HeadReward(lm, make_head([(weight, None)]), format=form),
    }
    for name, scorer in scorers.items():
        pairs = report.Pairs([], [])
        for _ in range(a.beam_rounds):
            began = time.perf_counter()
            history, usage = beams.search(scorer)
            middle = time.perf_counter()
            tokens = whole(scorer, beams.prompt, history)
            pairs.ours.append(middle - began)
            pairs.baseline.append(time.perf_counter() - middle)
            assert tokens == usage.full_scoring_tokens  # both counted the same texts
        more = {"tokens": usage.scored_tokens, "tokens_whole": tokens}
        title = f"{name}, {a.beams} beams of {ROUNDS} steps"
        yield report.row(title, pairs, ROUNDS * a.beams, "texts/s", **more)


def random_head(lm: LM) -> Head:
    """Make a head that reads everything a text's states tell."""
    features = get_args(Feature)
    weight = np.random.default_rng(1).standard_normal(width(features, lm.n_embd)) / lm.n_embd
    return replace(make_head([(weight, None)]), features=features, layer=lm.info.hidden_layer, maker=maker_of(lm))


def head_row(lm: LM, reward: OwnReward, samples: int, count: int, rounds: int) -> dict[str, Any]:
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
    more = {"added_us": round(1e6 * added, 1), "rating_us": round(1e6 * median(rating[1:]), 1)}
    name = f"own head, {samples} sequence{'s' if samples > 1 else ''}"
    return report.row(name, pairs, count, "steps/s", inputs=reward.head.n_inputs, **more)


def main() -> None:
    p = Parser(__doc__, "a smaller model, shorter steps, fewer tokens")
    p.add_model()
    p.add_argument("--only", choices=["beams", "head"], help="one of both")
    p.add_argument("-N", "--beams", type=int, default=16)
    p.add_argument("-M", "--width", type=int, default=4, help="continuations of each survivor")
    p.add_argument("--n-prompt", type=int, default=120, help="words of the beams' prompt")
    p.add_count("--n-step", usual=30, quick=12, what="words of a step")
    p.add_argument("--beam-rounds", type=int, default=1, help="rounds of beams (default: 1)")
    p.add_argument("--reward-head", help="file of `tilebeam reward train` (default: a random head)")
    p.add_argument("--layer", type=int, help="of the random head: hidden states behind this layer (default: the norm)")
    p.add_argument("-npl", "--n-parallel", default="1,4,16", help="sequences that a head rates")
    p.add_count("-n", "--n-predict", usual=128, quick=16, what="tokens per sequence and run")
    p.add_argument("--device", choices=["npu", "cpu"], default="npu")
    p.add_threads()
    p.add_rounds(9, 1)
    a = p.parse()
    if a.beams % a.width:
        p.error("--beams must be a multiple of --width")
    path = a.model or models.synthetic("small" if a.quick else "bench-0.5b", "q8_0")
    rows = report.Rows("scoring", a.json)
    with OtherLoad() as others:
        if a.only != "head":
            with tilebeam.load(path, a.device, n_ctx=8192, n_seq_max=127, threads=a.threads) as lm:
                for row in beam_rows(lm, a):
                    rows.add(row, f"{row['tokens']} tokens decoded, {row['tokens_whole']} in whole texts")
        if a.only != "beams":
            counts = numbers(a.n_parallel, "-npl")
            sizes = {"n_ctx": PROMPT + max(counts) * (a.n_predict + 1), "n_seq_max": max(counts), "threads": a.threads}
            head = load_head(a.reward_head) if a.reward_head else None
            sizes |= {"lookup": False, "hidden_layer": head.layer if head else a.layer}
            with tilebeam.load(path, a.device, **sizes) as lm:
                reward = OwnReward(lm, head or random_head(lm))
                for samples in counts:
                    rows.add(head_row(lm, reward, samples, a.n_predict, a.rounds))
    rows.finish()
    report.warn_if_busy(others.share)


if __name__ == "__main__":
    report.start(main)
