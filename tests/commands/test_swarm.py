"""`meshswarm swarm ...` as a person types it, without a running peer: what is printed, and what lies on disk then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshswarm.cli import app
from meshswarm.commands import doctor
from meshswarm.commands.doctor import Verdict
from meshswarm.commands.options import parse_join
from meshswarm.commands.swarm import enter_invited
from meshswarm.commands.swarm_cli import _standing_of
from meshswarm.config import Home
from meshswarm.errors import ConfigError
from meshswarm.identity import Identity
from meshswarm.membership.acquaintances import Acquaintances
from meshswarm.membership.folder import SwarmFolder
from meshswarm.membership.invite import Invite
from meshswarm.membership.swarms import Swarms

PEERS = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(1, 5)]


class Shell:
    """Types commands for one folder."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def __call__(self, *arguments: str, stdin: str | None = None, **environment: str) -> str:
        done = CliRunner().invoke(app, ["--home", str(self.home), "swarm", *arguments], input=stdin, env=environment)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--json"))

    def folder(self, name: str = "office") -> SwarmFolder:
        return Swarms(Home(self.home)).folder(name)

    def meet(self, *peers: int, heard: dict[int, int] | None = None) -> None:
        """As if a peer that ran here had met these."""
        known = Acquaintances()
        for number in peers:
            known.meet(PEERS[number], 1_000_000)
        for number, said_by in (heard or {}).items():
            known.hear([PEERS[number]], said_by=PEERS[said_by])
        self.folder().members.write_text(json.dumps(known.as_json()))


@pytest.fixture
def owner(tmp_path: Path) -> Shell:
    shell = Shell(tmp_path / "owner")
    shell("new", "office")
    return shell


@pytest.fixture
def other(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "other")


def test_new_prints_an_invite_and_what_to_type_next(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "home")
    said = shell("new", "office", "--address", "192.0.2.1:4810")
    word = next(word for word in said.split() if word.startswith("meshswarm1x"))
    assert f"meshswarm swarm join {word}" in said and "meshswarm --auto --swarm office" in said
    made = Invite.parse(word)
    own = Identity.load_or_create(Home(tmp_path / "home").key).peer_id
    assert made.name == "office" and [str(at) for at in made.peers[0][1]] == ["192.0.2.1:4810"]
    assert made.peers[0][0] == own
    assert shell.json("invite", "--address", "192.0.2.1:4810")["invite"] == word
    assert shell("invite", "office", "--address", "192.0.2.1:4810") == f"{word}\n"


def test_json_of_new_has_the_invite(other: Shell) -> None:
    made = other.json("new", "home")
    assert Invite.parse(made["invite"]).name == made["swarm"] == "home" and made["owned"]
    assert Path(made["key_file"]).exists()


@pytest.mark.parametrize("way", ["argument", "-", "--join-file", "--join-file -", "environment"])
def test_the_invite_may_come_by_any_way(owner: Shell, other: Shell, tmp_path: Path, way: str) -> None:
    word = owner.json("invite")["invite"]
    if way == "argument":
        other("join", word)
    elif way == "environment":
        other("join", MESHSWARM_INVITE=word)
    elif way == "--join-file":
        (tmp_path / "invite.txt").write_text(f"{word}\n")
        other("join", "--join-file", str(tmp_path / "invite.txt"))
    else:
        other("join", *way.split(), stdin=f"  {word[:70]}\n{word[70:]}\n")
    assert other.folder().load().keys == owner.folder().load().keys
    assert other.folder().load().swarm_id == owner.folder().load().swarm_id
    assert other.folder().owner() is None


def test_a_bad_invite_is_refused_without_being_repeated(owner: Shell, other: Shell, tmp_path: Path) -> None:
    word = owner.json("invite")["invite"]
    for arguments, said in (
        (("join", word[:-9]), "damaged"),
        (("join", word.replace("meshswarm1x", "meshswarm9x")), "version 9"),
        (("join",), "no invite was given"),
        (("join", word, "--join-file", "x"), "give the invite once"),
        (("join", "--join-file", str(tmp_path / "nowhere")), "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=said) as error:
            other(*arguments)
        assert word[20:60] not in str(error.value)
    assert not Home(other.home).swarms.exists()


def test_an_invite_behind_join_is_entered_and_what_cannot_enter_says_so_without_repeating_it(
    owner: Shell, other: Shell, tmp_path: Path
) -> None:
    invite = owner.json("invite")["invite"]
    peer = f"{PEERS[0]}@127.0.0.1:4000"
    assert enter_invited(Home(other.home), [peer, invite], None, False) == ([peer], "office", True)
    assert other.folder().load().keys == owner.folder().load().keys
    assert enter_invited(Home(other.home), [peer], "elsewhere", False) == ([peer], "elsewhere", False)
    with pytest.raises(ConfigError, match="two invites"):
        enter_invited(Home(other.home), [invite, invite.upper()], None, False)
    with pytest.raises(ValueError, match="swarm join") as refusal:
        parse_join(f" {invite}")
    assert invite[12:30] not in str(refusal.value)


def test_members_and_show_say_how_it_stands(owner: Shell) -> None:
    owner.meet(0, 1, heard={2: 0})
    owner("revoke", str(PEERS[1])[:10])
    listed = {each["peer_id"]: each for each in owner.json("members")["members"]}
    own = Identity.load_or_create(Home(owner.home).key).peer_id
    assert set(listed) == {str(own), *(str(PEERS[n]) for n in (0, 1, 2))}
    assert [listed[str(PEERS[n])]["admitted"] for n in (0, 1, 2)] == [True, False, True]
    assert listed[str(own)]["self"] and listed[str(PEERS[2])]["heard_from"] == [str(PEERS[0])]
    assert not any(each["connected"] for each in listed.values())
    text = owner("members")
    assert f"{PEERS[1].short}  expelled" in text and f"{own.short}  this peer" in text and "No peer runs" in text
    shown = owner.json("show")
    assert shown["expelled"] == [str(PEERS[1])] and shown["keys"] == 2 and shown["number"] == 2 and shown["owned"]
    assert PEERS[1].short in owner("show") and "office" in owner("list")


def test_revoking_changes_the_key_and_lists_who_may_come_with_the_older_one(owner: Shell) -> None:
    own = Identity.load_or_create(Home(owner.home).key).peer_id
    owner.meet(0, 1, heard={2: 0, 3: 1})
    before = owner.folder().load()
    changed = owner.json("revoke", str(PEERS[1]))
    after = owner.folder().load()
    assert after.keys[0] != before.keys[0] and after.keys[1] == before.keys[0] and after.members is not None
    assert changed["revoked"] == [str(PEERS[1])] and after.members.expelled == (PEERS[1],)
    assert set(after.members.holders or ()) == {own, PEERS[0], PEERS[2]}, "nobody whom only the expelled one named"
    word = Invite.parse(owner.json("invite")["invite"])
    assert word.key == after.keys[0] and word.lineage == before.lineage and word.number == after.number == 2


def test_revoking_may_keep_the_key(owner: Shell) -> None:
    before = owner.folder().load()
    assert "under a new PeerId they may come back" in owner("revoke", str(PEERS[0]), "--keep-key")
    after = owner.folder().load()
    assert after.keys == before.keys and after.members is not None and after.members.expelled == (PEERS[0],)
    assert "may enter" in owner("admit", str(PEERS[0])[:8])
    members = owner.folder().load().members
    assert members is not None and members.expelled == ()


def test_rotating_lets_everybody_have_a_week(owner: Shell) -> None:
    before = owner.folder().load()
    owner("rotate")
    after = owner.folder().load()
    assert after.members is not None and after.members.holders is None and after.keys[1:] == before.keys
    week = owner.json("show")["older_keys_end_in_s"]
    assert len(week) == 1 and abs(week[0] - 7 * 86_400) < 60
    owner.meet(0)
    owner("rotate", "--leaked", "--days", "1")
    members = owner.folder().load().members
    assert members is not None and PEERS[0] in (members.holders or ())
    owner("rotate")  # while the key that leaked still counts, its rule stays
    members = owner.folder().load().members
    assert members is not None and members.holders is not None


def test_only_the_owner_rules(owner: Shell, other: Shell) -> None:
    other("join", owner.json("invite")["invite"])
    for command in (("revoke", str(PEERS[0])), ("rotate",), ("admit", str(PEERS[0]))):
        with pytest.raises(ConfigError, match="only the owner"):
            other(*command)
    assert other.folder().load().number == 0
    assert Invite.parse(other.json("invite")["invite"]).key == owner.folder().load().keys[0], "any member may invite"


def test_whom_to_revoke_must_be_clear(owner: Shell) -> None:
    own = Identity.load_or_create(Home(owner.home).key).peer_id
    owner.meet(0, 1)
    with pytest.raises(ConfigError, match="cannot be expelled from its own"):
        owner("revoke", str(own))
    for text in ("nobody", str(PEERS[0])[:3], str(PEERS[2])[:12], f"{str(PEERS[0])[:-1]}x"):
        with pytest.raises(ConfigError, match="swarm members"):
            owner("revoke", text)
    assert owner.folder().load().number == 0


def test_a_member_that_missed_the_new_key_gives_no_invite(owner: Shell, other: Shell) -> None:
    other("join", owner.json("invite")["invite"])
    owner("rotate")
    members = owner.folder().load().members
    assert members is not None
    other.folder().update(lambda standing: standing.with_list(members))
    with pytest.raises(ConfigError, match="has not got the new one"):
        other("invite")
    other("join", owner.json("invite")["invite"])
    assert Invite.parse(other.json("invite")["invite"]).key == owner.folder().load().keys[0]


def test_leaving_forgets_the_swarm_and_an_owner_is_asked_twice(owner: Shell, other: Shell) -> None:
    other("join", owner.json("invite")["invite"], "--as", "work")
    assert "Forgot" in other("leave")
    assert other.json("list") == [] and "No private swarm here" in other("list")
    with pytest.raises(ConfigError, match="--yes"):
        owner("leave")
    owner("leave", "office", "--yes")
    assert owner.json("list") == []


def test_entering_twice_says_so_and_the_list_has_a_heading(owner: Shell, other: Shell) -> None:
    invite = owner.json("invite")["invite"]
    assert "Entered the private swarm 'office'" in other("join", invite)
    assert "already a member of the private swarm 'office'" in other("join", invite)
    assert other.json("join", invite)["already"] is True
    assert [line.split(maxsplit=1) for line in other("list").splitlines()] == [
        ["private", "swarm        this peer is"],
        ["office", "a member"],
    ]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "just now"), (59, "just now"), (60, "a minute ago"), (120, "2 minutes ago"), (7200, "2 hours ago"),
     (86_400, "24 hours ago"), (3 * 86_400, "3 days ago")],
)  # fmt: skip
def test_how_long_ago_a_member_was_met(seconds: int, words: str) -> None:
    member = {"self": False, "admitted": True, "connected": False, "met_s_ago": seconds}
    assert _standing_of(member) == f"last met {words}"


def test_a_lost_key_is_listed_as_a_problem(owner: Shell) -> None:
    owner.folder().key.unlink()
    (entry,) = owner.json("list")
    assert entry["swarm"] == "office" and "is gone" in entry["problem"]
    assert "is gone" in owner("list")
    with pytest.raises(ConfigError, match="is gone"):
        owner("show")


def test_doctor_says_whether_each_private_swarm_can_be_entered(owner: Shell, other: Shell) -> None:
    def verdict(shell: Shell) -> tuple[Verdict, str]:
        (finding,) = doctor._swarms(Home(shell.home))
        return finding.verdict, finding.found

    assert verdict(owner) == (Verdict.OK, "private, member list number 0")
    other("join", owner.json("invite")["invite"])
    owner("rotate")
    members = owner.folder().load().members
    assert members is not None
    other.folder().update(lambda standing: standing.with_list(members))
    assert verdict(other)[0] is Verdict.WARNING and "has not come yet" in verdict(other)[1]
    owner("rotate", "--days", "0")
    late = owner.folder().load().members
    assert late is not None
    other.folder().update(lambda standing: standing.with_list(late))
    assert verdict(other)[0] is Verdict.FAILURE and "away for too long" in verdict(other)[1]
    other.folder().key.unlink()
    assert verdict(other)[0] is Verdict.FAILURE and "is gone" in verdict(other)[1]


def test_an_address_that_is_none_is_a_usage_error(owner: Shell) -> None:
    done = CliRunner().invoke(app, ["--home", str(owner.home), "swarm", "invite", "--address", "nowhere"])
    assert done.exit_code == 2 and "--address" in done.output
