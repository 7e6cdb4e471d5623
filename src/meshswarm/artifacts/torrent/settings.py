"""libtorrent's settings here: fast over TCP, quiet, and forgiving enough that blame can be laid by ourselves.

The rule this file keeps: no packet goes anywhere this peer was not told to go. No tracker, DHT, local discovery, peer
exchange, port mapping or name is looked up.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import Any, cast

from meshswarm.artifacts.torrent.alerts import MASK
from meshswarm.errors import ConfigError

Settings = dict[str, Any]

_QUIET: Settings = {
    "enable_dht": False,
    "enable_lsd": False,
    "enable_upnp": False,
    "enable_natpmp": False,
    "dht_bootstrap_nodes": "",
    "webtorrent_stun_server": "",
    "proxy_hostnames": False,
    "user_agent": "meshswarm",
    "handshake_client_version": "meshswarm",
    "peer_fingerprint": "-MS0100-",
}
_FORGIVING: Settings = {
    # Two peers that want nothing of each other now may in a second: cut, such a link never came back.
    "close_redundant_connections": False,
    # libtorrent bans the honest along with liars. Whoever it bans must be able to come back.
    "allow_multiple_connections_per_ip": True,
    "min_reconnect_time": 1,
    "max_failcount": 100,
    "peer_turnover": 0,
}
_FAST: Settings = {
    "enable_outgoing_utp": False,  # a tenth of TCP's throughput
    "enable_incoming_utp": False,
    "out_enc_policy": 2,  # no obfuscation: RC4 costs as much as TLS, and proves nothing
    "in_enc_policy": 2,
    "send_buffer_watermark": 512 << 10,  # under TLS the whole buffer is gathered anew for each record of 16 KiB
    "send_buffer_low_watermark": 128 << 10,
    "send_buffer_watermark_factor": 150,
    "request_queue_time": 1,  # s of requests under way to one peer: what others may soon give is not asked of it
    "max_out_request_queue": 256,  # 4 MiB under way: 50 MB/s over 80 ms, and it stays in the processor's caches
    "max_allowed_in_request_queue": 4000,
    "max_queued_disk_bytes": 4 << 20,  # more only leaves the processor's caches before it is written
    "unchoke_slots_limit": 32,
    "connection_speed": 100,
    "torrent_connect_boost": 100,
    "tick_interval": 100,  # how soon a dialled peer is connected to, and a piece asked of an idle one
}
_IMPATIENT: Settings = {
    # A peer that stops sending: its blocks are asked of others after some seconds, not a minute.
    "piece_timeout": 8,
    "request_timeout": 10,
    "peer_timeout": 60,
    "peer_connect_timeout": 7,
    "handshake_timeout": 7,
}


def session_settings(listen: str, *, n_connections: int = 200) -> Settings:
    """What a session starts with. `listen`: see `listen_interface`; empty: no socket at all, outgoing links only."""
    return {
        **_QUIET,
        **_FORGIVING,
        **_FAST,
        **_IMPATIENT,
        "listen_interfaces": listen,
        "max_retry_port_bind": 0,
        "listen_system_port_fallback": False,
        # Those who dial in get two of three places, so that nobody can keep this peer from dialling.
        "connections_limit": 3 * n_connections,
        "connections_slack": -n_connections,
        "active_limit": -1,
        "aio_threads": _n_threads(),
        "hashing_threads": _n_threads(),
        "alert_mask": MASK,
        "alert_queue_size": 20_000,
    }


def _n_threads() -> int:
    """For the disk, and for hashing: more threads than cores to spare only take turns."""
    return max(1, min(4, (os.cpu_count() or 1) // 2))


def listen_interface(host: str, port: int, *, is_private: bool) -> str:
    """Where to listen, in libtorrent's form. Raises ConfigError for what is no address.

    A private swarm's session has a TLS port and no other. The unspecified IPv6 address stands for IPv4 as well.
    """
    literal = address_literal(host)
    if not 0 <= port <= 65_535:
        raise ConfigError(f"{port} is no port: ports go from 0 (any free one) to 65535")
    suffix = f":{port}{'s' if is_private else ''}"
    if literal == "::":
        return f"0.0.0.0{suffix},[::]{suffix}"
    return (f"[{literal}]" if ":" in literal else literal) + suffix


def is_unspecified(host: str) -> bool:
    """True for an address that stands for all of this machine's."""
    return ipaddress.ip_address(address_literal(host)).is_unspecified


def free_port() -> int:
    """A port that was free a moment ago, for TCP."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def address_literal(host: str) -> str:
    """`host` in the one form libtorrent gives it back. Raises ConfigError: names are looked up elsewhere."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f"{host[:80]!r} is not an IP address") from None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(address)


def rate_limits(down_bytes_s: int, up_bytes_s: int) -> Settings:
    """Bytes a second; 0 for none."""
    if down_bytes_s < 0 or up_bytes_s < 0:
        raise ConfigError("a rate is not less than 0 bytes a second")
    most = (1 << 31) - 1
    return {"download_rate_limit": min(down_bytes_s, most), "upload_rate_limit": min(up_bytes_s, most)}


def as_pack(settings: Settings) -> Any:
    """libtorrent's stubs name every key; a plain dict is what it takes."""
    return cast(Any, settings)
