"""Pieces of a private swarm: for members, over TLS, and for nobody else."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import libtorrent as lt
import pytest
from tests.artifacts.torrent.peers import LOOPBACK, PIECE, MakeLiar, Shared, StartSession, plain_settings
from tests.net.eventually import eventually

from meshswarm.artifacts.torrent import knocking
from meshswarm.artifacts.torrent.certificates import tls_identity
from meshswarm.artifacts.torrent.content import bencode
from meshswarm.errors import ArtifactError

SECRET, OTHER = b"of the swarm, 32 bytes in length", b"another swarm's, also long enough"


async def test_members_share(shared: Shared, start_session: StartSession, tmp_path: Path) -> None:
    seeder, leecher = await start_session(secret=SECRET), await start_session(secret=SECRET)
    await seeder.seed(shared.content, shared.path, shared.layer)
    torrent = await leecher.open(shared.content, tmp_path / "model.gguf", shared.layer)
    torrent.connect(LOOPBACK, seeder.port)
    await torrent.fetch(range(13))
    assert torrent.path.read_bytes() == shared.data


async def test_a_fetch_goes_on_over_tls_after_a_restart(
    shared: Shared, start_session: StartSession, tmp_path: Path
) -> None:
    """What is noted of a torrent does not hold its certificate: every start sets it anew."""
    seeder = await start_session(secret=SECRET)
    await seeder.seed(shared.content, shared.path, shared.layer)
    for pieces in (range(4), range(13)):
        leecher = await start_session(secret=SECRET, folder=tmp_path / "notes")
        torrent = await leecher.open(shared.content, tmp_path / "model.gguf", shared.layer)
        torrent.connect(LOOPBACK, seeder.port)
        await torrent.fetch(pieces)
        await leecher.close()
    outsider = await start_session()
    stolen = await outsider.open(shared.content, tmp_path / "stolen", shared.layer)
    stolen.connect(LOOPBACK, seeder.port)
    with pytest.raises(ArtifactError):
        await stolen.fetch([0], patience_s=0.8)
    assert stolen.received_bytes == 0


@pytest.mark.parametrize("secret", [None, OTHER], ids=["a plain peer", "a member of another swarm"])
async def test_outsiders_get_nothing(
    shared: Shared, start_session: StartSession, tmp_path: Path, secret: bytes | None
) -> None:
    seeder, outsider = await start_session(secret=SECRET), await start_session(secret=secret)
    served = await seeder.seed(shared.content, shared.path, shared.layer)
    torrent = await outsider.open(shared.content, tmp_path / "model.gguf", shared.layer)
    torrent.connect(LOOPBACK, seeder.port)
    with pytest.raises(ArtifactError, match=str(seeder.port)):
        await torrent.fetch(range(13), patience_s=0.8)
    assert torrent.received_bytes == 0 and served.sent_bytes == 0
    assert torrent.have() == frozenset()


async def test_members_take_nothing_from_outsiders(shared: Shared, start_session: StartSession, tmp_path: Path) -> None:
    outsider, member = await start_session(), await start_session(secret=SECRET)
    served = await outsider.seed(shared.content, shared.path, shared.layer)
    torrent = await member.open(shared.content, tmp_path / "model.gguf", shared.layer)
    torrent.connect(LOOPBACK, outsider.port)
    with pytest.raises(ArtifactError):
        await torrent.fetch(range(13), patience_s=0.8)
    assert torrent.received_bytes == 0 and served.sent_bytes == 0


async def test_a_plain_bittorrent_client_gets_nothing(
    shared: Shared, start_session: StartSession, tmp_path: Path
) -> None:
    """Stock libtorrent, with the whole torrent in its hands."""

    seeder = await start_session(secret=SECRET)
    served = await seeder.seed(shared.content, shared.path, shared.layer)
    client = await asyncio.to_thread(lt.session, plain_settings(LOOPBACK), 0)
    torrent = {"info": shared.content.info_dict(), "piece layers": {shared.content.root: shared.layer}}
    params = lt.load_torrent_buffer(bencode(torrent))
    params.save_path = str(tmp_path / "client")
    handle = client.add_torrent(params)
    handle.connect_peer((LOOPBACK, seeder.port))
    await asyncio.sleep(1.0)
    status = await asyncio.to_thread(handle.status)
    assert status.total_payload_download == 0 and served.sent_bytes == 0
    del handle, status
    holder = [client]
    del client
    await asyncio.to_thread(holder.clear)


async def test_who_shows_no_certificate_is_sent_away(shared: Shared, start_session: StartSession) -> None:

    seeder = await start_session(secret=SECRET)
    await seeder.seed(shared.content, shared.path, shared.layer)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE

    def knock() -> bytes:
        name = shared.content.info_hash.hex()[:40]
        with (
            socket.create_connection((LOOPBACK, seeder.port), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname=name) as wrapped,
        ):
            wrapped.send(b"\x13BitTorrent protocol" + bytes(48))
            return wrapped.recv(100)

    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.to_thread(knock)


async def test_a_private_session_has_no_port_outside_tls(start_session: StartSession) -> None:
    session = await start_session(secret=SECRET)
    plain, tls = await session._engine.ports()
    assert plain == 0 and tls == session.port


async def test_a_member_that_lies_is_found_out_over_tls(
    shared: Shared, start_session: StartSession, make_liar: MakeLiar, tmp_path: Path
) -> None:
    honest, leecher = await start_session(secret=SECRET), await start_session(secret=SECRET)
    await honest.seed(shared.content, shared.path, shared.layer)
    liar = make_liar(shared, [index * PIECE for index in range(13)], tls=tls_identity(SECRET))
    torrent = await leecher.open(shared.content, tmp_path / "model.gguf", shared.layer)
    torrent.connect(LOOPBACK, liar.port)
    fetching = asyncio.create_task(torrent.fetch(range(13)))
    await eventually(lambda: torrent.blamed, 20)
    torrent.connect(LOOPBACK, honest.port)
    await fetching
    assert torrent.path.read_bytes() == shared.data
    assert torrent.blamed == {(LOOPBACK, liar.port)}


async def test_who_never_shakes_hands_is_shut_and_members_are_not(
    shared: Shared, start_session: StartSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libtorrent keeps such connections for ever, and each costs a file descriptor."""
    monkeypatch.setattr(knocking, "HANDSHAKE_S", 0.5)
    seeder, leecher = await start_session(secret=SECRET), await start_session(secret=SECRET)
    await seeder.seed(shared.content, shared.path, shared.layer)
    torrent = await leecher.open(shared.content, tmp_path / "model.gguf", shared.layer)
    torrent.connect(LOOPBACK, seeder.port)
    await torrent.fetch([0])
    callers = [await asyncio.open_connection(LOOPBACK, seeder.port) for _ in range(5)]
    async with asyncio.timeout(20):
        for reader, writer in callers:
            assert await reader.read(10) == b""
            writer.close()
    member = torrent.blame.members[LOOPBACK, seeder.port]
    assert member.is_connected and member.last_word == "not reached yet", "the member's connection was shut too"
    await torrent.fetch(range(13), patience_s=5.0)
