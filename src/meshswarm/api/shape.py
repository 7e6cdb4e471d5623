"""What the two kinds of answer have in common: ids, usage, timings, and the interface that `answer` writes with.

The rule this file keeps: a shape turns events into JSON values and does nothing else; no sockets, no clocks. Every
chunk of one stream carries the same `id`, `created` and `model`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from meshswarm.head.request import Finished, Started, Timings, Usage


class Shape(ABC):
    """One answer's bodies, streamed or whole. `include_usage` adds a usage chunk at a stream's end."""

    chunk_object: str
    whole_object: str
    id_prefix: str

    def __init__(self, *, include_usage: bool) -> None:
        self._include_usage = include_usage

    def opening(self, started: Started) -> list[dict[str, Any]]:
        """The chunks that come before any text."""
        return []

    def delta(self, started: Started, text: str) -> dict[str, Any]:
        return self._chunk(started, [self.delta_choice(text, None)])

    def closing(self, started: Started, finished: Finished) -> list[dict[str, Any]]:
        """The last choice chunk, with what is known only now, and the usage chunk where asked for."""
        last = self._chunk(started, [self.delta_choice("", finished.reason)]) | _details(started, finished)
        if not self._include_usage:
            return [last]
        usage = self._chunk(started, []) | {
            "usage": usage_object(finished.usage),
            "system_fingerprint": finished.system_fingerprint,
        }
        return [last, usage]

    def whole(self, started: Started, text: str, finished: Finished) -> dict[str, Any]:
        return {
            **self._head(started, self.whole_object),
            "choices": [self.whole_choice(text, finished.reason)],
            "usage": usage_object(finished.usage),
            **_details(started, finished),
        }

    @abstractmethod
    def delta_choice(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        """The choice of a chunk: more text, or no text and the reason of the end."""

    @abstractmethod
    def whole_choice(self, text: str, finish_reason: str) -> dict[str, Any]: ...

    def _head(self, started: Started, kind: str) -> dict[str, Any]:
        return {
            "id": f"{self.id_prefix}-{started.request_id}",
            "object": kind,
            "created": started.created,
            "model": started.model,
        }

    def _chunk(self, started: Started, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._head(started, self.chunk_object) | {"choices": choices}
        if self._include_usage:
            chunk["usage"] = None
        return chunk


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
    }


def timings_object(timings: Timings) -> dict[str, Any]:
    """llama-server's names, so that front-ends that show them work unchanged; `flights` is ours."""
    prompt_each_ms, prompt_per_s = _rates(timings.prompt_n, timings.prompt_ms)
    predicted_each_ms, predicted_per_s = _rates(timings.predicted_n, timings.predicted_ms)
    return {
        "prompt_n": timings.prompt_n,
        "prompt_ms": round(timings.prompt_ms, 3),
        "prompt_per_token_ms": prompt_each_ms,
        "prompt_per_second": prompt_per_s,
        "predicted_n": timings.predicted_n,
        "predicted_ms": round(timings.predicted_ms, 3),
        "predicted_per_token_ms": predicted_each_ms,
        "predicted_per_second": predicted_per_s,
        "draft_n": timings.draft_n,
        "draft_n_accepted": timings.draft_n_accepted,
        "flights": timings.flights,
    }


def _rates(count: int, duration_ms: float) -> tuple[float, float]:
    """(milliseconds each, how many a second); 0 where nothing was measured, as JSON has no infinity."""
    each_ms = round(duration_ms / count, 3) if count > 0 else 0.0
    per_s = round(count / duration_ms * 1000, 3) if duration_ms > 0 else 0.0
    return each_ms, per_s


def _details(started: Started, finished: Finished) -> dict[str, Any]:
    return {
        "system_fingerprint": finished.system_fingerprint,
        "timings": timings_object(finished.timings),
        "meshswarm": {
            "route": [{"peer": peer, "layers": layers} for peer, layers in started.route.hops],
            "numclass": started.route.numclass,
            "wire": started.route.wire,
        },
    }
