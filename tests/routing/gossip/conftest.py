"""Words of peers for the tests of gossip."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from tests.routing.gossip.virtual import MODEL, SCOPE, START_MS, World

from meshswarm.identity import Identity
from meshswarm.routing.gossip.report import LoadReport, SignedReport
from meshswarm.routing.gossip.words import Accusation, Appointment
from meshswarm.span import Span

SEED = int(os.environ.get("MESHSWARM_SEED", "20261130"))


@pytest.fixture(scope="session")
def who() -> Callable[[int], Identity]:
    """The key pair of peer number n."""
    return lambda number: Identity.from_seed(number.to_bytes(32))


@pytest.fixture(scope="session")
def make_report(who: Callable[[int], Identity]) -> Callable[..., SignedReport]:
    """A signed report of peer number n, some fields replaced."""

    def make(number: int = 1, *, scope: bytes = SCOPE, **changes: object) -> SignedReport:
        fields: dict[str, object] = {
            "peer": who(number).peer_id, "seq": 1_800_000_000_000, "at_ms": 1_800_000_000_000, "model_id": MODEL,
            "span": Span(0, 10), "n_layers": 30, "queue_s": 0.25, "sessions": 2, "free_kv_tokens": 8192,
            "us_per_layer": 300, "role": "server",
        }  # fmt: skip
        return SignedReport.sign(who(number), scope, LoadReport(**(fields | changes)))  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def appoint(who: Callable[[int], Identity]) -> Callable[..., Appointment]:
    """Peer number `peer` has chosen the peers of these numbers."""

    def make(peer: int, watchers: list[int], number: int = 1, scope: bytes = SCOPE) -> Appointment:
        return Appointment.sign(who(peer), scope, number, tuple(who(each).peer_id for each in watchers))

    return make


@pytest.fixture(scope="session")
def accuse(who: Callable[[int], Identity]) -> Callable[..., Accusation]:
    """The peers of these numbers say that the one of `appointment` is silent."""

    def make(appointment: Appointment, by: list[int], at_s: int = START_MS // 1000, number: int = 0) -> Accusation:
        accusations = [Accusation.state(who(each), appointment, at_s, number) for each in by]
        merged = accusations[0]
        for accusation in accusations[1:]:
            merged = merged.merged(accusation)
        return merged

    return make


@pytest.fixture
def make_world() -> Callable[..., World]:
    """A swarm of cores; the seed stands in every failure: `MESHSWARM_SEED=N pytest tests/routing/gossip`."""
    return lambda **options: World(SEED, **options)
