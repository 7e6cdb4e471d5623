"""One request end to end: model, tokens, route, session, answer.

The rule this file keeps: whatever happens to a request (an error, a client that goes away, a peer that dies), its
session ends on every span. Only after a complete answer is it kept there, for the next turn, until somebody needs the
room.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from meshswarm.artifacts.manifests.card import ModelCard
from meshswarm.artifacts.merkle import model_id_text
from meshswarm.dht.records import CoverageRecord
from meshswarm.errors import ConfigError, MeshswarmError, RemoteError, RemoteProtocolError, RequestError
from meshswarm.head.answer import Answer, Limits
from meshswarm.head.draft_model import DraftModel, DraftSession
from meshswarm.head.drafting import SuffixDrafter
from meshswarm.head.lookahead import Lookahead
from meshswarm.head.models import ModelDirectory, Voice
from meshswarm.head.request import (
    Event,
    Finished,
    GenerationRequest,
    ModelListing,
    Queued,
    RouteSummary,
    Speculation,
    Started,
    TextDelta,
)
from meshswarm.head.route_session import RouteSession
from meshswarm.head.routes import SESSION_DEADLINE_S, Needs, Routes
from meshswarm.head.sampler import Sampler, SamplingParams
from meshswarm.head.session import State
from meshswarm.head.session_actions import InLine
from meshswarm.head.speculation import LearnedRoutes, WindowChooser
from meshswarm.head.text_stream import TextStream
from meshswarm.head.warm import Found, Likeness, WarmSessions
from meshswarm.head.wire_wish import WireWish
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.families.family import Rollback
from meshswarm.stage.proving.wire_proofs import F32_WIRE
from meshswarm.stage.sessions.messages import Dtype, Opened
from meshswarm.tasks import Tasks

MAX_WAIT_S = 60.0  # in line for room; then the client is told to come back
KEEP_KNOWN_S = 600.0  # records live for 15 minutes at least from when they are asked for
MAX_CLOSE_S = 5.0  # for the receipts of kept sessions, when the peer stops


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request whose model, tokens and limits are settled. `drafter` None: nothing is guessed ahead."""

    card: ModelCard
    voice: Voice
    prompt: list[int]
    sampler: Sampler
    drafter: SuffixDrafter | None
    records: list[CoverageRecord]
    ignore_eos: bool

    def ends(self, token: int) -> bool:
        """Whether the answer ends with `token`."""
        return not self.ignore_eos and self.voice.vocabulary.is_end_of_generation(token)


Warn = Callable[[MeshswarmError], None]
"""Takes what a person should know although nothing failed."""


def _ignore(error: MeshswarmError) -> None:
    pass


class Head:
    """Runs requests over the swarm. `tasks` waits for the receipts of sessions whose answers are complete;
    `speculation` is for requests that do not say; `wire` is in which dtype rows are to go between spans, if not F32."""

    def __init__(
        self,
        routes: Routes,
        directory: ModelDirectory,
        tasks: Tasks,
        *,
        speculation: Speculation = Speculation.AUTO,
        max_wait_s: float = MAX_WAIT_S,
        wire: WireWish | None = None,
    ) -> None:
        self.directory = directory
        self._wire = wire
        self._speculation = speculation
        self._learned = LearnedRoutes()
        self._routes = routes
        self._tasks = tasks
        self._max_wait_s = max_wait_s
        self._draft_model: DraftModel | None = None
        self._warn: Warn = _ignore
        self._unfit: set[bytes] = set()  # models whose vocabulary the draft model does not have
        self._warm: WarmSessions[RouteSession] = WarmSessions()
        self._expiry: asyncio.TimerHandle | None = None

    def guess_with(self, model: DraftModel, warn: Warn) -> None:
        """Let `model` guess in answers of models that have its vocabulary; of the others `warn` hears once each."""
        self._draft_model, self._warn = model, warn

    @property
    def n_warm(self) -> int:
        """Sessions kept for a next turn."""
        return len(self._warm)

    async def models(self, *, ask: bool = True) -> list[ModelListing]:
        return await self.directory.listings(partial(self._routes.living, ask=ask), ask=ask, told=self._routes.told)

    async def keep_known(self) -> None:
        """Until cancelled: sees to it that what `models` says without asking does not run out although nobody asks. One
        model that can be run is enough, and one that is told to be whole needs no look, so that a peer at rest sends
        next to nothing."""
        while True:
            await asyncio.sleep(KEEP_KNOWN_S)
            ready = [each.model_id for each in await self.models(ask=False) if each.ready]
            with contextlib.suppress(MeshswarmError):
                await self.directory.refresh(ready, self._routes.told)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """The events of one answer. Closing the iterator cancels the work on every span."""
        prepared = await self._prepare(request)
        self._routes.asked(prepared.card.model_id)
        needs = await self._needs(prepared, request)
        warm = await self._warm_session(prepared, needs)
        if warm is not None:
            is_heard = False
            try:
                async with contextlib.aclosing(self._answer(prepared, request, warm)) as events:
                    async for event in events:
                        if not is_heard:
                            is_heard = True
                            yield _started(prepared, warm.session)
                        yield event
                return
            except RemoteError:
                if is_heard:
                    raise
            prepared = await self._prepare(request)  # what was kept is gone, unheard: afresh, the dice too
        async with contextlib.aclosing(self._open(needs, prepared)) as opening:
            async for step in opening:
                if isinstance(step, Queued):
                    yield step
                else:
                    fresh = _Turn(step, 0)
        try:
            yield _started(prepared, fresh.session)
            async with contextlib.aclosing(self._answer(prepared, request, fresh)) as events:
                async for event in events:
                    yield event
        finally:
            _cancel_if_open(fresh.session)

    async def close(self) -> None:
        """End the sessions that are kept, with their receipts."""
        if self._expiry is not None:
            self._expiry.cancel()
        sessions = self._warm.drop_all()
        for session in sessions:
            session.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MAX_CLOSE_S):
                for session in sessions:
                    await session.ended()

    # -- one turn

    async def _open(self, needs: Needs, prepared: _Prepared) -> AsyncGenerator[Queued | RouteSession, None]:
        """Where the request stands in line, and at last its session."""
        told: asyncio.Queue[Queued | RouteSession | None] = asyncio.Queue()

        def in_line(where: InLine) -> None:
            while not told.empty():  # only where it stands now is worth telling
                told.get_nowait()
            told.put_nowait(Queued(where.place, where.estimate_s))

        opening = asyncio.ensure_future(self._routes.open(needs, prepared.records, in_line))
        opening.add_done_callback(lambda _: told.put_nowait(None))
        is_taken = False
        try:
            while (event := await told.get()) is not None:
                yield event
            session = await opening
            is_taken = True
            if self._wire is not None:
                self._wire.met(prepared.card, needs.wire, len(session.core.hops) - 1)
            yield session
        finally:
            if not opening.done():
                opening.cancel()
                await asyncio.wait({opening})
            if not is_taken and not opening.cancelled() and opening.exception() is None:
                opening.result().cancel()

    async def _answer(
        self, prepared: _Prepared, request: GenerationRequest, turn: _Turn
    ) -> AsyncGenerator[TextDelta | Finished, None]:
        """The answer on an open session, which is kept after it, or ended."""
        session = turn.session
        lookahead: Lookahead | None = None
        try:
            lookahead = self._lookahead(prepared, session)
            answer = Answer(
                prompt=prepared.prompt,
                route=session,
                vocabulary=prepared.voice.vocabulary,
                sampler=prepared.sampler,
                text=TextStream(request.stop),
                limits=Limits(request.max_tokens, session.core.terms.n_ctx, request.ignore_eos, bool(request.stop)),
                fingerprint=_fingerprint(prepared.card, _summary(session)),
                lookahead=lookahead,
                n_cached=turn.n_cached,
            )
            session.listen(answer)
            answer.start()
            async with contextlib.aclosing(answer.events()) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        self._keep(session)
                        self._tasks.create_task(self.directory.answered(request.model, prepared.card.model_id))
                    yield event
        except RemoteError as error:
            known = _with_culprit(error, session)
            self._routes.note(known)
            raise known from None
        finally:
            if lookahead is not None:
                lookahead.close()
            _cancel_if_open(session)

    # -- sessions that last

    async def _warm_session(self, prepared: _Prepared, needs: Needs) -> _Turn | None:
        """A session that holds the beginning of the prompt: a kept one, or a copy of it."""
        most = max((record.n_ctx for record in prepared.records), default=0)
        wanted = min(needs.n_prompt + (needs.max_tokens or 1), most)
        found = self._warm.take(_likenesses(needs), prepared.prompt, wanted)
        if found is None:
            return None
        session = found.session
        if found.wants_copy:
            copy = await self._copy(found, needs)
            if copy is not None:
                return _Turn(copy, found.n_positions)
            if not (found.may_be_cut and self._warm.remove(session)):
                return None
        session.resume(needs.temperature, needs.top_k, SESSION_DEADLINE_S * 1000)
        return _Turn(session, found.n_positions)

    async def _copy(self, found: Found[RouteSession], needs: Needs) -> RouteSession | None:
        """A copy where there is room for one; the session itself is kept on."""
        try:
            return await self._routes.copy(found.session, found.n_positions, needs)
        except RemoteError:
            return None
        finally:
            self._put(found.session)

    def _keep(self, session: RouteSession) -> None:
        """An answer is complete."""
        if session.core.state is State.READY:
            session.park()
            self._put(session)

    def _put(self, session: RouteSession) -> None:
        terms, loop = session.core.terms, asyncio.get_running_loop()
        likeness = Likeness(terms.model_id, terms.profile, terms.dtype)
        self._close_all(self._warm.keep(session, likeness, terms.n_ctx, loop.time()))
        self._arm_expiry()

    def _close_all(self, sessions: Sequence[RouteSession]) -> None:
        for session in sessions:
            session.close()
            self._tasks.create_task(session.ended())

    def _arm_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        due = self._warm.next_expiry
        self._expiry = None if due is None else asyncio.get_running_loop().call_at(due, self._expire)

    def _expire(self) -> None:
        self._close_all(self._warm.expire(asyncio.get_running_loop().time()))
        self._arm_expiry()

    def _lookahead(self, prepared: _Prepared, session: RouteSession) -> Lookahead | None:
        if prepared.drafter is None:
            return None
        undoing_costs = session.rollback is Rollback.STATE
        learned = self._learned.on((session.core.terms.model_id, session.core.terms.profile, session.core.hops))
        chooser = WindowChooser(learned, undoing_costs=undoing_costs)
        model = self._model_drafts(prepared)
        return Lookahead(prepared.drafter, chooser, prepared.ends, model, time.perf_counter)

    def _model_drafts(self, prepared: _Prepared) -> DraftSession | None:
        if self._draft_model is None or prepared.card.model_id in self._unfit:
            return None
        try:
            self._draft_model.check_vocabulary(prepared.voice.token_list, prepared.card.name)
        except ConfigError as error:
            self._unfit.add(prepared.card.model_id)
            self._warn(error)
            return None
        return self._draft_model.begin(prepared.prompt)

    # -- before the route

    async def _needs(self, prepared: _Prepared, request: GenerationRequest) -> Needs:
        has_choice = self._wire is not None and request.profile is not Profile.EXACT
        return Needs(
            card=prepared.card,
            n_prompt=len(prepared.prompt),
            max_tokens=request.max_tokens,
            profile=request.profile,
            temperature=0.0 if request.sampling.greedy else request.sampling.temperature,
            top_k=prepared.sampler.k_needed,
            wire=await self._wire.of(prepared.card) if self._wire is not None and has_choice else F32_WIRE,
            max_wait_s=self._max_wait_s,
        )

    async def _prepare(self, request: GenerationRequest) -> _Prepared:
        card = await self.directory.resolve(request.model)
        records = await self._routes.coverage(card)
        voice = await self.directory.voice(card, records)
        if voice.card.n_layers != card.n_layers:  # the swarm's card told another story than the model itself
            records = await self._routes.coverage(voice.card)
        if request.profile is Profile.EXACT and voice.exact_obstacle is not None:
            raise RequestError(voice.exact_obstacle, param="profile")
        card = replace(voice.card, name=card.name)
        prompt = await asyncio.to_thread(_tokenise, request, voice)
        if not prompt:
            raise RequestError("the prompt is empty", param="messages" if request.messages else "prompt")
        limit = max((record.n_ctx for record in records), default=card.n_ctx)
        if len(prompt) >= limit:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, but {card.name} is served here with a context of {limit}",
                param="messages" if request.messages else "prompt",
                code="context_length_exceeded",
            )
        sampler = Sampler(_without_suppressed(request.sampling, voice), voice.vocabulary.n_vocab, prompt)
        speculation = request.speculation or self._speculation
        drafter = None if speculation is Speculation.OFF else await asyncio.to_thread(SuffixDrafter, prompt)
        return _Prepared(card, voice, prompt, sampler, drafter, records, request.ignore_eos)


@dataclass(frozen=True, slots=True)
class _Turn:
    """An open session, and how many positions of the prompt it holds already."""

    session: RouteSession
    n_cached: int


def _with_culprit(error: RemoteError, session: RouteSession) -> RemoteError:
    """The sampler knows only that the last span's rows are wrong; the route knows who that is."""
    if error.peer is not None or not isinstance(error, RemoteProtocolError):
        return error
    last = session.core.hops[-1]
    return RemoteProtocolError(f"peer {last.peer.short} (layers {last.span}): {error}", peer=str(last.peer))


def _tokenise(request: GenerationRequest, voice: Voice) -> list[int]:
    if request.messages is not None:
        return voice.template.tokens(request.messages, voice.vocabulary)
    if isinstance(request.prompt, str):
        return voice.vocabulary.encode_prompt(request.prompt)
    tokens = list(request.prompt or ())
    voice.vocabulary.check(tokens)
    return tokens


def _likenesses(needs: Needs) -> set[Likeness]:
    """Of sessions that will do: on a route with more hops than were proved, the wish for narrow rows became F32."""
    return {Likeness(needs.card.model_id, needs.profile, dtype) for dtype in (needs.wire.dtype, Dtype.F32)}


def _cancel_if_open(session: RouteSession) -> None:
    if session.core.state in (State.OPENING, State.READY):
        session.cancel()


def _summary(session: RouteSession) -> RouteSummary:
    hops = tuple((str(hop.peer), str(hop.span)) for hop in session.core.hops)
    wire = None if len(hops) == 1 else str(session.core.terms.dtype)
    return RouteSummary(hops, _numclass(session.opened), wire)


def _started(prepared: _Prepared, session: RouteSession) -> Started:
    return Started(
        request_id=secrets.token_hex(12),
        model=prepared.card.name,
        created=int(time.time()),
        prompt_tokens=len(prepared.prompt),
        route=_summary(session),
    )


def _without_suppressed(sampling: SamplingParams, voice: Voice) -> SamplingParams:
    """Tokens that the model's makers never want to see are forbidden, whatever the client asks for."""
    suppressed = voice.vocabulary.suppressed
    if not suppressed:
        return sampling
    return replace(sampling, logit_bias=(*sampling.logit_bias, *((token, -math.inf) for token in suppressed)))


def _numclass(opened: Sequence[Opened]) -> str:
    """The numclass of the route: one name when all spans agree, all of them in order otherwise."""
    names = list(dict.fromkeys(each.numclass for each in opened))
    return "+".join(names)


def _fingerprint(card: ModelCard, route: RouteSummary) -> str:
    """Changes when the weights, the cuts, what the layers are computed with or the wire dtype change: then answers may
    differ."""
    cuts = ",".join(span for _, span in route.hops)
    is_exact = route.wire in (None, str(Dtype.F32))  # a split in f32 computes what one peer does
    wire = "" if is_exact else f" {route.wire}"
    text = f"{model_id_text(card.model_id)} {route.numclass} {cuts}{wire}"
    return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:16]
