"""What somebody without the key gets who has everything else: the swarm's name, its owner's key, every address; and
what a former member gets, who had the key until the owner expelled it.

The outsider runs the real program, with whatever swarm it can make up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator

import pytest
from tests.membership.conftest import Member, Town
from tests.membership.test_keeper import expel, newest
from tests.net.eventually import eventually

from meshswarm.config import Address
from meshswarm.dht.node import Dht
from meshswarm.dht.records import CoverageRecord
from meshswarm.discovery.label import is_of_swarm, make_label
from meshswarm.errors import PeerUnreachableError
from meshswarm.identity import Identity
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import DAY_S, Swarm
from meshswarm.span import Span

MODEL = bytes(range(32))
N_LAYERS = 8
NOON = 20_000 * DAY_S + DAY_S // 2


def made_up(town: Town) -> list[Swarm]:
    """What an outsider can try: the name as a public swarm, a key of its own, and all that an invite says but keys."""
    assert town.owner is not None
    standing = town.owner.folder.load()
    guesses = [os.urandom(32), standing.owner.key, standing.swarm_id * 2]
    return [Swarm("office"), Swarm("public"), *(Swarm("office", guess) for guess in guesses)]


@contextlib.asynccontextmanager
async def endpoint_in(swarm: Swarm) -> AsyncIterator[Endpoint]:
    endpoint = await Endpoint.bind(Identity.generate(), Address("127.0.0.1", 0), swarm=swarm)
    yield endpoint
    await endpoint.close()


@contextlib.asynccontextmanager
async def dht_of(endpoint: Endpoint, identity: Identity, swarm: Swarm) -> AsyncIterator[Dht]:
    dht = Dht(endpoint, identity, swarm)
    task = asyncio.create_task(dht.run())
    yield dht
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def coverage_of(member: Member) -> CoverageRecord:
    return CoverageRecord(
        peer=member.endpoint.peer_id,
        addresses=(member.endpoint.address,),
        model_id=MODEL,
        span=Span(0, N_LAYERS),
        loaded=True,
        numclass="a numclass that nobody else may read",
        n_ctx=512,
        us_per_layer=300,
        prefill_us_per_row_layer=90,
        free_kv_tokens=100,
        roles=("server",),
        rtts=(),
    )


async def test_no_handshake_completes_in_either_direction(town: Town) -> None:
    owner = await town.found()
    alice = await town.invite("alice")
    await alice.dial(owner)
    for swarm in made_up(town):
        async with endpoint_in(swarm) as outsider:
            for member in (owner, alice):
                for attempt in (
                    outsider.dial(member.endpoint.peer_id, [member.endpoint.address]),
                    outsider.dial_unknown(member.endpoint.address),
                    member.endpoint.dial(outsider.peer_id, [outsider.address]),
                ):
                    with pytest.raises(PeerUnreachableError):
                        await attempt
            assert not outsider.connections
    assert owner.knows(alice) and len(owner.endpoint.connections) == len(alice.endpoint.connections) == 1
    assert len(owner.keeper.acquaintances) == 1


async def test_no_record_is_found_or_read(town: Town) -> None:
    owner = await town.found()
    alice = await town.invite("alice")
    record = coverage_of(owner)
    async with (
        dht_of(owner.endpoint, owner.identity, owner.swarm) as at_owner,
        dht_of(alice.endpoint, alice.identity, alice.swarm) as at_alice,
    ):
        await at_alice.join([(owner.endpoint.peer_id, (owner.endpoint.address,))])
        await at_owner.publish_coverage(record)
        found = await at_alice.coverage(MODEL, N_LAYERS, fresh=True)
        assert [each.peer for each in found] == [owner.endpoint.peer_id]
        every = [(member.endpoint.peer_id, (member.endpoint.address,)) for member in (owner, alice)]
        for swarm in made_up(town):
            async with endpoint_in(swarm) as outsider, dht_of(outsider, Identity.generate(), swarm) as at_outsider:
                assert await at_outsider.join(every) == 0
                assert await at_outsider.coverage(MODEL, N_LAYERS, fresh=True) == []
                assert await at_outsider.models(fresh=True) == [] and await at_outsider.peers() == []

        # even with the very bytes that members keep and send, and the keys they are under
        topics = at_alice._topics
        kept = {key: at_alice._core.store.sealed(key, time.time()) for key in topics.span(MODEL, 0, N_LAYERS)}
        assert all(kept.values()), "members do keep it"
        for swarm in made_up(town):
            for key, sealed in kept.items():
                assert key != swarm.dht_key(b"layers" + MODEL)
                for data in sealed:
                    assert MODEL not in data and owner.endpoint.peer_id.key not in data and b"numclass" not in data
                    assert swarm.is_private is False or swarm.unseal(key, data) is None


async def test_a_former_member_finds_and_reads_nothing_that_is_said_afterwards(town: Town) -> None:
    owner = await town.found()
    alice, mallory = await town.invite("alice"), await town.invite("mallory")
    for member in (alice, mallory):
        await member.dial(owner)
    async with (
        dht_of(owner.endpoint, owner.identity, owner.swarm) as at_owner,
        dht_of(alice.endpoint, alice.identity, alice.swarm) as at_alice,
        dht_of(mallory.endpoint, mallory.identity, mallory.swarm) as at_mallory,
    ):
        to_owner = [(owner.endpoint.peer_id, (owner.endpoint.address,))]
        assert await at_alice.join(to_owner) and await at_mallory.join(to_owner)
        expel(town, mallory, keep=(alice,))
        await eventually(lambda: newest(alice) == newest(owner) != newest(mallory))
        await eventually(lambda: not mallory.endpoint.connections)
        await at_owner.publish_coverage(coverage_of(owner))
        assert [each.peer for each in await at_alice.coverage(MODEL, N_LAYERS, fresh=True)] == [owner.endpoint.peer_id]
        assert await at_mallory.coverage(MODEL, N_LAYERS, fresh=True) == []
        for key in at_alice._topics.span(MODEL, 0, N_LAYERS):
            sealed = at_alice._core.store.sealed(key, time.time())
            assert sealed and all(mallory.swarm.unseal(key, data) is None for data in sealed)


async def test_no_announcement_is_tied_to_the_swarm(town: Town) -> None:
    owner = await town.found()
    alice, mallory = await town.invite("alice"), await town.invite("mallory")

    def announced(member: Member, now_s: float) -> str:
        return make_label(member.swarm.lan_name(now_s), os.urandom(8))

    outsiders = made_up(town)
    for now_s in (NOON, NOON + DAY_S / 2, NOON + DAY_S):
        labels = [announced(member, now_s) for member in (owner, alice)]
        hashes = set(owner.swarm.rendezvous_hashes(now_s))
        assert all(is_of_swarm(label, owner.swarm, now_s) for label in labels)
        assert labels[0].split("-")[1] != labels[1].split("-")[1]
        for swarm in outsiders:
            assert not any(is_of_swarm(label, swarm, now_s) for label in labels)
            assert not hashes & set(swarm.rendezvous_hashes(now_s))

    # a former member knew all of it until it was expelled
    assert is_of_swarm(announced(owner, NOON), mallory.swarm, NOON)
    await alice.dial(owner)
    expel(town, mallory, keep=(alice,))
    await eventually(lambda: newest(alice) == newest(owner) != newest(mallory))
    for member in (owner, alice):
        assert not is_of_swarm(announced(member, NOON), mallory.swarm, NOON)
        assert not set(member.swarm.rendezvous_hashes(NOON)) & set(mallory.swarm.rendezvous_hashes(NOON))
    assert is_of_swarm(announced(alice, NOON), owner.swarm, NOON)
