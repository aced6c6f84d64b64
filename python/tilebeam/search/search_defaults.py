"""Names and defaults of searches that options are made of. Importing this needs no numpy."""

from __future__ import annotations

from typing import Literal

# What a vote weighs.
Weighting = Literal["plain", "logprob", "reward", "softmax"]
# How much good scores count in weights that are relative to a prompt's other candidates.
SHARPNESS = 0.5

BUDGET = 16  # candidates per prompt
EXTRACTOR = "last-number"  # see `tilebeam.answers.extractors`
BEAM_WIDTH = 4
MAX_STEPS = 40  # chat models' solutions have 10 to 30 lines; one that is cut lacks its answer
MAX_STEP_TOKENS = 256
CONFIDENCE = 0.95  # of a vote that counts as settled
WAVE = 4  # candidates of a prompt that start together where slots are scarce
ROUNDS = 3  # programs of a text that writes some
