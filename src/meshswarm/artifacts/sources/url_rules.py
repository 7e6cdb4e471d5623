"""Which URLs a model may be fetched from, and where a server may send us on to.

The rule this file keeps: a person may aim his own peer anywhere, a stranger nowhere but at the public internet. What
began encrypted stays so, and what proves who we are goes to the server that it was meant for and to no other.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from meshswarm.artifacts.sources.faults import SourceError

MAX_URL_CHARS = 8192
"""The hub's signed addresses have some 1,500."""
MAX_REDIRECTS = 5
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class UrlRules:
    """How far a URL is trusted.

    `is_strangers`: it came from a manifest that somebody else wrote, so it may lead to public addresses only.
    `allow_local`: such a URL may itself name an address of a local network, for swarms that live in one; a public host
    may still not lead there. `allow_http`: unencrypted beyond loopback.
    """

    is_strangers: bool = False
    allow_local: bool = False
    allow_http: bool = False


@dataclass(frozen=True, slots=True)
class Hop:
    """One place that is asked: its URL without fragment, and what is decided about it."""

    url: str
    scheme: str
    host: str
    port: int
    n_redirects: int = 0
    is_first_origin: bool = True
    """False once any redirect led to another scheme, host or port: no secret is sent from there on."""
    may_be_local: bool = True
    """False where the address asked must be on the public internet."""

    @property
    def origin(self) -> tuple[str, str, int]:
        return self.scheme, self.host, self.port


def first_hop(url: str, rules: UrlRules) -> Hop:
    """Where to begin. Raises SourceError for a URL that is malformed or against the rules."""
    hop = replace(_parsed(url), may_be_local=not rules.is_strangers or rules.allow_local)
    if rules.is_strangers and urlsplit(hop.url).username is not None:
        raise SourceError(f"{shown(url)} carries a password: such a source is not used")
    _check(hop, rules)
    return hop


def next_hop(hop: Hop, location: str, rules: UrlRules, *, was_public: bool) -> Hop:
    """Where the server at `hop`, which was asked at a public address or not, sends us on to. Raises SourceError when we
    do not follow."""
    if hop.n_redirects >= MAX_REDIRECTS:
        raise SourceError(
            f"{shown(hop.url)} was reached over {MAX_REDIRECTS} redirects and sends on: it is not followed"
        )
    try:
        target = _parsed(urljoin(hop.url, location))
    except ValueError:
        raise SourceError(f"{shown(hop.url)} sends on to what is no URL") from None
    if hop.scheme == "https" and target.scheme == "http":
        raise SourceError(
            f"{shown(hop.url)} sends on to {shown(target.url)}, which is not encrypted: it is not followed"
        )
    target = replace(
        target,
        n_redirects=hop.n_redirects + 1,
        is_first_origin=hop.is_first_origin and target.origin == hop.origin,
        may_be_local=hop.may_be_local and not (rules.is_strangers and was_public),
    )
    _check(target, rules)
    return target


def check_addresses(hop: Hop, addresses: Iterable[str]) -> bool:
    """Whether the host of `hop`, which resolved to `addresses`, is a public one. Raises SourceError when it may not be
    asked: one local address among them is enough, as a public name that points inwards is aimed at somebody."""
    local = [text for text in addresses if not is_public(ipaddress.ip_address(text.partition("%")[0]))]
    if local and not hop.may_be_local:
        raise SourceError(
            f"{shown(hop.url)} is at the local address {local[0]}: what others name as a source must be public"
        )
    return not local


def shown(url: str) -> str:
    """The URL as it may stand in a message: without password and query, which often are somebody's key."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port is not None else ""
    except ValueError:
        return "the address"
    host = f"[{host}]" if ":" in host else host
    return "".join(c if c.isprintable() else "?" for c in f"{parts.scheme}://{host}{port}{parts.path}")[:200]


def file_name(url: str) -> str:
    """The last part of the URL's path, decoded; not yet safe as the name of a file. May be empty."""
    return unquote(urlsplit(url).path.rpartition("/")[2], errors="replace")


def with_file_name(url: str, name: str) -> str:
    """The same URL with another last part."""
    parts = urlsplit(url)
    return parts._replace(path=parts.path.rpartition("/")[0] + "/" + quote(name)).geturl()


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """True for one host's address on the public internet, also where IPv4 hides in IPv6."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is not None:
            return is_public(inner)
        if address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
        if address not in _GLOBAL_UNICAST:
            return False
    return address.is_global and not address.is_multicast and address not in _SPECIAL


_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
"""All of IPv6 that is given out (RFC 4291, 2.4): outside are site-local addresses, translators' own and others in
which IPv4 addresses of an inner network hide, some of which count as global."""
_SPECIAL = ipaddress.ip_network("192.0.0.0/24")  # RFC 6890: of protocols, not of hosts


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _parsed(url: str) -> Hop:
    if len(url) > MAX_URL_CHARS:
        raise SourceError(f"{shown(url[:300])}... is a URL of {len(url)} characters, more than {MAX_URL_CHARS}")
    if re.search(r"[\x00-\x20\x7f\\]", url):
        raise SourceError(f"{shown(url)} is not a URL: it has a space, a backslash or a control character in it")
    try:
        parts: SplitResult = urlsplit(url)._replace(fragment="")
        host, port = (parts.hostname or "").rstrip("."), parts.port
        host = host.encode("idna").decode() if not host.isascii() else host
    except (ValueError, UnicodeError):
        raise SourceError(f"{url[:80]!r} is not a URL") from None
    if parts.scheme not in _PORTS or not host or port == 0:
        raise SourceError(f"{shown(url)} is not a URL that files can be fetched from: it must be https://HOST/...")
    if re.fullmatch(r"[0-9.]+|0x[0-9a-f.x]*", host) and _address(host) is None:
        raise SourceError(f"{shown(url)} names its host by an unusual form of an IP address")
    return Hop(parts.geturl(), parts.scheme, host, port or _PORTS[parts.scheme])


def _check(hop: Hop, rules: UrlRules) -> None:
    if hop.scheme == "https" or rules.allow_http:
        return
    address = _address(hop.host)
    is_loopback = hop.host == "localhost" if address is None else address.is_loopback
    if not is_loopback:
        raise SourceError(
            f"{shown(hop.url)} is not encrypted: use https://, or fetch the file yourself and give its path"
        )
