"""What training a reasoner and training a reward model have in common: batches, optimizers, schedule."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .model import TinyLlama

IGNORED = -100  # a target nothing is learned from
_BALANCE = 0.01  # weight of a mixture's loss for unequal use of its experts

Example = tuple[list[int], list[int]]  # token ids, and the target behind each


@dataclass(frozen=True)
class Recipe:
    """How long and how fast."""

    tokens: float
    batch: int = 64
    rate: float = 3e-3
    warmup: int = 50  # steps
    decay: float = 0.5  # share of the tokens over which the rate falls to zero, at the end


def batches(examples: Sequence[Example], size: int, rng: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of examples of about one length, for ever: ids and targets [size, longest]."""
    order = list(range(len(examples)))
    while True:
        rng.shuffle(order)
        for at in range(0, len(order), 64 * size):
            some = sorted(order[at : at + 64 * size], key=lambda i: len(examples[i][0]))
            groups = [some[b : b + size] for b in range(0, len(some), size)]
            rng.shuffle(groups)
            for group in groups:
                yield _padded([examples[i] for i in group])


def _padded(rows: list[Example]) -> tuple[Tensor, Tensor]:
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [0] * (longest - len(row)) for row, _ in rows])
    targets = torch.tensor([row + [IGNORED] * (longest - len(row)) for _, row in rows])
    return ids, targets


def _optimizers(model: TinyLlama, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the rest, convolutions and routers among them."""
    matrices = [(name, p) for name, p in model.named_parameters() if p.dim() == 2]
    rest = re.compile(r"(?!blk\.)|.*(shortconv\.conv|ffn_gate_inp)\.")
    inside = [p for name, p in matrices if not rest.match(name)]
    outside = [p for name, p in matrices if rest.match(name)]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": outside, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(inside, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True),
    ]


def learn(
    model: TinyLlama,
    examples: Sequence[Example],
    recipe: Recipe,
    seed: int,
    report: Callable[[int, str], bool],
    every: int = 200,
    weight: Tensor | None = None,
) -> None:
    """Train until the recipe's tokens have been seen, or `report` says that it is enough.

    Args:
        report: gets the number of steps and a line of facts every so many steps, and at the end.
        weight: of each token as a target, [N_VOCAB]; None: all alike.
    """
    model.train()
    optimizers = _optimizers(model, recipe.rate)
    seen, losses = 0, 0.0
    for done_steps, (ids, targets) in enumerate(batches(examples, recipe.batch, random.Random(seed))):
        step, done = done_steps + 1, seen / recipe.tokens
        if done >= 1:
            report(done_steps, f"{1:6.1%} {done_steps} steps, {seen / 1e6:.2f}M tokens, loss {losses:.4f}")
            break
        rate = recipe.rate * min(1.0, step / recipe.warmup, max((1 - done) / recipe.decay, 0.01))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), weight, ignore_index=IGNORED)
        balance = model.balance
        total = loss if balance is None else loss + _BALANCE * balance
        for optimizer in optimizers:
            optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        seen += ids.numel()
        losses += (float(loss.detach()) - losses) / min(step, 50)
        facts = f"{done:6.1%} {step} steps, {seen / 1e6:.2f}M tokens, loss {losses:.4f}"
        if step % every == 0 and report(step, facts):
            break
