"""Dialling and being dialled, over real sockets: who is reached, who is not, and what the error says."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys

import pytest
from tests.net.conftest import LOOPBACK, Bind
from tests.net.eventually import Collector, echo, eventually

from meshswarm.config import Address
from meshswarm.errors import MeshswarmError, PeerUnreachableError, RefusedError
from meshswarm.identity import Identity
from meshswarm.net import dial as dial_module
from meshswarm.net.admission import Limits
from meshswarm.net.connection import Connection
from meshswarm.net.endpoint import AGENT, Endpoint
from meshswarm.net.loopback import Loopback
from meshswarm.net.swarm import Swarm
from meshswarm.net.udp import ListenError


def closed_port() -> Address:
    """A loopback address where nothing listens."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return Address("127.0.0.1", probe.getsockname()[1])


@pytest.fixture
def silent_port() -> Address:
    """A loopback address where somebody listens and never answers."""
    holder = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    holder.bind(("127.0.0.1", 0))
    yield Address("127.0.0.1", holder.getsockname()[1])
    holder.close()


async def test_a_dial_proves_both_keys_and_tells_each_side_about_the_other(bind: Bind) -> None:
    alice, bob = await bind(agent="alice/1"), await bind()
    arrived: list[Connection] = []
    bob.on_connection(arrived.append)
    connection = await alice.dial(bob.peer_id, [bob.address])
    assert connection.peer_id == bob.peer_id and connection.remote_address == bob.address
    assert connection.agent == AGENT
    await eventually(lambda: arrived)
    assert arrived[0].peer_id == alice.peer_id
    assert arrived[0].agent == "alice/1"
    assert arrived[0].remote_address == alice.address  # one socket for dialling and listening
    assert alice.observed_addresses == {bob.peer_id: str(alice.address)}
    assert bob.observed_addresses == {alice.peer_id: str(bob.address)}


async def test_a_live_connection_is_used_again_from_both_ends(bind: Bind) -> None:
    alice, bob = await bind(), await bind()
    connection = await alice.dial(bob.peer_id, [bob.address])
    assert await alice.dial(bob.peer_id) is connection
    await eventually(lambda: bob.connections)
    assert await bob.dial(alice.peer_id) is bob.connection(alice.peer_id)
    assert alice.connections == [connection]


async def test_concurrent_dials_share_one_attempt(bind: Bind) -> None:
    alice, bob = await bind(), await bind()
    arrived: list[Connection] = []
    bob.on_connection(arrived.append)
    connections = await asyncio.gather(*(alice.dial(bob.peer_id, [bob.address]) for _ in range(10)))
    assert len(set(connections)) == 1
    await eventually(lambda: arrived)
    await asyncio.sleep(0.05)
    assert len(arrived) == 1


async def test_giving_up_one_dial_leaves_the_others_alone(bind: Bind) -> None:
    alice, bob = await bind(), await bind()
    first = asyncio.create_task(alice.dial(bob.peer_id, [bob.address]))
    second = asyncio.create_task(alice.dial(bob.peer_id, [bob.address]))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).peer_id == bob.peer_id


@pytest.mark.parametrize("seed", range(12))
async def test_simultaneous_dials_end_with_one_connection_and_lose_no_stream(bind: Bind, seed: int) -> None:
    rng = random.Random(seed)
    alice, bob = await bind(), await bind()
    for endpoint in (alice, bob):
        endpoint.handle_stream("echo", echo, max_frame_bytes=1000)

    async def dial_and_talk(here: Endpoint, there: Endpoint) -> None:
        await asyncio.sleep(rng.choice([0, 0, 0.001, 0.002, 0.004, 0.006]))
        connection = await here.dial(there.peer_id, [there.address])
        stream = connection.open_stream("echo", max_frame_bytes=1000)
        for number in range(20):
            stream.send(number.to_bytes(2, "big"))
            assert await stream.receive(timeout_s=5) == number.to_bytes(2, "big")
        stream.finish()

    await asyncio.gather(dial_and_talk(alice, bob), dial_and_talk(bob, alice))
    assert len(alice.connections) == len(bob.connections) == 1
    rosters = [(alice._roster, bob.peer_id), (bob._roster, alice.peer_id)]
    await eventually(lambda: all(len(roster._links[other]) == 1 for roster, other in rosters))
    link = alice.connection(bob.peer_id)
    other = bob.connection(alice.peer_id)
    assert link is not None and other is not None
    assert link.is_dialled_here != other.is_dialled_here  # the two ends of the same connection


async def test_the_loser_of_a_simultaneous_dial_carries_its_streams_to_their_end(bind: Bind) -> None:
    small, large = sorted([Identity.generate(), Identity.generate()], key=lambda identity: identity.peer_id)
    alice, bob = await bind(small), await bind(large)
    alice.handle_stream("echo", echo, max_frame_bytes=1000)
    by_bob = await bob.dial(alice.peer_id, [alice.address])
    stream = by_bob.open_stream("echo", max_frame_bytes=1000)
    collector = Collector(stream)
    await eventually(lambda: alice.connections)
    surplus = alice._roster._links.pop(bob.peer_id)  # as if Bob's dial had not arrived yet when Alice dialled
    by_alice = await alice.dial(bob.peer_id, [bob.address])
    alice._roster._links[bob.peer_id][:0] = surplus
    await eventually(lambda: bob.connection(alice.peer_id) is not by_bob)
    assert alice.connection(bob.peer_id) is by_alice
    await asyncio.sleep(1.3)
    stream.send(b"still carried")
    await eventually(lambda: collector.frames == [b"still carried"])
    stream.finish()
    assert await collector.end() is None
    await eventually(lambda: by_bob.closed)
    assert not by_alice.closed and alice.connections == [by_alice]


async def test_a_dial_to_oneself_needs_no_network(bind: Bind) -> None:
    alice = await bind()
    connection = await alice.dial(alice.peer_id)
    assert isinstance(connection, Loopback) and connection is alice.connection(alice.peer_id)
    assert connection.rtt_s == 0.0 and alice.connections == []


async def test_ghost_addresses_do_not_hold_up_the_one_that_works(bind: Bind, silent_port: Address) -> None:
    alice, bob = await bind(), await bind()
    ghosts = [silent_port, closed_port(), Address("no-such-host.invalid", 1), Address("::1", 9)]
    async with asyncio.timeout(1.5):
        connection = await alice.dial(bob.peer_id, [*ghosts, bob.address])
    assert connection.remote_address == bob.address


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say who refused")
async def test_a_port_where_nothing_listens_is_known_at_once(bind: Bind) -> None:
    alice, gone = await bind(), Identity.generate().peer_id
    refused = closed_port()
    async with asyncio.timeout(1):
        with pytest.raises(PeerUnreachableError) as caught:
            await alice.dial(gone, [refused])
    assert str(caught.value) == (
        f"peer {gone.short} cannot be reached: no address works ({refused}: nothing listens there (ECONNREFUSED))"
    )
    assert caught.value.peer == str(gone)
    bob = await bind()
    assert (await alice.dial(bob.peer_id, [bob.address])).peer_id == bob.peer_id  # the socket lives on


async def test_a_silent_address_costs_two_seconds_at_most(
    bind: Bind, silent_port: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dial_module.SILENCE_S == 2.0
    monkeypatch.setattr(dial_module, "SILENCE_S", 0.1)
    alice, gone = await bind(), Identity.generate().peer_id
    with pytest.raises(
        PeerUnreachableError, match=rf"{gone.short} .*no address works \({silent_port}: no answer in 0.1 s\)"
    ):
        await alice.dial(gone, [silent_port])


async def test_an_impatient_caller_learns_how_far_the_dial_came(bind: Bind, silent_port: Address) -> None:
    alice, gone = await bind(), Identity.generate().peer_id
    with pytest.raises(
        PeerUnreachableError, match=rf"did not answer within 0.05 s \({silent_port}: still connecting\)"
    ):
        await alice.dial(gone, [silent_port], timeout_s=0.05)


async def test_no_address_is_an_error_that_says_so(bind: Bind) -> None:
    alice, unknown = await bind(), Identity.generate().peer_id
    with pytest.raises(PeerUnreachableError, match=f"peer {unknown.short} cannot be reached: no address is known"):
        await alice.dial(unknown)


async def test_an_address_that_worked_is_remembered(bind: Bind) -> None:
    alice, bob = await bind(), await bind()
    first = await alice.dial(bob.peer_id, [bob.address])
    first.close()
    second = await alice.dial(bob.peer_id)
    assert second is not first and second.remote_address == bob.address


async def test_somebody_else_at_the_address_is_named(bind: Bind) -> None:
    alice, bob, wanted = await bind(), await bind(), Identity.generate().peer_id
    with pytest.raises(
        PeerUnreachableError, match=rf"{wanted.short} .*somebody else: peer {bob.peer_id.short} answers"
    ):
        await alice.dial(wanted, [bob.address])
    await asyncio.sleep(0.05)
    assert bob.connections == []


@pytest.mark.parametrize("other", [Swarm("another"), Swarm("test", b"k" * 32)])
async def test_another_swarm_is_kept_out(bind: Bind, other: Swarm) -> None:
    alice, bob = await bind(swarm=other), await bind()
    with pytest.raises(PeerUnreachableError, match="did not accept our HELLO; it may belong to another swarm"):
        await alice.dial(bob.peer_id, [bob.address])
    assert alice.connections == bob.connections == []


async def test_members_of_a_private_swarm_find_each_other(bind: Bind) -> None:
    alice, bob = [await bind(swarm=Swarm("office", b"k" * 32)) for _ in range(2)]
    assert (await alice.dial(bob.peer_id, [bob.address])).peer_id == bob.peer_id


async def test_closing_tells_the_other_side_at_once(bind: Bind) -> None:
    alice, bob = await bind(), await bind()
    connection = await alice.dial(bob.peer_id, [bob.address])
    lost: list[MeshswarmError] = []
    connection.on_lost(lost.append)
    await bob.close()
    async with asyncio.timeout(1):
        await eventually(lambda: lost)
    assert str(lost[0]) == f"peer {bob.peer_id.short} at {bob.address} is shutting down"
    assert connection.closed and alice.connection(bob.peer_id) is None and alice.connections == []


@pytest.mark.parametrize("how", ["connection", "endpoint"])
async def test_what_was_sent_just_before_closing_still_arrives(bind: Bind, how: str) -> None:
    alice, bob = await bind(), await bind()
    served: list[Collector] = []
    bob.handle_stream("note", lambda stream: served.append(Collector(stream)), max_frame_bytes=10_000)
    connection = await alice.dial(bob.peer_id, [bob.address])
    stream = connection.open_stream("note", max_frame_bytes=10)
    for number in range(3):
        stream.send(bytes([number]) * 1000)
    if how == "connection":
        connection.close()
    else:
        await alice.close()
    await eventually(lambda: served and served[0].ends)
    assert [len(frame) for frame in served[0].frames] == [1000] * 3


async def test_a_peer_that_started_again_replaces_its_old_connections_at_once(bind: Bind) -> None:
    """Killed without a word and back under the same key: what depended on the old connection hears of it."""
    alice, key = await bind(), Identity.generate()
    before = await bind(key)
    await before.dial(alice.peer_id, [alice.address])
    await eventually(lambda: alice.connections)
    old = alice.connections[0]
    lost: list[MeshswarmError] = []
    old.on_lost(lost.append)
    before._udp._loop.remove_reader(before._udp._reader)  # it hears nothing any more
    again = await bind(key)
    await again.dial(alice.peer_id, [alice.address])
    await eventually(lambda: lost)
    assert "has started again" in str(lost[0])
    assert alice.connections == [alice.connection(key.peer_id)] and alice.connections[0] is not old


async def test_taking_back_a_wish_to_hear_of_the_end(bind: Bind) -> None:
    alice, bob = await bind(), await bind()
    connection = await alice.dial(bob.peer_id, [bob.address])
    heard: list[str] = []
    forget = connection.on_lost(lambda _error: heard.append("forgotten"))
    connection.on_lost(lambda _error: heard.append("kept"))
    forget()
    connection.close("because")
    connection.on_lost(lambda error: heard.append(str(error)))
    await eventually(lambda: len(heard) == 2)
    assert heard == [
        "kept",
        f"the connection to peer {bob.peer_id.short} at {bob.address} was closed here: because",
    ]


async def test_many_newcomers_at_once_must_show_their_address_first(bind: Bind) -> None:
    bob = await bind(limits=Limits(retry_above_half_open=0))
    alice = await bind()
    assert (await alice.dial(bob.peer_id, [bob.address])).peer_id == bob.peer_id


async def test_a_full_house_is_silent(bind: Bind) -> None:
    bob = await bind(limits=Limits(max_connections=1))
    alice, carol = await bind(), await bind()
    await alice.dial(bob.peer_id, [bob.address])
    with pytest.raises(PeerUnreachableError):
        await carol.dial(bob.peer_id, [bob.address], timeout_s=0.2)
    for connection in alice.connections:
        connection.close()
    assert (await carol.dial(bob.peer_id, [bob.address])).peer_id == bob.peer_id


async def test_a_taken_port_is_a_clear_error(bind: Bind) -> None:
    alice = await bind()
    with pytest.raises(ListenError, match=f"cannot listen on {alice.address}: .*choose another port"):
        await bind(listen=alice.address)


@pytest.mark.parametrize("listen", ["192.0.2.1:0", "no-such-host.invalid:0"])
async def test_an_address_of_somebody_else_is_a_clear_error(bind: Bind, listen: str) -> None:
    with pytest.raises(ListenError, match=f"cannot listen on {listen}"):
        await bind(listen=Address.parse(listen))


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_a_wildcard_names_addresses_that_can_be_dialled(bind: Bind, host: str) -> None:
    alice, bob = await bind(), await bind(listen=Address(host, 0))
    assert all(not address.is_unspecified and address.port == bob.address.port for address in bob.addresses)
    connection = await alice.dial(bob.peer_id, [Address("127.0.0.1", bob.address.port), *bob.addresses])
    assert connection.peer_id == bob.peer_id


async def test_both_families_on_one_socket(bind: Bind) -> None:
    alice, bob, carol = await bind(listen=Address("::", 0)), await bind(), await bind(listen=Address("::1", 0))
    assert (await alice.dial(bob.peer_id, [bob.address])).remote_address == bob.address
    assert (await alice.dial(carol.peer_id, [carol.address])).remote_address == carol.address
    await eventually(lambda: bob.connections)
    assert bob.connections[0].remote_address.host == "127.0.0.1"
    with pytest.raises(PeerUnreachableError, match="does not speak its address family"):
        await bob.dial(carol.peer_id, [carol.address])


async def test_host_names_are_resolved(bind: Bind) -> None:
    alice, bob = await bind(), await bind()
    named = Address("localhost", bob.address.port)
    assert (await alice.dial(bob.peer_id, [named])).peer_id == bob.peer_id


async def test_closing_ends_dials_requests_and_everything_else(bind: Bind, silent_port: Address) -> None:
    alice, bob = await bind(), await bind()
    started = asyncio.Event()
    cancelled = asyncio.Event()

    async def never(_peer: object, _payload: bytes) -> bytes:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return b""

    bob.handle_request("never", never, max_request_bytes=10, max_reply_bytes=10)
    connection = await alice.dial(bob.peer_id, [bob.address])
    asking = asyncio.create_task(connection.request("never", b"", timeout_s=30))
    dialling = asyncio.create_task(bob.dial(Identity.generate().peer_id, [silent_port]))
    await started.wait()
    await bob.close()
    await bob.close()
    assert cancelled.is_set()
    for task in (asking, dialling):
        with pytest.raises((PeerUnreachableError, RefusedError), match="shutting down"):
            await task
    with pytest.raises(PeerUnreachableError, match="shutting down"):
        await bob.dial(alice.peer_id, [alice.address])
    rebound = await bind(listen=bob.address)
    assert rebound.address == bob.address


async def test_every_loop_timer_and_task_is_gone_after_close(swarm: Swarm) -> None:
    before = asyncio.all_tasks()
    alice = await Endpoint.bind(Identity.generate(), LOOPBACK, swarm=swarm)
    bob = await Endpoint.bind(Identity.generate(), LOOPBACK, swarm=swarm)
    await alice.dial(bob.peer_id, [bob.address])
    await alice.close()
    await bob.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    scheduled = [handle for handle in asyncio.get_running_loop()._scheduled if not handle.cancelled()]
    assert [handle for handle in scheduled if "meshswarm" in repr(handle)] == []


@pytest.mark.skipif(sys.platform == "win32", reason="there is no uvloop")
def test_the_same_under_uvloop() -> None:
    """In a process of its own: dial, talk, be refused, close."""
    script = """
import asyncio, sys, uvloop
from meshswarm.config import Address
from meshswarm.errors import PeerUnreachableError
from meshswarm.identity import Identity
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm

async def main():
    swarm = Swarm("uvloop-test")
    alice, bob = [await Endpoint.bind(Identity.generate(), Address("127.0.0.1", 0), swarm=swarm) for _ in range(2)]
    bob.handle_stream("echo", lambda stream: stream.receive_with(stream.send, lambda _e: None), max_frame_bytes=10**6)
    gone = await Endpoint.bind(Identity.generate(), Address("127.0.0.1", 0), swarm=swarm)
    await gone.close()
    for _ in range(3):
        try:
            await alice.dial(gone.peer_id, [gone.address])
        except PeerUnreachableError as error:
            assert "nothing listens" in str(error) or sys.platform != "linux", error
        else:
            raise SystemExit("reached a peer that is gone")
    stream = (await alice.dial(bob.peer_id, [bob.address])).open_stream("echo", max_frame_bytes=10**6)
    for size in (1, 10**3, 10**6):
        stream.send(bytes(size))
        assert len(await stream.receive(timeout_s=10)) == size
    await alice.close()
    await bob.close()

uvloop.run(main())
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


async def test_an_address_without_a_key_leads_to_whoever_proves_one_there(bind: Bind, silent_port: Address) -> None:
    alice, bob = await bind(), await bind()
    connections = await asyncio.gather(*(alice.dial_unknown(bob.address) for _ in range(3)))
    assert {connection.peer_id for connection in connections} == {bob.peer_id} and len(set(connections)) == 1
    assert await alice.dial(bob.peer_id) is connections[0]
    await eventually(lambda: bob.connections)
    assert bob.connections[0].peer_id == alice.peer_id
    with pytest.raises(PeerUnreachableError, match=r"no answer in 2 s"):
        await alice.dial_unknown(silent_port)
    assert alice.connections == [connections[0]]


async def test_whoever_is_there_must_be_of_this_swarm_and_somebody_else(bind: Bind) -> None:
    alice, stranger = await bind(), await bind(swarm=Swarm("another"))
    with pytest.raises(PeerUnreachableError, match="no peer can be reached there"):
        await alice.dial_unknown(stranger.address)
    with pytest.raises(PeerUnreachableError, match="is this very peer"):
        await alice.dial_unknown(alice.address)
    assert alice.connections == stranger.connections == []
    await alice.close()
    with pytest.raises(PeerUnreachableError, match="shutting down"):
        await alice.dial_unknown(stranger.address)
