"""Private swarms on disk: made, entered, opened, and never taken for a public one, whatever is lost or damaged."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from meshswarm.config import Address, Home
from meshswarm.errors import ConfigError
from meshswarm.identity import Identity
from meshswarm.membership import folder as folder_module
from meshswarm.membership.invite import Invite
from meshswarm.membership.standing import OVERLAP_S
from meshswarm.membership.swarms import Swarms
from meshswarm.net.swarm import Swarm

KEY, SECOND, OTHER = b"k" * 32, b"2" * 32, b"o" * 32
PEER = Identity.from_seed(b"p" * 32).peer_id
NOW = 10**12
WEEK = int(OVERLAP_S * 1000)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").create()


@pytest.fixture
def swarms(home: Home) -> Swarms:
    return Swarms(home)


def invite_of(swarms: Swarms, name: str = "office") -> Invite:
    standing = swarms.folder(name).load()
    return Invite(name, standing.keys[0], standing.lineage, standing.owner, standing.number)


def test_what_is_made_is_opened_with_its_key(home: Home, swarms: Swarms) -> None:
    folder = swarms.create("office", KEY)
    opened = swarms.open("office", now_ms=NOW)
    assert opened.swarm.is_private and opened.standing == folder.load()
    assert opened.known_peers.parent == folder.root != home.known_peers.parent
    assert swarms.names() == ["office"] and swarms.only(None).name == "office"
    owner = folder.owner()
    assert owner is not None and owner.peer_id == folder.load().owner


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX modes")
def test_nothing_secret_can_be_read_by_others(home: Home, swarms: Swarms) -> None:
    folder = swarms.create("office", KEY)
    folder.save_invited(((PEER, (Address("10.0.0.1", 1),)),))
    for path in (folder.key, folder.owner_key, home.private_swarms):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for path in (folder.root, home.swarms):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    folder.key.chmod(0o640)
    with pytest.raises(ConfigError, match="read or written by others"):
        swarms.open("office", now_ms=NOW)


def test_a_public_name_needs_no_key_and_private_asks_for_one(home: Home, swarms: Swarms) -> None:
    opened = swarms.open(None, now_ms=NOW)
    assert opened.swarm.name == "public" and not opened.swarm.is_private and opened.folder is None
    assert swarms.open("friends", now_ms=NOW).known_peers == home.known_peers
    for name in ("friends", None):
        with pytest.raises(ConfigError, match=r"--private.*swarm new NAME"):
            swarms.open(name, private=True, now_ms=NOW)


def test_a_folder_with_a_private_swarm_never_guesses(swarms: Swarms) -> None:
    swarms.create("office", KEY)
    with pytest.raises(ConfigError, match=r"--swarm office.*--swarm public"):
        swarms.open(None, now_ms=NOW)
    assert swarms.open(None, private=True, now_ms=NOW).swarm.is_private
    assert not swarms.open("public", now_ms=NOW).swarm.is_private
    swarms.create("home", OTHER)
    with pytest.raises(ConfigError, match="say which swarm"):
        swarms.open(None, private=True, now_ms=NOW)
    with pytest.raises(ConfigError, match="say which private swarm"):
        swarms.only(None)


@pytest.mark.parametrize("name", ["Office", "OFFICE", " office"])
def test_a_name_that_looks_like_a_private_one_is_no_public_swarm(swarms: Swarms, name: str) -> None:
    swarms.create("office", KEY)
    with pytest.raises(ConfigError, match="write it exactly so"):
        swarms.open(name, now_ms=NOW)


@pytest.mark.parametrize("name", ["public", "Office", "../up", "a/b", "", "x" * 41, "-x", "nul", "a b", "ü"])
def test_names_that_a_private_swarm_cannot_have(home: Home, swarms: Swarms, name: str) -> None:
    with pytest.raises(ConfigError):
        swarms.create(name, KEY)
    assert not home.swarms.exists()


def test_a_name_is_given_once(swarms: Swarms) -> None:
    swarms.create("office", KEY)
    with pytest.raises(ConfigError, match="already"):
        swarms.create("office", OTHER)
    assert swarms.folder("office").load().keys == (KEY,)


# -- what is lost


def lose_key(home: Home) -> None:
    (home.swarms / "office" / "swarm.key").unlink()


def lose_folder(home: Home) -> None:
    folder = home.swarms / "office"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def lose_key_and_note(home: Home) -> None:
    lose_key(home)
    home.private_swarms.unlink()


@pytest.mark.parametrize("lose", [lose_key, lose_folder, lose_key_and_note])
def test_without_the_key_it_does_not_start_and_never_as_a_public_swarm(
    home: Home, swarms: Swarms, lose: Callable[[Home], None]
) -> None:
    swarms.create("office", KEY)
    invite = invite_of(swarms)
    lose(home)
    for private in (False, True):
        with pytest.raises(ConfigError, match=r"private and its key file .* is gone"):
            swarms.open("office", private=private, now_ms=NOW)
    with pytest.raises(ConfigError):
        swarms.open(None, now_ms=NOW)
    swarms.join(invite)
    assert swarms.open("office", now_ms=NOW).swarm.swarm_id == Swarm("any", KEY).swarm_id


def test_a_lost_note_is_made_again(home: Home, swarms: Swarms) -> None:
    swarms.create("office", KEY)
    home.private_swarms.unlink()
    assert swarms.open("office", now_ms=NOW).swarm.is_private
    lose_folder(home)
    assert swarms.names() == ["office"]


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b'{"version": 2, "swarms": {}}', b"\xff\xfe", b'{"version":1}']
)
def test_a_damaged_note_stops_everything_rather_than_guess(home: Home, swarms: Swarms, content: bytes) -> None:
    swarms.create("office", KEY)
    home.private_swarms.write_bytes(content)
    for name in ("office", "public", None):
        with pytest.raises(ConfigError, match="which says what swarms are private"):
            swarms.open(name, now_ms=NOW)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 1}', b"\x00" * 100, b"[" * 100_000])
def test_a_damaged_key_file_says_so(home: Home, swarms: Swarms, content: bytes) -> None:
    folder = swarms.create("office", KEY)
    folder.key.write_bytes(content)
    with pytest.raises(ConfigError, match="damaged"):
        swarms.open("office", now_ms=NOW)


def test_one_changed_digit_of_the_key_is_noticed(swarms: Swarms) -> None:
    folder = swarms.create("office", KEY)
    saved = json.loads(folder.key.read_text())
    saved["keys"][0]["key"] = "0" + saved["keys"][0]["key"][1:]
    folder.key.write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match="damaged"):
        folder.load()
    saved["version"] = 2
    folder.key.write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match="newer meshswarm"):
        folder.load()


def test_the_key_of_another_swarm_in_its_place_is_noticed(home: Home, swarms: Swarms) -> None:
    office, other = swarms.create("office", KEY), swarms.create("other", OTHER)
    office.key.write_bytes(other.key.read_bytes())
    with pytest.raises(ConfigError, match="of another swarm"):
        swarms.open("office", now_ms=NOW)


def test_a_list_that_the_owner_did_not_sign_is_refused(swarms: Swarms) -> None:
    folder = swarms.create("office", KEY)
    forged = folder.load().expelling(Identity.generate(), [PEER], NOW)
    assert forged.members is not None
    folder.list.write_bytes(forged.members.wire)
    with pytest.raises(ConfigError, match="not one that the swarm's owner signed"):
        folder.load()


# -- joining


def test_an_invite_makes_the_same_swarm_elsewhere(swarms: Swarms, tmp_path: Path) -> None:
    swarms.create("office", KEY)
    peers = ((PEER, (Address("10.0.0.1", 4810),)),)
    invite = Invite("office", KEY, KEY, invite_of(swarms).owner, peers=peers)
    elsewhere = Swarms(Home(tmp_path / "elsewhere").create())
    folder = elsewhere.join(invite)
    opened = elsewhere.open("office", now_ms=NOW)
    assert opened.swarm.swarm_id == swarms.open("office", now_ms=NOW).swarm.swarm_id
    assert opened.invited == peers and folder.owner() is None
    elsewhere.join(invite)
    elsewhere.join(invite, "work")
    assert elsewhere.names() == ["office", "work"]


def test_an_invite_to_another_swarm_of_that_name_changes_nothing(swarms: Swarms) -> None:
    swarms.create("office", KEY)
    other = Invite("office", OTHER, OTHER, PEER)
    with pytest.raises(ConfigError, match="--as NAME"):
        swarms.join(other)
    assert swarms.folder("office").load().keys == (KEY,)
    assert swarms.join(other, "theirs").load().keys == (OTHER,)
    with pytest.raises(ConfigError, match="another private swarm is called"):
        swarms.join(Invite("office", KEY, KEY, PEER))  # the key is right, the owner is not


def test_a_new_invite_brings_back_who_was_away_for_too_long(swarms: Swarms, tmp_path: Path) -> None:
    owner = swarms.create("office", KEY)
    away = Swarms(Home(tmp_path / "away").create())
    folder = away.join(invite_of(swarms))
    signer = owner.owner()
    assert signer is not None
    owner.update(lambda standing: standing.rotated(signer, SECOND, NOW))
    assert away.join(invite_of(swarms)).load().current_keys(NOW + WEEK) == (SECOND, KEY)
    assert folder.load().floor == 1
    assert owner.load().current_keys(NOW + WEEK) == (SECOND,)


def test_leaving_forgets_key_and_name(home: Home, swarms: Swarms) -> None:
    swarms.create("office", KEY)
    swarms.create("home", OTHER)
    swarms.leave("office")
    assert swarms.names() == ["home"] and not (home.swarms / "office").exists()
    assert not swarms.open("office", now_ms=NOW).swarm.is_private
    with pytest.raises(ConfigError, match="no private swarm"):
        swarms.leave("office")


# -- two processes


def test_changes_of_two_follow_one_another(swarms: Swarms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "_LOCK_WAIT_S", 0.2)
    folder = swarms.create("office", KEY)
    signer = folder.owner()
    assert signer is not None
    with folder.locked(), pytest.raises(ConfigError, match="does not let go"):
        folder.update(lambda standing: standing)
    before = folder.stamp()
    folder.update(lambda standing: standing)
    assert folder.stamp() == before, "what changes nothing writes nothing"
    folder.update(lambda standing: standing.expelling(signer, [PEER], NOW))
    assert folder.stamp() != before
    members = folder.load().members
    assert members is not None and members.expelled == (PEER,)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_a_clear_error(home: Home, swarms: Swarms) -> None:
    home.root.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot be made"):
        swarms.create("office", KEY)
    home.root.chmod(0o700)
