"""Scoring a growing beam: only new steps, against whole texts every round; tokens counted, runs interleaved.

    python -m bench.scoring [-m MODEL.gguf] [-N 16] [-M 4] [--json] [--quick]

The beams are scripted: N of them, for 8 rounds, each round the best N / M grow by M random steps. Tilebeam's reward
models keep the cells of what they have read and fork them; the baseline decodes every text of every round from its
beginning (as libraries do that send texts to a reward model), in the same batches on the same model and device. A row
is a kind of reward model, its value how many texts are scored per second; "tokens" is what was decoded, exactly, and
"fewer" how many times fewer tokens that is. Without -m it writes a random model with the shape of Qwen2.5-0.5B
(--quick: a smaller one, shorter steps).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import tilebeam
from tilebeam.cli import console
from tilebeam.model.lm import LM
from tilebeam.scoring.reward_heads import make_head
from tilebeam.scoring.reward_model import HeadReward, RewardModel, TokenReward

from bench.lib import models, report
from bench.lib.options import Parser

ROUNDS = 8


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


def scorers(lm: LM) -> dict[str, RewardModel]:
    """One with and one without hidden states."""
    weight = np.random.default_rng(2).standard_normal(lm.n_embd) / lm.n_embd**0.5
    form = tilebeam.RewardFormat(tag=" ?", strip="\n")
    return {
        "token": TokenReward(lm, good="1", bad="2", format=form),
        "value head": HeadReward(lm, make_head([(weight, None)]), format=form),
    }


def main() -> None:
    """Measure and print."""
    p = Parser(__doc__, "a smaller model, shorter steps")
    p.add_model()
    p.add_argument("-N", "--beams", type=int, default=16)
    p.add_argument("-M", "--width", type=int, default=4, help="continuations of each survivor")
    p.add_argument("--n-prompt", type=int, default=120, help="words of the prompt")
    p.add_count("--n-step", usual=30, quick=12, what="words of a step")
    p.add_argument("--device", choices=["npu", "cpu"], default="npu")
    p.add_threads()
    p.add_rounds(1, 1)
    a = p.parse()
    if a.beams % a.width:
        p.error("--beams must be a multiple of --width")
    path = a.model or models.synthetic("small" if a.quick else "bench-0.5b", "q8_0")
    rows = report.Rows("scoring", a.json)
    with (
        tilebeam.load(path, a.device, n_ctx=8192, n_seq_max=127, threads=a.threads) as lm,
        console.bar("scoring") as progress,
    ):
        beams = Beams(lm, a.beams, a.width, a.n_prompt, a.n_step)
        task = progress.add_task("", total=2 * a.rounds, note="")
        for name, scorer in scorers(lm).items():
            pairs = report.Pairs([], [])
            for _ in range(a.rounds):
                progress.update(task, description=name)
                began = time.perf_counter()
                history, usage = beams.search(scorer)
                middle = time.perf_counter()
                tokens = whole(scorer, beams.prompt, history)
                pairs.ours.append(middle - began)
                pairs.baseline.append(time.perf_counter() - middle)
                progress.update(task, advance=1)
                assert tokens == usage.full_scoring_tokens  # both counted the same texts
            spent = usage.scored_tokens
            row = report.row(f"{name}, {a.beams} beams of {ROUNDS} steps", pairs, ROUNDS * a.beams, "texts/s")
            rows.add(
                row | {"tokens": spent, "tokens_whole": tokens, "fewer": round(tokens / spent, 2)},
                f"{spent} tokens decoded, {tokens} in whole texts: {tokens / spent:.1f} times fewer",
            )
    rows.finish()


if __name__ == "__main__":
    report.start(main)
