"""What a client asks a head for, and the events that answer it: the seam between `api` and `head`.

The rule this file keeps: nothing here knows HTTP, and nothing here knows peers' sockets. `api` turns bodies into a
`GenerationRequest` and events into bodies; whatever implements `Generator` does the work. One answer is the events
`Queued` while the request stands in line, `Started`, any number of `TextDelta`, and `Finished`, in this order; an
exception instead of the next event ends the answer. Closing the events early (`aclose`, or cancelling the task that
iterates them) stops the work on every span.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol

from meshswarm.head.sampling_params import SamplingParams
from meshswarm.span import Span
from meshswarm.stage.engine.profile import Profile


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. `role` is "system", "user" or "assistant"; `content` is plain text."""

    role: str
    content: str
    name: str | None = None


class Speculation(Enum):
    """Whether tokens are guessed ahead and verified by the route: never, or as far as it pays."""

    OFF = "off"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Exactly one of `messages` (a chat) and `prompt` (raw text or token ids, no template) is set.

    `model` is a name or a model id as text, None for whichever model this head prefers. `max_tokens` None means until
    the model ends or its context is full. `stop` strings end the answer and are not part of it. `speculation` None
    means what this head does by default.
    """

    model: str | None
    messages: tuple[Message, ...] | None
    prompt: str | tuple[int, ...] | None
    sampling: SamplingParams
    max_tokens: int | None
    stop: tuple[str, ...]
    profile: Profile = Profile.FAST
    ignore_eos: bool = False
    speculation: Speculation | None = None


@dataclass(frozen=True, slots=True)
class RouteSummary:
    """Who computes an answer: per hop, in order, the PeerId as text and the layers `"a:b"` it computes. `wire`: the
    dtype of the rows between them, None where one peer computes it all."""

    hops: tuple[tuple[str, str], ...]
    numclass: str
    wire: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. `cached_tokens` of the prompt were taken from a session's memory instead of being computed. Of the
    tokens guessed ahead, those `accepted` are part of the answer, those `rejected` are not."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Rows computed and the wall time they took, in milliseconds, as the head saw it: `prompt` until the first token
    was there, `predicted` from then on. `draft_n` tokens were guessed ahead and `draft_n_accepted` of them came true;
    `flights` times something went through the route and came back."""

    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    draft_n: int = 0
    draft_n_accepted: int = 0
    flights: int = 0


@dataclass(frozen=True, slots=True)
class Queued:
    """No route has room yet: the request waits at this place in a peer's line, 1 is next. May come again and again."""

    place: int
    estimate_s: float


@dataclass(frozen=True, slots=True)
class Started:
    """The route stands and the prompt fits: from here on text can come. `created` is Unix time in seconds."""

    request_id: str
    model: str
    created: int
    prompt_tokens: int
    route: RouteSummary


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer: whole characters only, stop strings never included. `text` may be empty while held back."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer's end. "stop": the model ended it or a stop string did; "length": max_tokens or the context did."""

    reason: Literal["stop", "length"]
    usage: Usage
    timings: Timings
    system_fingerprint: str


Event = Queued | Started | TextDelta | Finished


@dataclass(frozen=True, slots=True)
class ModelListing:
    """A model this head knows of. `id` is what a client names in `model`; `covered` are the layers that reachable peers
    serve, merged and in order; `ready` means that they make a whole route now; `created` is Unix time in seconds."""

    id: str
    model_id: str
    created: int
    n_ctx: int
    n_layers: int
    covered: tuple[Span, ...]
    holders: int
    ready: bool


class Events(Protocol):
    """An answer's events; any async generator is one."""

    def __aiter__(self) -> AsyncIterator[Event]: ...
    def __anext__(self) -> Awaitable[Event]: ...
    async def aclose(self) -> None: ...


class Generator(Protocol):
    """Runs requests.

    Instead of an event, `generate` raises RequestError (the request cannot be served as it stands), UnknownModelError,
    NoRouteError, RefusedError (try again later) or another RemoteError (a peer failed).
    """

    def generate(self, request: GenerationRequest) -> Events: ...

    async def models(self, *, ask: bool = True) -> list[ModelListing]:
        """The models there are. Without `ask`: as far as is known here already, so that asking for it often costs
        nobody anything."""
        ...
