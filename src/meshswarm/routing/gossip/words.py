"""The signed words on life and death: whom a peer chose to watch it, what those say of its silence, and its farewell.

A peer that is accused of silence was accused by watchers that it chose and signed itself, so whoever reads an
accusation can check it alone, and a stranger's word weighs nothing, however many keys he makes. The rule this file
keeps: every word names the appointment it is about by its number, so that one newer appointment by the living peer
takes the weight from all older accusations (SWIM's incarnation number: Das, Gupta, Motivala, DSN 2002); and every
statement of silence holds its time, so that an old one is worth nothing to whoever missed the answer to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from meshswarm.dht import wire
from meshswarm.dht.wire import WireError
from meshswarm.identity import KEY_BYTES, Identity, PeerId
from meshswarm.routing.gossip.sealed import SIGNATURE_BYTES, seal, unseal

MAX_WATCHERS = 5
FULL_COUNT = 3
"""By so many watchers an accusation counts at once."""
MAX_APPOINTMENT_BYTES = 384
MAX_FAREWELL_BYTES = 192
MAX_ACCUSATION_BYTES = 768
_APPOINTMENT = "watchers"
_FAREWELL = "farewell"
_SILENCE = "silence-at"


@dataclass(frozen=True, slots=True)
class Appointment:
    """`peer` has chosen `watchers`, 1 to 5 others; `number` rises with each choice."""

    peer: PeerId
    scope: bytes
    number: int
    watchers: tuple[PeerId, ...]
    wire: bytes = field(repr=False)

    @classmethod
    def sign(cls, identity: Identity, scope: bytes, number: int, watchers: tuple[PeerId, ...]) -> Appointment:
        keys = [watcher.key for watcher in watchers]
        return cls.decode(seal(identity, _APPOINTMENT, scope, number, [b"".join(keys)]))

    @classmethod
    def decode(cls, data: bytes) -> Appointment:
        """Reads and checks all but the signature. Raises WireError."""
        what = "an appointment"
        sealed = unseal(data, max_bytes=MAX_APPOINTMENT_BYTES, at_least=1, what=what)
        keys = wire.binary(sealed.fields[0], "watchers", at_most=MAX_WATCHERS * KEY_BYTES)
        watchers = tuple(PeerId(keys[at : at + KEY_BYTES]) for at in range(0, len(keys) - KEY_BYTES + 1, KEY_BYTES))
        if not watchers or len(keys) % KEY_BYTES or len(set(watchers)) < len(watchers) or sealed.author in watchers:
            raise WireError(f"{what} of {sealed.author.short} that is not of 1 to {MAX_WATCHERS} different others")
        return cls(sealed.author, sealed.scope, sealed.number, watchers, data)

    def verify(self) -> bool:
        sealed = unseal(self.wire, max_bytes=MAX_APPOINTMENT_BYTES, at_least=1, what="an appointment")
        return sealed.is_signed(_APPOINTMENT)


@dataclass(frozen=True, slots=True)
class Statement:
    """One watcher found the peer silent at `at_s` (Unix time, s). `number`: the highest under which it had heard it."""

    at_s: int
    number: int
    signature: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Accusation:
    """The watchers named in `statements` (by their place in `appointment`) say that the peer is silent."""

    appointment: Appointment
    statements: Mapping[int, Statement] = field(repr=False)

    @property
    def peer(self) -> PeerId:
        return self.appointment.peer

    @property
    def number(self) -> int:
        return self.appointment.number

    @classmethod
    def state(cls, identity: Identity, appointment: Appointment, at_s: int, number: int = 0) -> Accusation:
        """This peer's own statement; its `number` is never below the appointment's. Raises ValueError when this peer
        was not chosen to watch."""
        place = appointment.watchers.index(identity.peer_id)
        number = max(number, appointment.number)
        signature = identity.sign(_SILENCE, _stated(appointment, at_s, number))
        return cls(appointment, {place: Statement(at_s, number, signature)})

    def merged(self, other: Accusation) -> Accusation:
        """Both together; they are about the same appointment."""
        return Accusation(self.appointment, {**other.statements, **self.statements})

    def only(self, counts: Callable[[Statement], bool]) -> Accusation | None:
        """With those statements alone; None when there are none."""
        kept = {place: statement for place, statement in self.statements.items() if counts(statement)}
        return Accusation(self.appointment, kept) if kept else None

    def witnesses(self) -> tuple[PeerId, ...]:
        return tuple(self.appointment.watchers[place] for place in sorted(self.statements))

    def encode(self) -> bytes:
        """As many statements travel as are needed for it to count at once, the newest first."""
        places = sorted(self.statements, key=lambda place: (-self.statements[place].at_s, place))[:FULL_COUNT]
        chosen = [(place, self.statements[place]) for place in places]
        said = [[place, each.at_s, each.number, each.signature] for place, each in chosen]
        return wire.pack([self.appointment.wire, said])

    @classmethod
    def decode(cls, data: bytes) -> Accusation:
        """Reads and checks all but the signatures. Raises WireError."""
        what = "an accusation"
        fields = wire.array(wire.unpack_array(data, MAX_ACCUSATION_BYTES, what), what, at_least=2)
        appointment = Appointment.decode(wire.binary(fields[0], "appointment", at_most=MAX_APPOINTMENT_BYTES))
        statements = {}
        for item in wire.array(fields[1], "statements", at_least=1, at_most=MAX_WATCHERS):
            parts = wire.array(item, "statement", at_least=4, at_most=4)
            place = wire.integer(parts[0], "watcher", high=len(appointment.watchers) - 1)
            statements[place] = Statement(
                at_s=wire.integer(parts[1], "time of a statement"),
                number=wire.integer(parts[2], "number of a statement"),
                signature=wire.binary(parts[3], "statement", size=SIGNATURE_BYTES),
            )
        return cls(appointment, statements)

    def verify(self) -> bool:
        """True when the appointment and every statement are signed by whom they should be."""
        if not self.appointment.verify():
            return False
        watchers = self.appointment.watchers
        return all(
            _has_stated(watchers[place], self.appointment, statement) for place, statement in self.statements.items()
        )


@dataclass(frozen=True, slots=True)
class Farewell:
    """`peer` has left. What it says later, under a higher number, takes it back."""

    peer: PeerId
    scope: bytes
    number: int
    wire: bytes = field(repr=False)

    @classmethod
    def sign(cls, identity: Identity, scope: bytes, number: int) -> Farewell:
        return cls.decode(seal(identity, _FAREWELL, scope, number, []))

    @classmethod
    def decode(cls, data: bytes) -> Farewell:
        """Reads and checks all but the signature. Raises WireError."""
        sealed = unseal(data, max_bytes=MAX_FAREWELL_BYTES, at_least=0, what="a farewell")
        return cls(sealed.author, sealed.scope, sealed.number, data)

    def verify(self) -> bool:
        sealed = unseal(self.wire, max_bytes=MAX_FAREWELL_BYTES, at_least=0, what="a farewell")
        return sealed.is_signed(_FAREWELL)


def _stated(appointment: Appointment, at_s: int, number: int) -> bytes:
    """What a watcher signs."""
    return wire.pack([at_s, number, appointment.wire])


@lru_cache(maxsize=4096)
def _has_stated(watcher: PeerId, appointment: Appointment, statement: Statement) -> bool:
    """The same statement comes by several neighbours: its signature is checked once."""
    said = _stated(appointment, statement.at_s, statement.number)
    return watcher.verify(_SILENCE, said, statement.signature)
