"""Coverage summaries: one peer's view of a whole model, small enough to reach everybody.

How many holders each layer has, which layer is weakest and what it can compute, and how often the model is asked
for. The rule this file keeps: a summary is its author's opinion and says so by his signature; it tells where looking is
worth it, the records of the DHT decide.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from meshswarm.dht import wire
from meshswarm.dht.signed import SUBJECT_BYTES
from meshswarm.dht.wire import WireError
from meshswarm.identity import Identity, PeerId
from meshswarm.routing.gossip.sealed import seal, unseal
from meshswarm.span import MAX_LAYERS, Span

MAX_SUMMARY_BYTES = 512
MAX_RUNS = 48
MAX_COUNT = 65535
_PURPOSE = "summary"
_MAX_MILLI = 2**40


@dataclass(frozen=True, slots=True)
class Holding:
    """One peer's layers of the model, and how long one of its decode rows takes in one of them."""

    peer: PeerId
    span: Span
    us_per_layer: int


@dataclass(frozen=True, slots=True)
class Summary:
    """`runs`: (how many layers, how many holders each of them has), from the first layer on; together all layers.
    `weakest_layer` can compute `tokens_per_s`, all holders together. `n_peers`: whom the author knows to hold layers.
    `requests_per_s`: as far as the author has heard. `number` rises with each summary of an author."""

    author: PeerId
    scope: bytes
    number: int
    model_id: bytes
    n_peers: int
    runs: tuple[tuple[int, int], ...]
    weakest_layer: int
    tokens_per_s: float
    requests_per_s: float
    wire: bytes = field(repr=False)

    @property
    def n_layers(self) -> int:
        return sum(length for length, _ in self.runs)

    def holders(self) -> list[int]:
        """The number of holders of every layer."""
        return [count for length, count in self.runs for _ in range(length)]

    @classmethod
    def sign(
        cls,
        identity: Identity,
        scope: bytes,
        number: int,
        model_id: bytes,
        n_layers: int,
        holdings: Iterable[Holding],
        requests_per_s: float,
    ) -> Summary:
        held = list(holdings)
        counts, throughput = _by_layer(held, n_layers)
        weakest = min(range(n_layers), key=lambda layer: (throughput[layer], counts[layer], layer))
        said = [
            model_id,
            min(len({holding.peer for holding in held}), MAX_COUNT),
            [list(run) for run in _runs(counts)],
            weakest,
            min(round(throughput[weakest] * 1000), _MAX_MILLI),
            min(round(requests_per_s * 1000), _MAX_MILLI),
        ]
        return cls.decode(seal(identity, _PURPOSE, scope, number, said))

    @classmethod
    def decode(cls, data: bytes) -> Summary:
        """Reads and checks all but the signature. Raises WireError."""
        what = "a summary"
        sealed = unseal(data, max_bytes=MAX_SUMMARY_BYTES, at_least=6, what=what)
        fields = sealed.fields
        runs = tuple(_run(item) for item in wire.array(fields[2], "runs", at_least=1, at_most=MAX_RUNS))
        n_layers = sum(length for length, _ in runs)
        if n_layers > MAX_LAYERS:
            raise WireError(f"{what} of a model of {n_layers} layers; at most {MAX_LAYERS} are allowed")
        return cls(
            author=sealed.author,
            scope=sealed.scope,
            number=sealed.number,
            model_id=wire.binary(fields[0], "model id", size=SUBJECT_BYTES),
            n_peers=wire.integer(fields[1], "peers", high=MAX_COUNT),
            runs=runs,
            weakest_layer=wire.integer(fields[3], "weakest layer", high=n_layers - 1),
            tokens_per_s=wire.integer(fields[4], "throughput", high=_MAX_MILLI) / 1000,
            requests_per_s=wire.integer(fields[5], "demand", high=_MAX_MILLI) / 1000,
            wire=data,
        )

    def verify(self) -> bool:
        return unseal(self.wire, max_bytes=MAX_SUMMARY_BYTES, at_least=6, what="a summary").is_signed(_PURPOSE)


def _by_layer(holdings: Iterable[Holding], n_layers: int) -> tuple[list[int], list[float]]:
    """How many hold each layer, and how many tokens a second they can take through it together."""
    counts, throughput = [0] * n_layers, [0.0] * n_layers
    for holding in holdings:
        tokens_per_s = 1e6 / (max(1, holding.us_per_layer) * len(holding.span))
        for layer in range(holding.span.start, min(holding.span.stop, n_layers)):
            counts[layer] = min(counts[layer] + 1, MAX_COUNT)
            throughput[layer] += tokens_per_s
    return counts, throughput


def _runs(counts: list[int]) -> list[tuple[int, int]]:
    """Neighbouring layers with equal counts together. Where there are too many runs, the two neighbours whose counts
    differ least become one with the smaller count: a summary never says more than there is."""
    runs: list[tuple[int, int]] = []
    for count in counts:
        if runs and runs[-1][1] == count:
            runs[-1] = (runs[-1][0] + 1, count)
        else:
            runs.append((1, count))
    while len(runs) > MAX_RUNS:
        at = min(range(len(runs) - 1), key=lambda i: abs(runs[i][1] - runs[i + 1][1]))
        (length, count), (length_after, count_after) = runs[at : at + 2]
        runs[at : at + 2] = [(length + length_after, min(count, count_after))]
    return runs


def _run(item: object) -> tuple[int, int]:
    pair = wire.array(item, "run", at_least=2, at_most=2)
    length = wire.integer(pair[0], "run", low=1, high=MAX_LAYERS)
    return length, wire.integer(pair[1], "holders", high=MAX_COUNT)
