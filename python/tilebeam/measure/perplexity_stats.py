"""Figures from what was measured per token: perplexity, KL divergence, agreement, each with its standard error.

Formulas, and the names of the figures, are llama-perplexity's (llama.cpp, tools/perplexity): a mean over n tokens has
the standard error sqrt(variance / (n - 1)); the logarithms of two perplexities of the same text are compared with their
covariance, which makes the error of the difference much smaller than either's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

PERCENTILES = (99.0, 50.0)


@dataclass
class TokenScores:
    """What was measured of each scored token, in text order.

    Attributes:
        nll: negative log-likelihood, nats.
        nll_base: the base's. This and the next two are empty without a base.
        kld: KL divergence of this model from the base, nats.
        same_top: whether both think the same token likeliest.
    """

    nll: F64
    nll_base: F64
    kld: F64
    same_top: npt.NDArray[np.bool_]

    @staticmethod
    def empty(n: int, base: bool) -> TokenScores:
        """Return room for n tokens, NaN until they are measured."""
        m = n if base else 0
        return TokenScores(np.full(n, np.nan), np.full(m, np.nan), np.full(m, np.nan), np.zeros(m, np.bool_))

    def __len__(self) -> int:
        return len(self.nll)


@dataclass(frozen=True)
class Estimate:
    """A figure and its standard error."""

    value: float
    error: float

    def as_dict(self) -> dict[str, float]:
        """Return it as JSON has it."""
        return {"value": self.value, "stderr": self.error}


def mean(values: npt.NDArray[Any]) -> Estimate:
    """Return mean and its standard error, 0 with fewer than 2 values."""
    n = len(values)
    if n == 0:
        return Estimate(math.nan, math.nan)
    return Estimate(float(np.mean(values)), math.sqrt(float(np.var(values)) / (n - 1)) if n > 1 else 0.0)


def perplexity(nll: F64) -> Estimate:
    """Return exp of the mean negative log-likelihood."""
    log = mean(nll)
    ppl = math.exp(log.value)
    return Estimate(ppl, ppl * log.error)


def log_ratio(nll: F64, nll_other: F64) -> Estimate:
    """Return ln(PPL / PPL other) over the same tokens; its error is that of the mean of paired differences."""
    return mean(nll - nll_other)


@dataclass(frozen=True)
class Figures:
    """All figures of one model on one text.

    Attributes:
        n: tokens scored.
        ppl: perplexity.
        The rest is None without a base:
        ppl_base: the base's perplexity.
        log_ratio: ln(ppl / ppl_base).
        kld: mean KL divergence, nats; kld_percentiles: by percentage; kld_max.
        same_top: share of tokens where both think the same one likeliest.
    """

    n: int
    ppl: Estimate
    ppl_base: Estimate | None = None
    log_ratio: Estimate | None = None
    kld: Estimate | None = None
    kld_percentiles: dict[float, float] | None = None
    kld_max: float | None = None
    same_top: Estimate | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it; figures with an error are {"value", "stderr"}, those without a base left out."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        if self.kld_percentiles is not None:
            found["kld_percentiles"] = {f"{p:g}": v for p, v in self.kld_percentiles.items()}
        return {k: v.as_dict() if isinstance(v, Estimate) else v for k, v in found.items() if v is not None}


def figures(scores: TokenScores) -> Figures:
    """Return figures of all tokens that were measured; what is NaN was not."""
    done = np.isfinite(scores.nll)
    nll = scores.nll[done]
    if len(scores.kld) == 0:
        return Figures(n=len(nll), ppl=perplexity(nll))
    base, kld, same = scores.nll_base[done], scores.kld[done], scores.same_top[done]
    share = float(np.mean(same))
    return Figures(
        n=len(nll),
        ppl=perplexity(nll),
        ppl_base=perplexity(base),
        log_ratio=log_ratio(nll, base),
        kld=mean(kld),
        kld_percentiles={p: float(np.percentile(kld, p)) for p in PERCENTILES},
        kld_max=float(kld.max()),
        same_top=Estimate(share, math.sqrt(share * (1 - share) / max(1, len(nll) - 1))),
    )
