"""Membership while peers run, over real connections: how a list and a key spread, and who is closed out at once."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.membership.conftest import Member, Town
from tests.net.eventually import eventually

from meshswarm.config import Home
from meshswarm.errors import PeerUnreachableError, RemoteError
from meshswarm.identity import Identity, PeerId
from meshswarm.membership.folder import SwarmFolder
from meshswarm.membership.handover import Receiver
from meshswarm.membership.news import KIND, MAX_ANSWER_BYTES, Answer, Question
from meshswarm.membership.standing import OVERLAP_S, Standing
from meshswarm.membership.swarms import Swarms
from meshswarm.net.swarm import Role

SECOND, THIRD = b"2" * 32, b"3" * 32


def signer(folder: SwarmFolder) -> Identity:
    owner = folder.owner()
    assert owner is not None
    return owner


def expel(town: Town, *expelled: Member, key: bytes | None = SECOND, keep: tuple[Member, ...] = ()) -> None:
    """What `swarm revoke` writes."""
    assert town.owner is not None
    owner = signer(town.owner.folder)
    only = [member.endpoint.peer_id for member in (town.owner, *keep)]

    def change(standing: Standing) -> Standing:
        standing = standing.expelling(owner, [member.endpoint.peer_id for member in expelled], town.now_ms())
        return standing if key is None else standing.rotated(owner, key, town.now_ms(), only=only)

    town.owner.folder.update(change)


def rotate(town: Town, key: bytes) -> None:
    assert town.owner is not None
    owner = signer(town.owner.folder)
    town.owner.folder.update(lambda standing: standing.rotated(owner, key, town.now_ms()))


async def cannot_reach(one: Member, other: Member) -> None:
    for dialler, dialled in ((one, other), (other, one)):
        with pytest.raises(PeerUnreachableError):
            await dialler.dial(dialled)
    assert not one.knows(other) and not other.knows(one)


def newest(member: Member) -> bytes:
    return member.keeper.standing.keys[0]


async def test_an_expulsion_reaches_every_member_and_closes_the_connections_of_the_expelled(town: Town) -> None:
    owner = await town.found()
    alice, bob, carol = [await town.invite(name) for name in ("alice", "bob", "carol")]
    for one, other in ((alice, owner), (bob, alice), (carol, alice), (carol, owner), (carol, bob)):
        await one.dial(other)  # bob is connected to the owner through alice alone
    await eventually(lambda: owner.knows(carol) and alice.knows(carol) and bob.knows(carol))
    expel(town, carol, keep=(alice, bob))
    await eventually(lambda: all(newest(member) == SECOND for member in (owner, alice, bob)))
    await eventually(lambda: not any(member.knows(carol) for member in (owner, alice, bob)))
    assert newest(carol) != SECOND and carol.keeper.standing.number == 0
    for member in (owner, alice, bob):
        assert member.folder.load() == member.keeper.standing, "on disk before it is used"
        await cannot_reach(carol, member)
    await eventually(lambda: any("has changed its key" in event["message"] for event in bob.said))
    assert any(f"expelled peer {carol.endpoint.peer_id.short}" in event["message"] for event in bob.said)
    await bob.dial(owner)  # those who stay go on
    await alice.dial(bob)


async def test_the_expelled_are_kept_out_under_a_new_name_and_with_every_address(town: Town) -> None:
    owner = await town.found()
    alice, mallory = await town.invite("alice"), await town.invite("mallory")
    await alice.dial(owner)
    await mallory.dial(owner)
    await eventually(lambda: owner.knows(alice) and owner.knows(mallory))
    old_invite = town.invitation()
    expel(town, mallory, keep=(alice,))
    await eventually(lambda: newest(alice) == newest(owner) == SECOND)
    renamed = await town.invite("mallory-again", old_invite)
    for member in (owner, alice):
        await cannot_reach(renamed, member)
    dave = await town.invite("dave")  # a new invite has the new key
    await dave.dial(alice)
    await eventually(lambda: dave.keeper.standing.number == 2)
    await cannot_reach(dave, renamed)


async def test_an_expulsion_outlives_a_restart_of_everybody(town: Town) -> None:
    owner = await town.found()
    alice, bob = await town.invite("alice"), await town.invite("bob")
    await alice.dial(owner)
    expel(town, bob, key=None)
    await eventually(lambda: alice.keeper.standing.number == 1)
    await asyncio.gather(owner.stop(), alice.stop())
    again = await town.start(Swarms(Home(town.root / "alice")), "office", alice.identity)
    await cannot_reach(again, bob)


async def test_a_new_key_passes_from_member_to_member_while_the_owner_is_away(town: Town) -> None:
    owner = await town.found()
    alice, bob = await town.invite("alice"), await town.invite("bob")
    await alice.dial(owner)
    rotate(town, SECOND)
    await eventually(lambda: newest(alice) == SECOND)
    await owner.stop()
    town.clock.now += OVERLAP_S - 60
    await bob.dial(alice)
    await eventually(lambda: newest(bob) == SECOND)
    assert bob.folder.load().keys[0] == SECOND
    assert alice.knows(bob), "a change of key without an expulsion interrupts nobody"


async def test_who_comes_back_after_the_overlap_needs_a_new_invite(town: Town) -> None:
    owner = await town.found()
    alice, bob = await town.invite("alice"), await town.invite("bob")
    await alice.dial(owner)
    rotate(town, SECOND)
    await eventually(lambda: newest(alice) == SECOND)
    town.clock.now += OVERLAP_S + 1
    await eventually(lambda: not alice.swarm.older_tags(Role.CLIENT, b""))
    await cannot_reach(bob, alice)
    Swarms(Home(town.root / "bob")).join(town.invitation())
    await eventually(lambda: newest(bob) == SECOND)  # the peer that runs takes it over
    await bob.dial(alice)


async def test_the_owner_hears_of_members_it_never_met(town: Town) -> None:
    owner = await town.found()
    alice, bob = await town.invite("alice"), await town.invite("bob")
    await bob.dial(alice)
    await eventually(lambda: alice.knows(bob))
    await alice.dial(owner)
    await eventually(lambda: bob.endpoint.peer_id in owner.keeper.acquaintances.all())
    heard = owner.keeper.acquaintances.get(bob.endpoint.peer_id)
    assert heard is not None and heard.met_ms == 0 and heard.heard_from == [alice.endpoint.peer_id]
    assert bob.endpoint.peer_id not in alice.keeper.acquaintances.trusted_without([bob.endpoint.peer_id])
    await eventually(owner.folder.members.exists)
    assert str(bob.endpoint.peer_id) in json.loads(owner.folder.members.read_text())["members"]
    assert owner.endpoint.peer_id in alice.keeper.acquaintances.met()


async def test_several_expulsions_in_a_row_end_where_the_owner_is(town: Town) -> None:
    owner = await town.found()
    alice, bob, carol = [await town.invite(name) for name in ("alice", "bob", "carol")]
    for member in (alice, bob, carol):
        await member.dial(owner)
    expel(town, bob, keep=(alice, carol))
    expel(town, carol, key=THIRD, keep=(alice,))
    await eventually(lambda: newest(alice) == newest(owner) == THIRD)
    await eventually(lambda: not owner.knows(bob) and not owner.knows(carol))
    for former in (bob, carol):
        await cannot_reach(former, owner)
        assert newest(former) != THIRD


async def test_a_member_cannot_put_its_own_list_or_key_among_others(town: Town) -> None:
    owner = await town.found()
    alice, mallory = await town.invite("alice"), await town.invite("mallory")
    await alice.dial(owner)
    forged = mallory.keeper.standing.expelling(mallory.identity, [owner.endpoint.peer_id], town.now_ms())
    mallory.keeper.standing = forged  # signed by a member that does not own the swarm
    await mallory.dial(alice)
    await asyncio.sleep(0.2)
    assert alice.keeper.standing.number == 0 and alice.swarm.admits(owner.endpoint.peer_id)
    assert alice.knows(owner) and not alice.task.done()


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x95" + b"\x00" * 5, b"x" * 200])
async def test_garbage_from_a_member_harms_nobody(town: Town, garbage: bytes) -> None:
    owner = await town.found()
    mallory = await town.invite("mallory")
    await mallory.dial(owner)
    connection = mallory.endpoint.connection(owner.endpoint.peer_id)
    assert connection is not None
    with pytest.raises(RemoteError):
        await connection.request(KIND, garbage, max_reply_bytes=MAX_ANSWER_BYTES)
    assert owner.knows(mallory) and not owner.task.done()


async def test_the_key_is_given_to_no_connected_peer_that_the_list_does_not_name(town: Town) -> None:
    """Even to one whose connection from before were still there."""
    owner = await town.found()
    mallory = await town.invite("mallory")
    expel(town, mallory)
    await eventually(lambda: newest(owner) == SECOND)
    receiver = Receiver(mallory.endpoint.peer_id, owner.endpoint.peer_id)
    question = Question.about(mallory.keeper.standing, receiver, wants_members=False)
    reply = Answer.unpack(await owner.keeper._answer(mallory.endpoint.peer_id, question.pack()))
    assert reply.parcel == b""
    assert SECOND not in reply.pack()


async def test_a_key_file_that_is_lost_while_a_peer_runs_is_said_and_harms_no_connection(town: Town) -> None:
    owner = await town.found()
    alice = await town.invite("alice")
    await alice.dial(owner)
    alice.folder.key.unlink()
    await eventually(lambda: any(event["event"] == "warning" for event in alice.said))
    assert alice.knows(owner) and sum(event["event"] == "warning" for event in alice.said) == 1
    assert not alice.folder.key.exists(), "a lost key is not made again behind a person's back"


async def test_swarms_on_one_machine_do_not_meet(town: Town) -> None:
    office = await town.found()
    other = Town(town.root / "other", town.clock)
    home = await other.found("office")  # another key, the same name
    town.members += other.members
    await cannot_reach(office, home)
    assert office.swarm.swarm_id != home.swarm.swarm_id


async def test_the_view_names_who_is_connected(town: Town) -> None:
    owner = await town.found()
    alice = await town.invite("alice")
    await alice.dial(owner)
    await eventually(lambda: owner.knows(alice))
    view = owner.keeper.view()
    assert view["connected"] == {str(alice.endpoint.peer_id): str(alice.endpoint.address)}
    assert view["addresses"] == [str(owner.endpoint.address)] and PeerId.parse(view["peer_id"])
