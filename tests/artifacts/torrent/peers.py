"""What the tests share: a file and how it is known, a peer that lies."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libtorrent as lt

from meshswarm.artifacts.torrent.certificates import TlsIdentity
from meshswarm.artifacts.torrent.content import Content, bencode
from meshswarm.artifacts.torrent.session import TorrentSession

PIECE = 256 * 1024
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Shared:
    """A file, and how it is known."""

    path: Path
    content: Content
    layer: bytes

    @property
    def data(self) -> bytes:
        return self.path.read_bytes()


def plain_settings(host: str) -> Any:
    """Of a stock libtorrent session that stays on `host`."""
    switches = ("dht", "lsd", "upnp", "natpmp", "outgoing_utp", "incoming_utp")
    return {
        "listen_interfaces": f"{host}:0",
        "allow_multiple_connections_per_ip": True,
        "close_redundant_connections": False,
        **{f"enable_{switch}": False for switch in switches},
    }


class Liar:
    """A plain libtorrent peer that shares a file, and changes it once it has been checked."""

    def __init__(
        self, shared: Shared, folder: Path, wrong: list[int], host: str = LOOPBACK, tls: TlsIdentity | None = None
    ) -> None:
        folder.mkdir(parents=True)
        path = folder / "copy"
        path.write_bytes(shared.data)
        settings = plain_settings(host)
        if tls is not None:
            settings["listen_interfaces"] += "s"
        self.session = lt.session(settings, 0)
        torrent = {"info": shared.content.info_dict(), "piece layers": {shared.content.root: shared.layer}}
        params = lt.load_torrent_buffer(bencode(torrent))
        params.save_path = str(folder)
        params.renamed_files = {0: str(path)}
        params.flags &= ~(lt.torrent_flags.auto_managed | lt.torrent_flags.paused)
        if tls is not None:
            params.root_certificate = tls.root
        self.handle = self.session.add_torrent(params)
        if tls is not None:
            self.handle.set_ssl_certificate_buffer(tls.leaf, tls.key, tls.dh_params)
        deadline = time.monotonic() + 20
        while not self.handle.status().is_seeding:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with path.open("r+b") as file:
            for at in wrong:
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 1]))
        self.host, self.port = host, int(self.session.listen_port() if tls is None else self.session.ssl_listen_port())

    @property
    def sent_bytes(self) -> int:
        return int(self.handle.status().total_payload_upload)


MakeFile = Callable[..., Shared]
StartSession = Callable[..., Awaitable[TorrentSession]]
MakeLiar = Callable[..., Liar]
