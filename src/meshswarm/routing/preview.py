"""What requests would go through, how fast, and why through nobody else: what `meshswarm plan` shows.

Every stream is planned as a request is, one after the other, each knowing of those before it: so streams part where
sharing a peer would cost more than going round it.

The rule this file keeps: every figure says what it rests on. What this peer measured, what others claim and how long
ago, and what is assumed because nobody measured it, are told apart; what nobody knows is None, never a guess.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from meshswarm.dht.records import CoverageRecord
from meshswarm.identity import PeerId
from meshswarm.routing.alone import Alone, OwnMachine, judge
from meshswarm.routing.candidates import MissingLayersError
from meshswarm.routing.cost import Basis, layer_us, way_basis
from meshswarm.routing.left_out import LeftOut, explain
from meshswarm.routing.measured import MeasuredSpeed
from meshswarm.routing.planner import Planning, Route, Situation
from meshswarm.routing.prompt_time import chunk_rows, pace, prompt_s, with_links
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.sizes.memory import Load, MemoryModel, SpanMemory

N_ALTERNATIVES = 4
MAX_STREAMS = 256


@dataclass(frozen=True, slots=True)
class Question:
    """`n_streams` sessions at the same time of `n_ctx` positions each, whose prompts have `n_prompt` tokens."""

    n_ctx: int
    n_prompt: int
    n_streams: int = 1


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What a head knows of a model's peers.

    `situation.avoid` are those that are `away`, for the reason told there. `measured`, by the clock that says `now` is
    now; `unix_ms` is the time by which records and reports (`reported_ms`) are dated. `byte_s`: seconds that a byte of
    rows takes between peers, 0 while no prompt has told; `row_bytes`: of one position between two spans. `memory` None:
    the model's header is not here. `own` None: nothing is known of this machine.
    """

    n_layers: int
    records: Sequence[CoverageRecord]
    situation: Situation
    away: Mapping[PeerId, str]
    measured: Mapping[PeerId, MeasuredSpeed]
    now: float
    unix_ms: int
    reported_ms: Mapping[PeerId, int]
    byte_s: Callable[[tuple[PeerId, ...]], float]
    row_bytes: int
    memory: MemoryModel | None = None
    own: OwnMachine | None = None


@dataclass(frozen=True, slots=True)
class Way:
    """One way between two peers, and who says how long it takes."""

    seconds: float
    basis: Basis


@dataclass(frozen=True, slots=True)
class PlannedHop:
    """One peer of a route. `us_per_layer`: of a turn that all its streams share; `speed_basis`: who says so."""

    record: CoverageRecord
    stop: int
    us_per_layer: float
    speed_basis: str
    is_claim: bool
    queue_s: float
    way_in: Way
    memory: SpanMemory | None


@dataclass(frozen=True, slots=True)
class PlannedRoute:
    """A route for `n_streams` sessions. `tpot_s` and `ttft_s` are what each of them sees, `tokens_per_s` what they get
    together. `ttft_s` None: not every peer measured how fast it is at prompts; that, others can only claim, and
    `ttft_is_claim` says that somebody does."""

    route: Route
    hops: tuple[PlannedHop, ...]
    way_back: Way
    n_streams: int
    tpot_s: float
    ttft_s: float | None
    ttft_is_claim: bool

    @property
    def tokens_per_s(self) -> float:
        return self.n_streams / self.tpot_s


@dataclass(frozen=True, slots=True)
class Preview:
    """`refusal`: why not all streams have a route, None when they have. `alternatives`: routes a request would turn to
    when a peer of the first one refuses."""

    question: Question
    routes: tuple[PlannedRoute, ...]
    alternatives: tuple[Route, ...]
    left_out: tuple[LeftOut, ...]
    alone: Alone | None
    refusal: str | None

    @property
    def tokens_per_s(self) -> float:
        return sum(route.tokens_per_s for route in self.routes)

    @property
    def is_disjoint(self) -> bool:
        """Whether no two routes share a peer."""
        peers = [hop.record.peer for route in self.routes for hop in route.hops]
        return len(set(peers)) == len(peers)


def preview(question: Question, known: Knowledge) -> Preview:
    """Plans `question`. Nothing is raised for layers nobody serves: `refusal` says it."""
    plannings, refusal = _plan_streams(question, known)
    routes = _planned_routes(question, known, plannings)
    used = {hop.record.peer for planned in routes for hop in planned.hops}
    first, last = (plannings[0], plannings[-1]) if plannings else (None, None)
    situation = replace(known.situation, n_ctx=question.n_ctx, kv_tokens=1)
    return Preview(
        question,
        routes,
        () if first is None else tuple(first.routes[1:]),
        explain(known.n_layers, known.records, situation, known.away, last, used),
        judge(known.n_layers, known.records, situation, first, known.own),
        refusal,
    )


def _plan_streams(question: Question, known: Knowledge) -> tuple[list[Planning], str | None]:
    """One stream after the other, as requests would come; and why the next one would be refused."""
    records = list(known.records)
    sessions = Counter(known.situation.sessions)
    plannings: list[Planning] = []
    for stream in range(question.n_streams):
        situation = replace(known.situation, n_ctx=question.n_ctx, kv_tokens=1, sessions=Counter(sessions))
        try:
            planning = Planning.of(known.n_layers, records, situation, 1 if stream else N_ALTERNATIVES)
        except MissingLayersError as error:
            return plannings, str(error)
        plannings.append(planning)
        taken = {hop.peer for hop in planning.routes[0].hops}
        sessions.update(taken)
        records = [_with_a_session(record) if record.peer in taken else record for record in records]
    return plannings, None


def _with_a_session(record: CoverageRecord) -> CoverageRecord:
    """A session takes the whole of a slot, however long it is."""
    return replace(record, free_kv_tokens=max(0, record.free_kv_tokens - record.n_ctx))


def _planned_routes(question: Question, known: Knowledge, plannings: Sequence[Planning]) -> tuple[PlannedRoute, ...]:
    at = Counter(known.situation.sessions)
    groups: dict[tuple[tuple[PeerId, int], ...], list[Planning]] = {}
    for planning in plannings:
        hops = planning.routes[0].hops
        at.update(hop.peer for hop in hops)
        groups.setdefault(tuple((hop.peer, hop.stop) for hop in hops), []).append(planning)
    return tuple(_planned_route(question, known, group[0], len(group), at) for group in groups.values())


def _planned_route(
    question: Question, known: Knowledge, planning: Planning, n_streams: int, sessions: Mapping[PeerId, int]
) -> PlannedRoute:
    path, route = planning.paths[0], planning.routes[0]
    costs = planning.costs
    ways = [Way(costs.half_rtt_ns[path[0]] / 1e9, costs.head_basis[path[0]])]
    for source, target in itertools.pairwise(path):
        ways.append(Way(costs.way_ns(source, target) / 1e9, way_basis(planning.records, costs, source, target)))
    records = [planning.records[position] for position in path]
    hops = tuple(
        _planned_hop(question, known, record, hop.stop, way, costs.queue_ns[position] / 1e9, sessions[record.peer])
        for record, hop, way, position in zip(records, route.hops, ways, path, strict=True)
    )
    back = Way(costs.half_rtt_ns[path[-1]] / 1e9, costs.head_basis[path[-1]])
    tpot_s = _cycle_s(route, records, sessions, n_streams, known.situation.measured_us)
    ttft_s = _ttft_s(question, known, route, records, [*ways, back])
    is_claim = any(record.peer != known.situation.head for record in records)
    return PlannedRoute(route, hops, back, n_streams, tpot_s, ttft_s, is_claim)


def _planned_hop(
    question: Question,
    known: Knowledge,
    record: CoverageRecord,
    stop: int,
    way: Way,
    queue_s: float,
    n_sessions: int,
) -> PlannedHop:
    measured = known.situation.measured_us.get(record.peer)
    basis, is_claim = _speed_basis(known, record)
    memory = None
    model = known.memory
    if model is not None and (record.span == model.whole or model.cuts.allow(record.span)):
        load = Load(question.n_ctx, max(1, n_sessions), model.load.type_k, model.load.type_v)
        memory = model.under(load).span(record.span)
    return PlannedHop(
        record, stop, layer_us(record, max(1, n_sessions), measured), basis, is_claim, queue_s, way, memory
    )


def _speed_basis(known: Knowledge, record: CoverageRecord) -> tuple[str, bool]:
    """Who says how fast a peer is, and whether that is a claim."""
    if record.peer == known.situation.head:
        return "measured here when it loaded", False
    seen = known.measured.get(record.peer)
    if seen is not None:
        times = "once" if seen.n_sightings == 1 else f"{seen.n_sightings} times"
        return f"measured here {times}, {age_words(known.now - seen.at)}", False
    said_ms = known.reported_ms.get(record.peer, record.seq)
    age = f", {age_words((known.unix_ms - said_ms) / 1e3)}" if said_ms else ""
    return f"claimed by the peer{age}", True


def age_words(seconds: float) -> str:
    """How long ago something was; a clock that is ahead says "just now"."""
    if seconds < 1:
        return "just now"
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"


def _cycle_s(
    route: Route,
    records: Sequence[CoverageRecord],
    sessions: Mapping[PeerId, int],
    n_streams: int,
    measured_us: Mapping[PeerId, float],
) -> float:
    """How long each of the streams waits for its next token. They share turns in groups that follow each other through
    the spans; as many groups as give most tokens."""
    away_s = route.network_s + route.queue_s

    def in_groups(n_groups: int) -> float:
        turns = [
            layer_us(record, -(-sessions[record.peer] // n_groups), measured_us.get(record.peer))
            * (hop.stop - hop.span.start)
            / 1e6
            for record, hop in zip(records, route.hops, strict=True)
        ]
        return max(away_s + sum(turns), n_groups * max(turns))

    return min(map(in_groups, range(1, n_streams + 1)))


def _ttft_s(
    question: Question, known: Knowledge, route: Route, records: Sequence[CoverageRecord], ways: Sequence[Way]
) -> float | None:
    """Every span opens the session, the prompt goes through in chunks, and its result comes back: with nobody else's
    prompt before it."""
    if not all(record.prefill_us_per_row_layer for record in records):
        return None
    measured = known.situation.measured_us
    paces = [
        pace(record, hop.stop - hop.span.start, measured.get(record.peer))
        for record, hop in zip(records, route.hops, strict=True)
    ]
    byte_s = known.byte_s(tuple(hop.peer for hop in route.hops))
    stages = with_links(paces, byte_s * known.row_bytes)
    size = chunk_rows(question.n_prompt, stages, Profile.FAST)
    rtt_s = partial(known.situation.rtt_s, known.situation.head)
    opening_s = max((rtt_s(record.peer) or 0.0 for record in records), default=0.0)
    return opening_s + prompt_s(question.n_prompt, size, stages) + sum(way.seconds for way in ways) + route.queue_s
