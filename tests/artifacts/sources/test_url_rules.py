"""Which URLs are followed, and to where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.artifacts.sources.faults import SourceError
from meshswarm.artifacts.sources.url_rules import (
    MAX_REDIRECTS,
    Hop,
    UrlRules,
    check_addresses,
    file_name,
    first_hop,
    next_hop,
    shown,
    with_file_name,
)

PERSON = UrlRules()
STRANGER = UrlRules(is_strangers=True)
LAN = UrlRules(is_strangers=True, allow_local=True)


def test_a_url_is_taken_apart() -> None:
    hop = first_hop("https://Example.org/a%20b.gguf?x=1#part", PERSON)
    assert hop == Hop("https://Example.org/a%20b.gguf?x=1", "https", "example.org", 443)
    assert first_hop("http://[::1]:8080/a", PERSON).origin == ("http", "::1", 8080)
    assert first_hop("https://münchen.example/a", PERSON).host == "xn--mnchen-3ya.example"


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.org/a",
        "file:///etc/passwd",
        "https:///a",
        "https://example.org:99999/a",
        "https://example.org:0/a",
        "https://exa mple.org/a",
        "https://example.org/a\nHost: b",
        "https://example.org\\@evil.example/a",
        "https://[::1/a",
        "https://2130706433/a",
        "https://127.1/a",
        "https://0x7f.1/a",
        "https://example.org/" + "a" * 9000,
        "//example.org/a",
        "",
    ],
)
def test_what_is_no_plain_url_is_refused(url: str) -> None:
    with pytest.raises(SourceError):
        first_hop(url, PERSON)


def test_unencrypted_only_on_loopback_or_when_told() -> None:
    for url in ("http://127.0.0.1/a", "http://localhost:8000/a", "http://[::1]/a"):
        first_hop(url, PERSON)
    for url in ("http://example.org/a", "http://192.168.1.2/a", "http://localhost.example.org/a"):
        with pytest.raises(SourceError, match="is not encrypted: use https://"):
            first_hop(url, PERSON)
        first_hop(url, UrlRules(allow_http=True))


def test_encrypted_stays_encrypted_even_on_loopback() -> None:
    hop = first_hop("https://example.org/a", UrlRules(allow_http=True))
    for target in ("http://example.org/a", "http://127.0.0.1/a"):
        with pytest.raises(SourceError, match="is not encrypted: it is not followed"):
            next_hop(hop, target, UrlRules(allow_http=True), was_public=True)
    assert next_hop(first_hop("http://localhost/a", PERSON), "https://b.example/", PERSON, was_public=False).port == 443


def test_redirects_are_few_and_may_be_relative() -> None:
    hop = first_hop("https://example.org/a/b?x=1", PERSON)
    assert next_hop(hop, "../c", PERSON, was_public=True).url == "https://example.org/c"
    assert next_hop(hop, "//b.example/c#d", PERSON, was_public=True).url == "https://b.example/c"
    for _ in range(MAX_REDIRECTS):
        hop = next_hop(hop, "x", PERSON, was_public=True)
    with pytest.raises(SourceError, match="was reached over 5 redirects"):
        next_hop(hop, "x", PERSON, was_public=True)
    with pytest.raises(SourceError, match="must be https://HOST"):
        next_hop(first_hop("https://a.example/", PERSON), "file:///etc/passwd", PERSON, was_public=True)


def test_secrets_stay_with_the_origin_they_were_for() -> None:
    hop = first_hop("https://hub.example/a", PERSON)
    same = next_hop(hop, "/b", PERSON, was_public=True)
    assert same.is_first_origin
    for elsewhere in ("https://cdn.example/b", "https://hub.example:8443/b", "https://hub.example.evil.example/b"):
        away = next_hop(same, elsewhere, PERSON, was_public=True)
        assert not away.is_first_origin
        back = next_hop(away, "https://hub.example/c", PERSON, was_public=True)
        assert not back.is_first_origin, "who sent us back chose the path"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "192.168.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1%eth0",
        "fec0::1",  # site-local, as old networks still have them
        "64:ff9b:1::7f00:1",  # a translator's own prefix (RFC 8215)
        "::127.0.0.1",
        "::ffff:0:10.0.0.1",
        "192.0.0.8",
        "fd00::1",
        "::ffff:10.0.0.1",
        "2002:0a00:0001::1",
        "64:ff9b::7f00:1",
        "ff02::1",
    ],
)
def test_a_stranger_leads_nowhere_but_to_the_internet(address: str) -> None:
    hop = first_hop("https://example.org/a", STRANGER)
    with pytest.raises(SourceError, match="must be public"):
        check_addresses(hop, ["93.184.215.14", address])
    assert check_addresses(first_hop("https://example.org/a", PERSON), [address]) is False
    inwards = first_hop("https://nas.example/a", LAN)
    assert check_addresses(inwards, [address]) is False
    assert next_hop(inwards, "/b", LAN, was_public=False).may_be_local
    with pytest.raises(SourceError, match="must be public"):
        check_addresses(next_hop(inwards, "/b", LAN, was_public=True), [address])


def test_public_addresses_are_public() -> None:
    hop = first_hop("https://example.org/a", STRANGER)
    assert check_addresses(hop, ["93.184.215.14", "2606:2800:21f::1", "64:ff9b::5db8:d70e"]) is True
    with pytest.raises(SourceError, match="carries a password"):
        first_hop("https://me:secret@example.org/a", STRANGER)


@given(st.text(max_size=60), st.text(max_size=20))
def test_any_text_is_a_hop_or_an_error(text: str, more: str) -> None:
    hop = first_hop("https://example.org/a", STRANGER)
    for rules in (PERSON, STRANGER):
        for url in (text, f"https://{text}/{more}", f"https://a.example/{text}?{more}"):
            for make in (lambda u, r: first_hop(u, r), lambda u, r: next_hop(hop, u, r, was_public=True)):
                try:
                    found = make(url, rules)
                except SourceError as error:
                    assert str(error).isprintable()
                else:
                    assert found.scheme in ("http", "https") and found.host


def test_messages_show_no_secret() -> None:
    assert shown("https://me:secret@example.org:8443/a.gguf?token=secret#x") == "https://example.org:8443/a.gguf"
    assert shown("https://[::1]/a\x1b[31m") == "https://[::1]/a?[31m"
    assert "secret" not in shown("https://me:secret@exa[mple/a")


def test_file_names_within_urls() -> None:
    url = "https://example.org/a/b%20c-00001-of-00002.gguf?x=1"
    assert file_name(url) == "b c-00001-of-00002.gguf"
    assert with_file_name(url, "b c-00002-of-00002.gguf") == "https://example.org/a/b%20c-00002-of-00002.gguf?x=1"
    assert file_name("https://example.org") == ""
