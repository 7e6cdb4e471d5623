"""Invites: one word that survives mail and copying, and says what is wrong with it when it did not."""

from __future__ import annotations

import base64
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshswarm.config import Address
from meshswarm.errors import ConfigError
from meshswarm.identity import Identity, PeerId
from meshswarm.membership.invite import INVITE_VERSION, Invite, _checksum

OWNER, ALICE = (Identity.from_seed(letter * 32).peer_id for letter in (b"o", b"a"))
KEY, LINEAGE = b"k" * 32, b"l" * 32
ADDRESSES = (Address("192.0.2.7", 4810), Address("2001:db8::7", 4810), Address("home.example.net", 4811))


def invite(**changes: object) -> Invite:
    return Invite(**{"name": "office", "key": KEY, "lineage": KEY, "owner": OWNER, **changes})


@settings(deadline=None)
@given(
    key=st.binary(min_size=32, max_size=32),
    lineage=st.binary(min_size=32, max_size=32),
    number=st.integers(0, 2**40),
    ports=st.lists(st.integers(1, 65535), max_size=4),
)
def test_what_is_encoded_is_read_again(key: bytes, lineage: bytes, number: int, ports: list[int]) -> None:
    peers = tuple((PeerId(bytes([n]) * 32), (Address("10.0.0.1", port),)) for n, port in enumerate(ports))
    made = invite(key=key, lineage=lineage, number=number, peers=peers)
    assert Invite.parse(made.encode()) == made


def test_every_kind_of_address_goes_along() -> None:
    made = invite(peers=((ALICE, ADDRESSES),))
    assert Invite.parse(made.encode()).peers == ((ALICE, ADDRESSES),)


def test_it_is_one_word_that_fits_a_qr_code_and_is_pinned_for_other_releases() -> None:
    word = invite(peers=((ALICE, ADDRESSES[:2]),)).encode()
    assert re.fullmatch(r"meshswarm1x[a-z2-7]+", word)
    assert len(word) < 270  # a QR code of version 9 holds 335 of these characters, in capitals
    assert invite().encode() == (
        "meshswarm1xs2tg6ztgnfrwlrbannvww23lnnvww23lnnvww23lnnvww23lnnvww23lnnvww23lnnv4iagee"
        "deg2annrmx3nffsf73a4pe5tz7nsdnvmbdxfn2ekdkase5zvhf26aeqkfb5jpq"
    )


def test_case_spaces_and_line_breaks_do_not_matter() -> None:
    word = invite().encode()
    assert Invite.parse(f"\n  {word[:30].upper()}\r\n {word[30:90]} \t{word[90:]}\n") == invite()


@settings(deadline=None)
@given(at=st.integers(0, 10**6), other=st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"))
def test_any_changed_letter_is_noticed(at: int, other: str) -> None:
    word = invite(peers=((ALICE, ADDRESSES),)).encode()
    begin = len(f"meshswarm{INVITE_VERSION}x")
    at = begin + at % (len(word) - begin)
    changed = word[:at] + other + word[at + 1 :]
    try:
        read = Invite.parse(changed)
    except ConfigError as error:
        assert "damaged" in str(error) and word[20:] not in str(error)
    else:  # the last letter of base32 has bits that mean nothing
        assert read == Invite.parse(word) and (changed == word or at == len(word) - 1)


@pytest.mark.parametrize("cut", [1, 2, 10, 100])
def test_a_part_of_an_invite_is_damaged(cut: int) -> None:
    with pytest.raises(ConfigError, match="damaged"):
        Invite.parse(invite().encode()[:-cut])


@pytest.mark.parametrize(("version", "said"), [(2, "version 2 and this meshswarm reads version 1"), (0, "version 0")])
def test_another_version_says_so(version: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Invite.parse(invite().encode().replace("meshswarm1x", f"meshswarm{version}x"))


@pytest.mark.parametrize("text", ["", "hello", "https://example.net/x", "meshswarm", "x" * 100_000, "meshswarm1x"])
def test_something_else_is_no_invite(text: str) -> None:
    with pytest.raises(ConfigError, match="no invite"):
        Invite.parse(text)


@pytest.mark.parametrize("name", ["../../etc", "public", "a/b", "Office", "", ".", "con"])
def test_an_invite_cannot_choose_a_name_that_is_no_folder_or_no_private_swarms(name: str) -> None:
    with pytest.raises(ConfigError):
        Invite.parse(invite(name=name).encode())


@settings(deadline=None)
@given(payload=st.binary(max_size=200))
def test_nonsense_with_a_right_checksum_is_refused(payload: bytes) -> None:
    coded = base64.b32encode(payload + _checksum(payload)).decode().rstrip("=").lower()
    with pytest.raises(ConfigError):
        Invite.parse(f"meshswarm1x{coded}")


def test_the_key_is_not_shown() -> None:
    assert KEY.decode() not in repr(invite()) and KEY.hex() not in repr(invite())
