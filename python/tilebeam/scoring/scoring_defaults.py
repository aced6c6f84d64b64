"""Names and defaults of scoring that options are made of. Importing this needs no numpy."""

from __future__ import annotations

from typing import Literal

# How a reward model gives its verdict.
Kind = Literal["token", "value-head", "two-label", "classifier"]
# How the scores of a text's steps become one.
Aggregation = Literal["last", "min", "prod", "mean"]
# What is made of the last layer of a reward model's head.
HeadOutput = Literal["sigmoid", "softmax", "none"]
# Scorers that need no reward model, by name.
ScorerName = Literal["consensus", "logprob", "logprob-sum", "tail-entropy", "examples", "behavior", "judge"]
# Those whose scores weigh votes.
VoteScorer = Literal["logprob", "tail-entropy"]
RUN_PROGRAMS: tuple[ScorerName, ...] = ("examples", "behavior")  # those that run what a model wrote

AGGREGATION: Aggregation = "last"
STEP_STOP = "\n"  # what ends a step of a text
