"""The signed words on life and death: whom a peer chose to watch it, what those say of its silence, and its farewell.

A peer that is accused of silence was accused by watchers that it chose and signed itself, so whoever reads an
accusation can check it alone, and a stranger's word weighs nothing, however many keys he makes. The rule this file
keeps: every word names the appointment it is about by its number, so that one newer appointment by the living peer
takes the weight from all older accusations (SWIM's incarnation number: Das, Gupta, Motivala, DSN 2002).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
_SILENCE = "silence"


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
class Accusation:
    """The watchers named in `statements` (by their place in `appointment`) say that the peer is silent."""

    appointment: Appointment
    statements: Mapping[int, bytes] = field(repr=False)

    @property
    def peer(self) -> PeerId:
        return self.appointment.peer

    @property
    def number(self) -> int:
        return self.appointment.number

    @classmethod
    def state(cls, identity: Identity, appointment: Appointment) -> Accusation:
        """This peer's own statement. Raises ValueError when it was not chosen to watch."""
        place = appointment.watchers.index(identity.peer_id)
        return cls(appointment, {place: identity.sign(_SILENCE, appointment.wire)})

    def merged(self, other: Accusation) -> Accusation:
        """Both together; they are about the same appointment."""
        return Accusation(self.appointment, {**other.statements, **self.statements})

    def witnesses(self) -> tuple[PeerId, ...]:
        return tuple(self.appointment.watchers[place] for place in sorted(self.statements))

    def encode(self) -> bytes:
        """As many statements travel as are needed for it to count at once."""
        said = [[place, self.statements[place]] for place in sorted(self.statements)[:FULL_COUNT]]
        return wire.pack([self.appointment.wire, said])

    @classmethod
    def decode(cls, data: bytes) -> Accusation:
        """Reads and checks all but the signatures. Raises WireError."""
        what = "an accusation"
        fields = wire.array(wire.unpack_array(data, MAX_ACCUSATION_BYTES, what), what, at_least=2)
        appointment = Appointment.decode(wire.binary(fields[0], "appointment", at_most=MAX_APPOINTMENT_BYTES))
        statements = {}
        for item in wire.array(fields[1], "statements", at_least=1, at_most=MAX_WATCHERS):
            pair = wire.array(item, "statement", at_least=2, at_most=2)
            place = wire.integer(pair[0], "watcher", high=len(appointment.watchers) - 1)
            statements[place] = wire.binary(pair[1], "statement", size=SIGNATURE_BYTES)
        return cls(appointment, statements)

    def verify(self) -> bool:
        """True when the appointment and every statement are signed by whom they should be."""
        if not self.appointment.verify():
            return False
        watchers = self.appointment.watchers
        return all(
            watchers[place].verify(_SILENCE, self.appointment.wire, signature)
            for place, signature in self.statements.items()
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
