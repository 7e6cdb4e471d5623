"""One iterative lookup as a state machine: whom to ask next, and when the nearest peers have all been asked.

Kademlia's lookup (Maymounkov and Mazieres 2002, section 2.3): ask the alpha nearest known peers for what they know near
the target, go on with the nearest of those, and end when the k nearest that answer have answered. Records are united
from all answers, so one peer that hides or invents some changes nothing but its own share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kademlia.node import Node, NodeHeap

from meshswarm.dht.contact import Contact
from meshswarm.dht.keys import distance
from meshswarm.dht.table import K
from meshswarm.identity import PeerId

ALPHA = 5
STALL_S = 0.5  # a question unanswered this long no longer keeps others from being asked
MAX_QUESTIONS = 4 * K  # a swarm of liars can make a lookup fail, not make it endless


@dataclass(frozen=True, slots=True)
class Found:
    """A peer near the target that answered, with the token it gave for storing there."""

    contact: Contact
    token: bytes


class Lookup:
    """Drive it: ask everybody `next_questions` returns; report `answered` or `failed` for each; until `done`.

    `own` never appears among those to be asked. `start`: the nearest contacts the table knows.
    """

    def __init__(self, target: bytes, start: Iterable[Contact], *, own: PeerId, k: int = K, alpha: int = ALPHA) -> None:
        self.target = target
        self._own = own
        self._k = k
        self._alpha = alpha
        self._nearest = NodeHeap(Node(target), k)
        self._contacts: dict[bytes, Contact] = {}
        self._asked: dict[bytes, float] = {}
        self._failed: set[bytes] = set()
        self._found: dict[bytes, Found] = {}
        self._learn(start)

    @property
    def done(self) -> bool:
        """True when nobody is left to ask and nobody asked is still owed an answer that could matter."""
        if len(self._asked) >= MAX_QUESTIONS and not self._pending():
            return True
        return all(node.id in self._found for node in self._nearest)

    def next_questions(self, now: float) -> list[Contact]:
        """Whom to ask now, nearest first: at most alpha are waited for at a time, not counting the slow ones."""
        waiting = sum(now - self._asked[identity] < STALL_S for identity in self._pending())
        room = min(self._alpha - waiting, MAX_QUESTIONS - len(self._asked))
        chosen = [node.id for node in self._nearest if node.id not in self._asked][: max(0, room)]
        for identity in chosen:
            self._asked[identity] = now
        return [self._contacts[identity] for identity in chosen]

    def joins_question(self, contact: Contact, now: float) -> bool:
        """True when this lookup would ask `contact` anyway and does so now, along with another one."""
        identity = contact.node_id
        if identity in self._asked or len(self._asked) >= MAX_QUESTIONS:
            return False
        if all(node.id != identity for node in self._nearest):
            return False
        self._asked[identity] = now
        return True

    def answered(self, peer: Contact, token: bytes, contacts: Sequence[Contact]) -> None:
        """An asked peer answered. Of what it names only the k nearest count, so that nobody can flood a lookup."""
        self._found[peer.node_id] = Found(peer, token)
        nearest = sorted(contacts, key=lambda contact: distance(contact.node_id, self.target))
        self._learn(nearest[: self._k])

    def failed(self, peer: Contact) -> None:
        """An asked peer did not answer, or not in order."""
        self._failed.add(peer.node_id)
        self._nearest.remove([peer.node_id])

    def found(self) -> list[Found]:
        """The k nearest peers that answered, nearest first."""
        near = sorted(self._found.items(), key=lambda item: distance(item[0], self.target))
        return [found for _, found in near[: self._k]]

    def _learn(self, contacts: Iterable[Contact]) -> None:
        for contact in contacts:
            identity = contact.node_id
            if contact.peer != self._own and identity not in self._contacts and identity not in self._failed:
                self._contacts[identity] = contact
                self._nearest.push(Node(identity))

    def _pending(self) -> list[bytes]:
        return [i for i in self._asked if i not in self._found and i not in self._failed]


def next_batch(lookups: Sequence[Lookup], now: float, max_keys: int) -> list[tuple[Contact, list[Lookup]]]:
    """The next questions of many lookups, those to one peer put together: a small swarm answers all in one round trip.

    At most `max_keys` lookups share one question.
    """
    wanted: dict[PeerId, tuple[Contact, list[Lookup]]] = {}
    for lookup in lookups:
        for contact in lookup.next_questions(now):
            wanted.setdefault(contact.peer, (contact, []))[1].append(lookup)
    for contact, together in wanted.values():
        together += [lookup for lookup in lookups if lookup.joins_question(contact, now)]
    return [
        (contact, together[first : first + max_keys])
        for contact, together in wanted.values()
        for first in range(0, len(together), max_keys)
    ]
