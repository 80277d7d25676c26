"""Prometheus metrics of a server, under vLLM's names with our prefix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ..engine.encoder_engine import EncoderEngine
from ..engine.engine import Engine
from ..engine.outputs import FinishReason, Output

PREFIX = "jax_q4k:"

#: Upper bounds of histograms, in seconds.
_FIRST = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_WHOLE = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
#: Upper bounds of a histogram of tokens: powers of two, as `EngineStats.step_tokens` counts.
_TOKENS = tuple(1 << i for i in range(14))


class Metrics:
    """Metrics of a server: histograms of finished requests, and the engine's state when read."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, help, buckets=buckets, registry=self.registry)

        self._first = histogram("time_to_first_token_seconds", "Time to the first token", _FIRST)
        self._gap = histogram("inter_token_latency_seconds", "Mean gap of an answer", _GAPS)
        self._whole = histogram("e2e_request_latency_seconds", "Time to the last token", _WHOLE)
        self._queue = histogram("request_queue_time_seconds", "Time until it has a row", _FIRST)
        self._prefill = histogram("request_prefill_time_seconds", "Time of its prompt", _FIRST)

        def counter(name: str, help: str, label: str) -> Counter:
            return Counter(PREFIX + name, help, labelnames=(label,), registry=self.registry)

        def total(name: str, help: str) -> Counter:
            return Counter(PREFIX + name, help, registry=self.registry)

        self._drafted = total("spec_decode_num_draft_tokens", "Draft tokens")
        self._accepted = total("spec_decode_num_accepted_tokens", "Draft tokens that were right")
        self._finished = counter("request_success", "Finished answers", "finished_reason")
        self._rejected = counter("requests_rejected", "Refused requests", "reason")
        # Their series begin at 0, so that rates have the first increase.
        for reason in get_args(FinishReason):
            self._finished.labels(reason)
        for reason in ("queue_full", "invalid_api_key"):
            self._rejected.labels(reason)

    def watch(self, engine: Engine | EncoderEngine) -> None:
        """Adds an engine's state."""
        self.registry.register(_OfEngine(engine))

    def finished(self, output: Output) -> None:
        """Counts a finished answer."""
        timings = output.timings
        self._finished.labels(output.finish_reason).inc()
        self._drafted.inc(timings.drafted_tokens)
        self._accepted.inc(timings.accepted_tokens)
        if timings.new_tokens:
            self._first.observe(timings.first_token)
            self._queue.observe(timings.queue)
            self._prefill.observe(timings.first_token - timings.queue)
            self._whole.observe(timings.first_token + timings.decode)
        if timings.decoded_tokens:
            self._gap.observe(timings.decode / timings.decoded_tokens)

    def cancelled(self, count: int) -> None:
        """Counts answers that ended before their last token: the client left, or an error."""
        self._finished.labels("cancelled").inc(count)

    def rejected(self, reason: str) -> None:
        """Counts a refused request."""
        self._rejected.labels(reason).inc()


class _OfEngine(Collector):
    """Reads an engine's state for every scrape."""

    def __init__(self, engine: Engine | EncoderEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        gauges = {
            "num_requests_running": ("Running requests", stats.running),
            "num_requests_waiting": ("Waiting requests", stats.waiting),
            "kv_cache_usage_perc": ("Used part of the pages", 1 - stats.free_pages / stats.pages),
        }
        counters = {
            "prefix_cache_queries": ("Tokens of prompts", stats.prompt_tokens),
            "prefix_cache_hits": ("Tokens of prompts that were cached", stats.reused_tokens),
            "num_preemptions": ("Preempted requests", stats.preemptions),
            "prompt_tokens": ("Tokens of prompts", stats.prompt_tokens),
            "generation_tokens": ("Tokens of answers", stats.new_tokens),
            "steps": ("Steps of the engine", stats.steps),
            "compilations_after_warmup": ("Programs compiled late", stats.compilations),
            "step_host_seconds": ("Processor time of the engine's thread", stats.host_seconds),
            "step_device_seconds": ("Time that it waited for steps", stats.wait_seconds),
        }
        for name, (help, value) in gauges.items():
            yield GaugeMetricFamily(PREFIX + name, help, value=value)
        for name, (help, value) in counters.items():
            yield CounterMetricFamily(PREFIX + name, help, value=value)
        lost = CounterMetricFamily(
            PREFIX + "prefix_cache_lost", "Cached tokens that were not usable", labels=["reason"]
        )
        for reason, value in stats.lost_tokens.items():
            lost.add_metric([reason], value)
        yield lost
        upto = [
            (
                str(bound),
                sum(count for tokens, count in stats.step_tokens.items() if tokens <= bound),
            )
            for bound in _TOKENS
        ]
        yield HistogramMetricFamily(
            PREFIX + "iteration_tokens_total",
            "Tokens of a step",
            buckets=[*upto, ("+Inf", sum(stats.step_tokens.values()))],
            sum_value=stats.run_tokens,
        )
