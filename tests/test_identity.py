"""PeerIds, key files and signatures."""

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.errors import ConfigError
from meshswarm.identity import Identity, PeerId, decode_id, encode_id

keys = st.binary(min_size=32, max_size=32)


@given(keys)
def test_the_text_form_of_a_peer_id_survives_the_trip(key: bytes) -> None:
    peer = PeerId(key)
    assert PeerId.parse(str(peer)) == peer
    assert str(peer) == str(peer).lower()
    assert "=" not in str(peer)


@given(keys, st.data())
def test_one_wrong_character_is_noticed(key: bytes, data: st.DataObject) -> None:
    text = str(PeerId(key))
    index = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz234567").filter(lambda c: c != text[index]))
    # Two checksum bytes let one in 65,536 random errors through; what gets through must at least be another peer.
    try:
        assert PeerId.parse(text[:index] + other + text[index + 1 :]) != PeerId(key)
    except ValueError as error:
        assert "PeerId" in str(error)


@pytest.mark.parametrize("text", ["", "a", "ABC", "!" * 55, "a" * 54, "a" * 56, "a" * 10_000, "é" * 55])
def test_what_is_no_peer_id_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="is not a PeerId"):
        PeerId.parse(text)


def test_upper_case_is_another_text_and_refused() -> None:
    with pytest.raises(ValueError, match="PeerId"):
        PeerId.parse(str(PeerId(bytes(range(32)))).upper())


def test_a_peer_id_is_not_a_model_id() -> None:
    text = encode_id(bytes(range(32)), "meshswarm/model/1")
    with pytest.raises(ValueError, match="checksum"):
        decode_id(text, "meshswarm/peer/1", "PeerId")


@given(st.binary(max_size=50), st.binary(max_size=50))
def test_a_signature_covers_one_purpose_and_one_payload(payload: bytes, other: bytes) -> None:
    identity = Identity.from_seed(bytes(32))
    signature = identity.sign("record", payload)
    assert identity.peer_id.verify("record", payload, signature)
    assert not identity.peer_id.verify("receipt", payload, signature)
    assert other == payload or not identity.peer_id.verify("record", other, signature)
    assert not Identity.from_seed(b"\1" * 32).peer_id.verify("record", payload, signature)
    assert not identity.peer_id.verify("record", payload, signature[:-1])


def test_a_key_is_made_once_private_and_then_kept(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    first = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Identity.load_or_create(path).peer_id == first.peer_id
    assert [entry.name for entry in tmp_path.iterdir()] == ["peer.key"]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o602])
def test_a_key_file_others_can_open_is_refused_and_untouched(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "peer.key"
    Identity.load_or_create(path)
    path.chmod(mode)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="chmod 600"):
        Identity.load_or_create(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"garbage", b"-----BEGIN PRIVATE KEY-----\n\n-----END PRIVATE KEY-----\n"])
def test_a_damaged_key_file_is_refused_never_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "peer.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="damaged"):
        Identity.load_or_create(path)
    assert path.read_bytes() == content


def test_a_key_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        Identity.load_or_create(tmp_path / "missing" / "peer.key")
    assert list(tmp_path.iterdir()) == []
