"""What /metrics tells Prometheus. Every server has a registry of its own, so that several can run in one process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tilebeam.server.logs import note

if TYPE_CHECKING:
    from tilebeam.outputs import EngineFigures, Usage

# From a request of a few tokens on a small model to a search that takes minutes.
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_SECONDS_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_CREATED = re.compile(rb"(?m)^(?:# \w+ )?\w+_created\b.*\n")
_BATCH = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


@dataclass(frozen=True)
class Snapshot:
    """The state of server and model when somebody looks.

    Attributes:
        ready: whether requests are answered, be it after the model is loaded.
        loaded: whether it is.
        restarts: loads after a failure.
        admitted: samples of all requests that were let in and are not done.
        model: what the model is doing.
    """

    ready: bool
    loaded: bool
    restarts: int
    admitted: int
    model: EngineFigures


class Metrics:
    """All figures of one server.

    Args:
        models: names of its models; figures of one among several have a label with its name.
    """

    def __init__(self, models: Sequence[str]) -> None:
        self.registry = CollectorRegistry()
        self._labelled = len(models) > 1
        self.requests = self._counter(
            "requests", "Requests answered, by path and HTTP status; 499: the client left.", ("path", "status")
        )
        self.request_seconds = self._histogram(
            "request_seconds", "From a request's arrival to its last byte, seconds.", labels=("path",)
        )
        label = ("model",) if self._labelled else ()
        count, histogram = partial(self._counter, labels=label), partial(self._histogram, labels=label)
        self.refused = count("requests_refused", "Requests that met a full queue.")
        self.searches = count("searches", "Searches completed.", labels=(*label, "method"))
        self.tokens = {
            "prompt": count("prompt_tokens", "Tokens of prompts."),
            "cached": count("cached_prompt_tokens", "Of these, taken from other prompts' KV cells."),
            "completion": count("generated_tokens", "Tokens sampled."),
            "recomputed": count("recomputed_tokens", "Tokens decoded a second time."),
            "drafted": count("drafted_tokens", "Tokens guessed ahead and decoded."),
            "accepted": count("accepted_tokens", "Of these, drawn: a step less each."),
            "scored": count("scored_tokens", "Tokens decoded by reward models."),
        }
        self.seconds = count(
            "seconds", "Seconds of the engine spent on completed requests, by kind.", labels=(*label, "kind")
        )
        self.first_token_seconds = histogram(
            "first_token_seconds", "From a streaming request's arrival to its first token, seconds."
        )
        self.token_seconds = histogram(
            "token_seconds",
            "Between two tokens of a sample of a streaming request, mean of each sample, seconds.",
            buckets=_SECONDS_PER_TOKEN,
        )

    def of(self, model: str) -> ModelMetrics:
        """Return those of one model."""
        return ModelMetrics(self, (model,) if self._labelled else ())

    def watch(self, look: Callable[[], dict[str, Snapshot]]) -> None:
        """Show the state of models, too, as it is when somebody asks."""
        self.registry.register(_Gauges(look, self._labelled))

    def text(self) -> bytes:
        """Write Prometheus' text format, without the times at which its client began to count each figure."""
        return _CREATED.sub(b"", generate_latest(self.registry))

    def _counter(self, name: str, what: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"tilebeam_{name}", what, labels, registry=self.registry)

    def _histogram(
        self, name: str, what: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] = _SECONDS
    ) -> Histogram:
        return Histogram(f"tilebeam_{name}", what, labels, registry=self.registry, buckets=buckets)


class ModelMetrics:
    """What is counted of one model."""

    def __init__(self, metrics: Metrics, label: tuple[str, ...]) -> None:
        self._metrics = metrics
        self._label = label

    def refuse(self) -> None:
        """Count a request that met a full queue."""
        self._of(self._metrics.refused).inc()

    def search(self, method: str) -> None:
        """Count a search that is complete."""
        self._of(self._metrics.searches, method).inc()

    def first_token(self, seconds: float) -> None:
        """Record the seconds until a streaming request got its first token."""
        note(first_token_seconds=round(seconds, 3))
        self._of(self._metrics.first_token_seconds).observe(seconds)

    def token(self, seconds: float) -> None:
        """Record a complete streamed sample: seconds from token to token."""
        self._of(self._metrics.token_seconds).observe(seconds)

    def observe(self, usage: Usage) -> None:
        """Add what a completed request cost."""
        note(tokens_in=usage.prompt_tokens, cached=usage.cached_tokens, tokens_out=usage.completion_tokens)
        all_ = self._metrics
        for kind, counter in all_.tokens.items():
            self._of(counter).inc(getattr(usage, f"{kind}_tokens"))
        for kind in ("prefill", "decode", "drafting", "sampling", "scoring"):
            self._of(all_.seconds, kind).inc(getattr(usage, f"{kind}_seconds"))

    def _of(self, metric: Any, *more: str) -> Any:
        labels = (*self._label, *more)
        return metric.labels(*labels) if labels else metric


class _Gauges(Collector):
    """The figures of this moment.

    Args:
        look: the models' states by name.
        labelled: whether each figure has its model's name.
    """

    def __init__(self, look: Callable[[], dict[str, Snapshot]], labelled: bool) -> None:
        self._look = look
        self._labelled = labelled

    def collect(self) -> Iterator[Metric]:
        """Yield the figures of this moment."""
        states = [([model] * self._labelled, now) for model, now in self._look().items()]
        labels = ["model"] * self._labelled
        figures: tuple[tuple[str, str, Callable[[Snapshot], float]], ...] = (
            ("ready", "1 if requests are answered.", lambda now: now.ready),
            ("model_loaded", "1 if the model is loaded.", lambda now: now.loaded),
            ("samples_admitted", "Samples of requests that were let in and are not done.", lambda now: now.admitted),
            ("samples_running", "Samples that decode now.", lambda now: now.model.running),
            ("samples_waiting", "Samples that wait for a slot (queue depth).", lambda now: now.model.waiting),
            ("slots", "Samples that can decode at the same time.", lambda now: now.model.slots),
            ("kv_cells", "KV cells, one per token.", lambda now: now.model.cells),
            ("kv_cells_used", "KV cells in use.", lambda now: now.model.cells_used),
        )
        for name, what, value in figures:
            gauge = GaugeMetricFamily(f"tilebeam_{name}", what, labels=labels)
            for own, now in states:
                gauge.add_metric(own, float(value(now)))
            yield gauge
        restarts = CounterMetricFamily("tilebeam_model_restarts", "Loads of the model after it failed.", labels=labels)
        batches = HistogramMetricFamily(
            "tilebeam_batch_samples", "Samples that one decode step drew a token for.", labels=labels
        )
        for own, now in states:
            restarts.add_metric(own, float(now.restarts))
            counts = now.model.batches.items()
            buckets = [(str(size), float(sum(n for rows, n in counts if rows <= size))) for size in _BATCH]
            buckets.append(("+Inf", float(sum(n for _, n in counts))))
            batches.add_metric(own, buckets, sum_value=float(sum(rows * n for rows, n in counts)))
        yield restarts
        yield batches
