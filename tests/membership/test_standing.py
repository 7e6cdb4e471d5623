"""What a member makes of its keys and the owner's list, and what the owner can do."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from meshswarm.identity import Identity, PeerId
from meshswarm.membership.member_list import MAX_EXPELLED
from meshswarm.membership.standing import OVERLAP_S, Standing
from meshswarm.net.swarm import Role, Swarm

OWNER, MALLORY = (Identity.from_seed(letter * 32) for letter in (b"o", b"m"))
ALICE, BOB, CAROL = (Identity.from_seed(letter * 32).peer_id for letter in (b"a", b"b", b"c"))
KEY, SECOND, THIRD, FORGED = (letter * 32 for letter in (b"1", b"2", b"3", b"f"))
NOW, WEEK = 10**12, int(OVERLAP_S * 1000)


def new(keys: tuple[bytes, ...] = (KEY,)) -> Standing:
    return Standing("office", OWNER.peer_id, KEY, keys)


def of_member(standing: Standing) -> Standing:
    """A member that has heard of everything but had the first key only."""
    assert standing.members is not None
    return new().with_list(standing.members)


def test_before_any_list_the_keys_of_the_file_count_for_ever() -> None:
    assert new().current_keys(NOW * 100) == (KEY,) and new().number == 0
    assert not new().is_behind and not new().is_outdated(NOW) and new().next_end_ms(NOW) is None
    assert new().may_have_key(ALICE)


def test_a_rotation_overlaps_for_a_week_and_then_ends_the_older_key() -> None:
    owner = new().rotated(OWNER, SECOND, NOW)
    assert owner.number == 1 and owner.current_keys(NOW) == (SECOND, KEY) and owner.next_end_ms(NOW) == NOW + WEEK
    assert owner.current_keys(NOW + WEEK - 1) == (SECOND, KEY) and owner.current_keys(NOW + WEEK) == (SECOND,)
    member = of_member(owner)
    assert member.is_behind and member.current_keys(NOW) == (KEY,) and not member.is_outdated(NOW)
    assert member.is_outdated(NOW + WEEK) and member.current_keys(NOW + WEEK) == (KEY,)
    caught_up = member.with_keys([SECOND])
    assert not caught_up.is_behind and caught_up.current_keys(NOW) == (SECOND, KEY)


def test_only_keys_that_the_owner_signed_for_are_taken() -> None:
    member = of_member(new().rotated(OWNER, SECOND, NOW))
    assert member.with_keys([FORGED]) == member
    assert new().with_keys([FORGED]) == new()
    assert member.with_keys([FORGED, SECOND]).keys == (SECOND, KEY)


def test_only_the_owners_newer_list_is_taken() -> None:
    first = new().rotated(OWNER, SECOND, NOW)
    second = first.expelling(OWNER, [BOB], NOW)
    assert first.members is not None and second.members is not None
    member = of_member(second)
    assert member.with_list(first.members) is member
    assert member.members is not None and member.members.expelled == (BOB,)


def test_keys_that_the_list_does_not_name_any_more_are_forgotten() -> None:
    owner = new().rotated(OWNER, SECOND, NOW).rotated(OWNER, THIRD, NOW + 2 * WEEK)
    assert owner.keys == (THIRD, SECOND) and owner.lineage == KEY
    member = of_member(owner)
    assert member.is_outdated(NOW + 2 * WEEK) and member.with_keys([THIRD]).keys == (THIRD,)


def test_an_expulsion_with_a_new_key_shuts_the_old_one_but_for_known_members() -> None:
    owner = new().expelling(OWNER, [BOB], NOW).rotated(OWNER, SECOND, NOW, only=[ALICE, BOB])
    assert owner.is_strict(NOW) and not owner.is_strict(NOW + WEEK)
    assert owner.may_have_key(ALICE) and not owner.may_have_key(BOB) and not owner.may_have_key(CAROL)
    swarm, former = Swarm("office", KEY), Swarm("office", KEY)
    owner.apply(swarm, NOW)
    old = [former.tag(Role.CLIENT, b"f")]
    assert swarm.admits_tags(ALICE, Role.CLIENT, b"f", old)
    assert not swarm.admits_tags(BOB, Role.CLIENT, b"f", old) and not swarm.admits(BOB)
    assert not swarm.admits_tags(CAROL, Role.CLIENT, b"f", old)  # Bob under a new name
    assert swarm.admits_tags(CAROL, Role.CLIENT, b"f", [Swarm("office", SECOND).tag(Role.CLIENT, b"f")])
    behind = Swarm("office", KEY)
    of_member(owner).apply(behind, NOW)
    assert behind.admits_tags(ALICE, Role.CLIENT, b"f", old) and not behind.admits_tags(CAROL, Role.CLIENT, b"f", old)


def test_who_is_admitted_again_is_no_longer_expelled() -> None:
    owner = new().expelling(OWNER, [BOB, CAROL], NOW).admitting(OWNER, BOB, NOW)
    assert owner.members is not None and owner.members.expelled == (CAROL,) and owner.number == 2


def test_expelling_takes_a_holder_off_and_keeps_the_rest_in_order() -> None:
    owner = (
        new().rotated(OWNER, SECOND, NOW, only=[ALICE, BOB]).expelling(OWNER, [BOB], NOW).expelling(OWNER, [BOB], NOW)
    )
    assert owner.members is not None
    assert owner.members.holders == (ALICE,) and owner.members.expelled == (BOB,) and owner.number == 3


def test_the_list_of_the_expelled_never_grows_beyond_its_bound() -> None:
    many = [PeerId(n.to_bytes(32)) for n in range(MAX_EXPELLED)]
    owner = new().expelling(OWNER, many, NOW).expelling(OWNER, [ALICE], NOW)
    assert owner.members is not None
    assert owner.members.expelled[-1] == ALICE and many[0] not in owner.members.expelled
    assert len(owner.members.expelled) == MAX_EXPELLED


def test_a_new_invite_lets_in_who_was_away_for_too_long() -> None:
    owner = new().rotated(OWNER, SECOND, NOW).rotated(OWNER, THIRD, NOW + 2 * WEEK)
    first = new().rotated(OWNER, SECOND, NOW)
    assert first.members is not None and owner.members is not None
    away = of_member(first)
    back = away.invited(THIRD, owner.number)
    assert back.current_keys(NOW + 3 * WEEK)[0] == THIRD and not back.is_outdated(NOW + 3 * WEEK)
    assert back.with_list(first.members) == back, "a list from before the invite counts for nothing"
    assert back.with_list(owner.members).keys == (THIRD,)
    old = owner.invited(KEY, 0)
    assert old.keys == owner.keys, "an old invite brings no ended key back"
    assert back.invited(THIRD, 99) is back


@settings(deadline=None)
@given(
    acts=st.lists(
        st.tuples(st.sampled_from(["rotate", "strict", "expel", "admit"]), st.integers(0, 3 * WEEK)), max_size=8
    )
)
def test_whatever_the_owner_does_members_that_follow_end_where_the_owner_is(acts: list[tuple[str, int]]) -> None:
    owner, member, now = new(), new(), NOW
    for n, (act, later) in enumerate(acts):
        now += later
        key = bytes([100 + n]) * 32
        if act == "expel":
            owner = owner.expelling(OWNER, [BOB], now)
        elif act == "admit":
            owner = owner.admitting(OWNER, BOB, now)
        else:
            owner = owner.rotated(OWNER, key, now, only=[ALICE] if act == "strict" or owner.is_strict(now) else None)
        assert owner.members is not None
        member = member.with_list(owner.members).with_keys(owner.current_keys(now))
        assert member.current_keys(now) == owner.current_keys(now) and member.number == owner.number == n + 1
        assert not member.is_behind and not owner.is_outdated(now)
        assert member.swarm_id == owner.swarm_id == new().swarm_id
        assert replace(member, keys=owner.keys) == owner
