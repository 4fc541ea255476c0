"""Counters and histograms of the server, in Prometheus' text format (version 0.0.4)."""

import bisect
import collections
import time
from typing import Any

from north_jax.sampler.engine import COUNTERS, Result

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "north_jax_"


class Histogram:
    """Observed seconds, counted in buckets."""

    def __init__(self):
        self.counts, self.total = [0] * (len(SECONDS) + 1), 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Counts `times` observations of this length."""
        self.counts[bisect.bisect_left(SECONDS, seconds)] += times
        self.total += seconds * times

    def lines(self, name: str) -> list[str]:
        """The histogram's samples."""
        reached, lines = 0, []
        for bound, count in zip((*SECONDS, "+Inf"), self.counts, strict=True):
            reached += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {reached}')
        return [*lines, f"{name}_sum {self.total:.6f}", f"{name}_count {reached}"]


class Metrics:
    """What the server counts itself; `text` adds the engine's counters. Used on the event loop's thread only."""

    def __init__(self):
        self.finished: collections.Counter[str] = collections.Counter()
        self.refused: collections.Counter[int] = collections.Counter()
        self.prompt_tokens = 0
        self.first_token, self.per_token, self.request = Histogram(), Histogram(), Histogram()

    def drawn(self, born: float, last: float, tokens: int) -> None:
        """`tokens` have arrived now of a streamed request: the first ones where `last` is its `born`."""
        now = time.monotonic()
        if last == born:
            self.first_token.observe(now - born)
        else:
            self.per_token.observe((now - last) / tokens, tokens)

    def done(self, result: Result) -> None:
        """A request has ended."""
        self.finished[result.finish[0]] += 1
        self.prompt_tokens += result.prompt_tokens
        self.request.observe(result.seconds)

    def text(self, stats: dict[str, Any], open_requests: int, version: str, path: str) -> str:
        """The answer of /metrics. `stats` are Engine.stats."""
        out: list[str] = []

        def family(name: str, kind: str, about: str, samples: list[str]) -> None:
            out.extend([f"# HELP {_PREFIX}{name} {about}", f"# TYPE {_PREFIX}{name} {kind}"])
            out.extend(_PREFIX + sample for sample in samples)

        labels = f'weight_version="{_escaped(version)}",model_path="{_escaped(path)}"'
        family("info", "gauge", "What is served; always 1.", [f"info{{{labels}}} 1"])
        for name, about in (
            ("running", "Requests that hold a place in the engine."),
            ("queue_length", "Requests that wait for one."),
            ("paused", "1 while generation is paused."),
        ):
            family(name, "gauge", about, [f"{name} {int(stats[name])}"])
        family("open_requests", "gauge", "Requests that a client waits for.", [f"open_requests {open_requests}"])
        for name in (*COUNTERS, "compilations"):
            family(f"{name}_total", "counter", f"Engine counter {name}.", [f"{name}_total {stats[name]}"])
        family("prompt_tokens_total", "counter", "Prompt tokens.", [f"prompt_tokens_total {self.prompt_tokens}"])
        for name, label, counts in (
            ("finished_total", "reason", self.finished),
            ("refused_total", "status", self.refused),
        ):
            samples = [f'{name}{{{label}="{_escaped(str(key))}"}} {count}' for key, count in sorted(counts.items())]
            family(name, "counter", f"Requests by {label}.", samples)
        for name, histogram, about in (
            ("time_to_first_token_seconds", self.first_token, "From arrival to first token, of streamed requests."),
            ("time_per_output_token_seconds", self.per_token, "Between tokens after the first, of streamed requests."),
            ("request_seconds", self.request, "From arrival to last token."),
        ):
            family(name, "histogram", about, histogram.lines(name))
        return "\n".join(out) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
