"""What peers say of themselves at this moment, laid over what their records said some minutes ago.

The rule this file keeps: a report counts only where it speaks of the model and the span that its peer's record speaks
of. It is a claim as the record is; what the head measured outranks both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from meshswarm.dht.records import CoverageRecord
from meshswarm.identity import PeerId
from meshswarm.routing.gossip.report import LoadReport


def with_loads(records: Iterable[CoverageRecord], loads: Mapping[PeerId, LoadReport]) -> list[CoverageRecord]:
    """The records, as true as the newest report of each peer makes them."""
    return [_with_load(record, loads.get(record.peer)) for record in records]


def queues(records: Iterable[CoverageRecord], loads: Mapping[PeerId, LoadReport]) -> dict[PeerId, float]:
    """How long a step waits at each peer that says so, in seconds."""
    found = {}
    for record in records:
        load = loads.get(record.peer)
        if load is not None and _is_of(record, load) and load.queue_s > 0:
            found[record.peer] = load.queue_s
    return found


def dated(records: Iterable[CoverageRecord], loads: Mapping[PeerId, LoadReport]) -> dict[PeerId, int]:
    """When each peer whose report counts for more than its record said it: Unix ms, by its own clock."""
    found = {}
    for record in records:
        load = loads.get(record.peer)
        if load is not None and _is_of(record, load):
            found[record.peer] = load.at_ms
    return found


def _is_of(record: CoverageRecord, load: LoadReport) -> bool:
    return load.model_id == record.model_id and load.span == record.span


def _with_load(record: CoverageRecord, load: LoadReport | None) -> CoverageRecord:
    if load is None or not _is_of(record, load):
        return record
    us = load.us_per_layer or record.us_per_layer
    if (us, load.free_kv_tokens) == (record.us_per_layer, record.free_kv_tokens):
        return record
    # Turns of several rows are told by the record alone: they slow down by as much as a lone row does.
    rows_4, rows_16 = (
        min(round(several * us / record.us_per_layer), 10**9)
        for several in (record.us_per_layer_4, record.us_per_layer_16)
    )
    return replace(
        record, free_kv_tokens=load.free_kv_tokens, us_per_layer=us, us_per_layer_4=rows_4, us_per_layer_16=rows_16
    )
