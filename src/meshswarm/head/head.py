"""One request end to end: model, tokens, route, session, answer.

The rule this file keeps: whatever happens to a request (an error, a client that goes away, a peer that dies), its
session ends on every span.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

from meshswarm.artifacts.card import ModelCard
from meshswarm.artifacts.merkle import model_id_text
from meshswarm.dht.records import CoverageRecord
from meshswarm.errors import RemoteError, RemoteProtocolError, RequestError
from meshswarm.head.answer import Answer, Limits
from meshswarm.head.drafting import SuffixDrafter
from meshswarm.head.lookahead import Lookahead
from meshswarm.head.models import ModelDirectory, Voice
from meshswarm.head.request import Event, GenerationRequest, ModelListing, RouteSummary, Speculation, Started
from meshswarm.head.route_session import RouteSession
from meshswarm.head.routes import Needs, Routes
from meshswarm.head.sampler import Sampler, SamplingParams
from meshswarm.head.session import State
from meshswarm.head.speculation import LearnedRoutes, WindowChooser
from meshswarm.head.text_stream import TextStream
from meshswarm.stage.families.family import Rollback
from meshswarm.stage.messages import Opened
from meshswarm.stage.profile import Profile
from meshswarm.tasks import Tasks


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


class Head:
    """Runs requests over the swarm. `tasks` waits for the receipts of sessions whose answers are complete;
    `speculation` is for requests that do not say."""

    def __init__(
        self,
        routes: Routes,
        directory: ModelDirectory,
        tasks: Tasks,
        *,
        speculation: Speculation = Speculation.AUTO,
    ) -> None:
        self.directory = directory
        self._speculation = speculation
        self._learned = LearnedRoutes()
        self._routes = routes
        self._tasks = tasks

    async def models(self) -> list[ModelListing]:
        return await self.directory.listings(self._routes.coverage)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """The events of one answer. Closing the iterator cancels the work on every span."""
        prepared = await self._prepare(request)
        session, route = await self._routes.open(_needs(prepared, request), prepared.records)
        try:
            summary = RouteSummary(tuple((str(hop.peer), str(hop.span)) for hop in session.core.hops), _numclass(route))
            yield Started(
                request_id=secrets.token_hex(12),
                model=prepared.card.name,
                created=int(time.time()),
                prompt_tokens=len(prepared.prompt),
                route=summary,
            )
            answer = Answer(
                prompt=prepared.prompt,
                route=session,
                vocabulary=prepared.voice.vocabulary,
                sampler=prepared.sampler,
                text=TextStream(request.stop),
                limits=Limits(request.max_tokens, session.core.terms.n_ctx, request.ignore_eos, bool(request.stop)),
                fingerprint=_fingerprint(prepared.card, summary),
                lookahead=self._lookahead(prepared, session, route),
            )
            session.listen(answer)
            answer.start()
            async with contextlib.aclosing(answer.events()) as events:
                async for event in events:
                    yield event
            session.close()
            self._tasks.create_task(session.ended())
        except RemoteError as error:
            known = _with_culprit(error, session)
            self._routes.note(known)
            raise known from None
        finally:
            if session.core.state in (State.OPENING, State.READY):
                session.cancel()

    def _lookahead(self, prepared: _Prepared, session: RouteSession, route: Sequence[Opened]) -> Lookahead | None:
        if prepared.drafter is None:
            return None
        undoing_costs = any(opened.rollback is Rollback.STATE for opened in route)
        learned = self._learned.on((session.core.terms.model_id, session.core.terms.profile, session.core.hops))
        chooser = WindowChooser(learned, undoing_costs=undoing_costs)
        return Lookahead(prepared.drafter, chooser, prepared.ends)

    # -- before the route

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


def _needs(prepared: _Prepared, request: GenerationRequest) -> Needs:
    return Needs(
        card=prepared.card,
        n_prompt=len(prepared.prompt),
        max_tokens=request.max_tokens,
        profile=request.profile,
        temperature=0.0 if request.sampling.greedy else request.sampling.temperature,
        top_k=prepared.sampler.k_needed,
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
    """Changes when the weights, the cuts or what the layers are computed with change: then answers may differ."""
    cuts = ",".join(span for _, span in route.hops)
    text = f"{model_id_text(card.model_id)} {route.numclass} {cuts}"
    return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:16]
