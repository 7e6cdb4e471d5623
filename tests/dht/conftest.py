"""Peers, records and cores for the tests of the table."""

from collections.abc import Callable

import pytest

from meshswarm.config import Address
from meshswarm.dht.core import Core
from meshswarm.dht.keys import Topics
from meshswarm.dht.messages import Sender
from meshswarm.dht.records import CoverageRecord
from meshswarm.dht.signed import RecordKind, SignedRecord
from meshswarm.identity import Identity
from meshswarm.net.swarm import Swarm
from meshswarm.span import Span

NOW = 1_800_000_000.0


@pytest.fixture
def now() -> float:
    return NOW


@pytest.fixture(scope="session")
def topics() -> Topics:
    return Topics(Swarm("tests"))


@pytest.fixture(scope="session")
def identity() -> Callable[[int], Identity]:
    """The key pair of peer number n."""
    return lambda number: Identity.from_seed(number.to_bytes(32))


@pytest.fixture(scope="session")
def make_coverage(identity: Callable[[int], Identity]) -> Callable[..., CoverageRecord]:
    """A coverage record of peer number n, some fields replaced."""

    def make(number: int = 1, span: str = "0:10", **changes: object) -> CoverageRecord:
        fields: dict[str, object] = {
            "peer": identity(number).peer_id,
            "addresses": (Address("127.0.0.1", 4000 + number),),
            "model_id": bytes(range(32)),
            "span": Span.parse(span),
            "loaded": True,
            "numclass": "llama.cpp b1 cpu avx2",
            "n_ctx": 4096,
            "us_per_layer": 300,
            "prefill_us_per_row_layer": 90,
            "free_kv_tokens": 16384,
            "roles": ("server",),
            "rtts": ((b"12345678", 1500),),
        }
        return CoverageRecord(**(fields | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def make_record(
    identity: Callable[[int], Identity], make_coverage: Callable[..., CoverageRecord], topics: Topics
) -> Callable[..., SignedRecord]:
    """A signed record of peer number n, some fields replaced."""

    def make(number: int = 1, span: str = "0:10", *, life_s: float = 600, **changes: object) -> SignedRecord:
        said = make_coverage(number, span)
        fields: dict[str, object] = {
            "kind": RecordKind.COVERAGE,
            "scope": topics.scope,
            "subject": said.model_id,
            "layers": (said.span.start, said.span.stop),
            "seq": 1,
            "expires_ms": int((NOW + life_s) * 1000),
            "body": said.body(),
        }
        return SignedRecord.sign(identity(number), **(fields | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture
def make_core(identity: Callable[[int], Identity], topics: Topics) -> Callable[[int], Core]:
    """The node of peer number n, at 127.0.0.1:4000+n."""

    def make(number: int) -> Core:
        sender = Sender(True, (Address("127.0.0.1", 4000 + number),))
        return Core(identity(number), topics, secret=bytes(32), sender=sender)

    return make
