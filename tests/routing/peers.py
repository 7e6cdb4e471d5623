"""Records of made-up peers: what the tests of routing plan with."""

from __future__ import annotations

from collections.abc import Mapping

from meshswarm.config import Address
from meshswarm.dht.records import CoverageRecord
from meshswarm.identity import PeerId
from meshswarm.span import Span

HEAD = PeerId(bytes(32))


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(8) + bytes(24))


def record(
    number: int,
    span: str,
    us: int = 100,
    *,
    numclass: str = "cpu",
    rtts: Mapping[int, int] | None = None,
    loaded: bool = True,
    n_ctx: int = 4096,
    free: int = 10_000,
    us_4: int = 0,
    us_16: int = 0,
    roles: tuple[str, ...] = (),
    prefill_us: int = 10,
    read_bytes_per_s: int = 0,
    paged_bytes: int = 0,
    seq: int = 0,
) -> CoverageRecord:
    return CoverageRecord(
        peer=peer(number),
        addresses=(Address("127.0.0.1", 4000 + number),),
        model_id=bytes(32),
        span=Span.parse(span),
        loaded=loaded,
        numclass=numclass,
        n_ctx=n_ctx,
        us_per_layer=us,
        prefill_us_per_row_layer=prefill_us,
        free_kv_tokens=free,
        rtts=tuple((peer(other).key[:8], rtt_us) for other, rtt_us in (rtts or {}).items()),
        us_per_layer_4=us_4,
        us_per_layer_16=us_16,
        roles=roles,
        read_bytes_per_s=read_bytes_per_s,
        paged_bytes=paged_bytes,
        seq=seq,
    )


def near(_head: PeerId, _peer: PeerId) -> float:
    return 0.001
