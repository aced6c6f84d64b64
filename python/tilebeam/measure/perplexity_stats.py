"""Figures from what was measured per token: perplexity, KL divergence, agreement, each with its standard error.

Formulas, and the names of the figures, are llama-perplexity's (llama.cpp, tools/perplexity): a mean over n tokens has
the standard error sqrt(variance / (n - 1)); the logarithms of two perplexities of the same text are compared with their
covariance, which makes the error of the difference much smaller than either's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

PERCENTILES = (99.9, 99.0, 95.0, 90.0, 50.0, 10.0, 5.0, 1.0, 0.1)


def _no_floats() -> F64:
    return np.empty(0)


def _no_bools() -> npt.NDArray[np.bool_]:
    return np.empty(0, np.bool_)


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
    nll_base: F64 = field(default_factory=_no_floats)
    kld: F64 = field(default_factory=_no_floats)
    same_top: npt.NDArray[np.bool_] = field(default_factory=_no_bools)

    @staticmethod
    def empty(n: int, base: bool) -> TokenScores:
        """Return room for n tokens, NaN until they are measured."""
        m = n if base else 0
        return TokenScores(np.full(n, np.nan), np.full(m, np.nan), np.full(m, np.nan), np.zeros(m, np.bool_))

    @staticmethod
    def joined(parts: Sequence[TokenScores]) -> TokenScores:
        """Return several parts of a text, in order."""
        return TokenScores(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(TokenScores)))

    def part(self, first: int, last: int) -> TokenScores:
        """Return tokens first .. last - 1."""
        return TokenScores(*(getattr(self, f.name)[first:last] for f in fields(TokenScores)))

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
        correlation: of the two models' negative log-likelihoods.
        kld: mean KL divergence, nats; kld_percentiles: by percentage; kld_max, kld_min.
        same_top: share of tokens where both think the same one likeliest.
        p_diff: mean difference of the probability of the text's token; p_diff_rms: its root mean square.
    """

    n: int
    ppl: Estimate
    ppl_base: Estimate | None = None
    log_ratio: Estimate | None = None
    correlation: float | None = None
    kld: Estimate | None = None
    kld_percentiles: dict[float, float] | None = None
    kld_max: float | None = None
    kld_min: float | None = None
    same_top: Estimate | None = None
    p_diff: Estimate | None = None
    p_diff_rms: Estimate | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it; figures with an error are {"value", "stderr"}, those without a base left out."""
        result: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Estimate):
                result[f.name] = value.as_dict()
            elif f.name == "kld_percentiles" and value is not None:
                result[f.name] = {f"{p:g}": v for p, v in value.items()}
            elif value is not None:
                result[f.name] = value
        return result


def figures(scores: TokenScores) -> Figures:
    """Return figures of all tokens that were measured; what is NaN was not."""
    done = np.isfinite(scores.nll)
    nll = scores.nll[done]
    if len(scores.kld) == 0:
        return Figures(n=len(nll), ppl=perplexity(nll))
    base, kld, same = scores.nll_base[done], scores.kld[done], scores.same_top[done]
    p_diff = np.exp(-nll) - np.exp(-base)
    square = mean(p_diff**2)
    rms = math.sqrt(square.value)
    share = float(np.mean(same))
    spread = float(np.std(nll) * np.std(base))
    return Figures(
        n=len(nll),
        ppl=perplexity(nll),
        ppl_base=perplexity(base),
        log_ratio=log_ratio(nll, base),
        correlation=float(np.mean((nll - nll.mean()) * (base - base.mean()))) / spread if spread > 0 else math.nan,
        kld=mean(kld),
        kld_percentiles={p: float(np.percentile(kld, p)) for p in PERCENTILES},
        kld_max=float(kld.max()),
        kld_min=float(kld.min()),
        same_top=Estimate(share, math.sqrt(share * (1 - share) / max(1, len(nll) - 1))),
        p_diff=mean(p_diff),
        p_diff_rms=Estimate(rms, 0.5 * square.error / rms if rms > 0 else 0.0),
    )
