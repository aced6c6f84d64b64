"""What /metrics tells Prometheus. Every server has a registry of its own, so that several can run in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from tilebeam.outputs import Figures, Usage

# From a request of a few tokens on a small model to a search that takes minutes.
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_SECONDS_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Snapshot:
    """The state of server and model when somebody looks.

    Attributes:
        ready: whether requests are answered.
        restarts: loads after a failure.
        admitted: samples of all requests that were let in and are not done.
        model: what the model is doing.
    """

    ready: bool
    restarts: int
    admitted: int
    model: Figures


class Metrics:
    """All figures of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, what: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"tilebeam_{name}", what, labels, registry=self.registry)

        def histogram(
            name: str, what: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] = _SECONDS
        ) -> Histogram:
            return Histogram(f"tilebeam_{name}", what, labels, registry=self.registry, buckets=buckets)

        self.requests = counter(
            "requests", "Requests answered, by path and HTTP status; 499: the client left.", ("path", "status")
        )
        self.refused = counter("requests_refused", "Requests that met a full queue.")
        self.searches = counter("searches", "Searches completed.", ("method",))
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = counter("cached_prompt_tokens", "Of these, taken from other prompts' KV cells.")
        self.generated_tokens = counter("generated_tokens", "Tokens sampled.")
        self.recomputed_tokens = counter("recomputed_tokens", "Tokens decoded a second time.")
        self.drafted_tokens = counter("drafted_tokens", "Tokens guessed ahead and decoded.")
        self.accepted_tokens = counter("accepted_tokens", "Of these, drawn: a step less each.")
        self.scored_tokens = counter("scored_tokens", "Tokens decoded by reward models.")
        self.seconds = counter("seconds", "Seconds of the engine spent on completed requests, by kind.", ("kind",))
        self.request_seconds = histogram(
            "request_seconds", "From a request's arrival to its last byte, seconds.", ("path",)
        )
        self.first_token_seconds = histogram(
            "first_token_seconds", "From a streaming request's arrival to its first token, seconds."
        )
        self.token_seconds = histogram(
            "token_seconds",
            "Between two tokens of a sample of a streaming request, mean of each sample, seconds.",
            buckets=_SECONDS_PER_TOKEN,
        )

    def observe(self, usage: Usage) -> None:
        """Add what a completed request cost."""
        self.prompt_tokens.inc(usage.prompt_tokens)
        self.cached_tokens.inc(usage.cached_tokens)
        self.generated_tokens.inc(usage.completion_tokens)
        self.recomputed_tokens.inc(usage.recomputed_tokens)
        self.drafted_tokens.inc(usage.drafted_tokens)
        self.accepted_tokens.inc(usage.accepted_tokens)
        self.scored_tokens.inc(usage.scored_tokens)
        for kind in ("prefill", "decode", "drafting", "sampling", "scoring"):
            self.seconds.labels(kind).inc(getattr(usage, f"{kind}_seconds"))

    def watch(self, look: Callable[[], Snapshot]) -> None:
        """Show this too, as it is when somebody asks."""
        self.registry.register(_Gauges(look))

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


class _Gauges(Collector):
    def __init__(self, look: Callable[[], Snapshot]) -> None:
        self._look = look

    def collect(self) -> Iterator[Metric]:
        """The figures of this moment."""
        now = self._look()
        for name, what, value in (
            ("ready", "1 if requests are answered.", now.ready),
            ("samples_admitted", "Samples of requests that were let in and are not done.", now.admitted),
            ("samples_running", "Samples that decode now.", now.model.running),
            ("samples_waiting", "Samples that wait for a slot (queue depth).", now.model.waiting),
            ("slots", "Samples that can decode at the same time.", now.model.slots),
            ("kv_cells", "KV cells, one per token.", now.model.cells),
            ("kv_cells_used", "KV cells in use.", now.model.cells_used),
        ):
            yield GaugeMetricFamily(f"tilebeam_{name}", what, value=float(value))
        yield CounterMetricFamily(
            "tilebeam_model_restarts", "Loads of the model after it failed.", value=float(now.restarts)
        )
        yield self._batches(now.model.batches)

    @staticmethod
    def _batches(batches: dict[int, int]) -> Metric:
        buckets = [(str(float(size)), float(sum(n for rows, n in batches.items() if rows <= size))) for size in _BATCH]
        total = float(sum(batches.values()))
        family = HistogramMetricFamily("tilebeam_batch_samples", "Samples that one decode step drew a token for.")
        family.add_metric(
            [], [*buckets, ("+Inf", total)], sum_value=float(sum(rows * n for rows, n in batches.items()))
        )
        return family
