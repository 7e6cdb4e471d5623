"""A swarm's secrets: the same for its members, useless to everybody else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshswarm.errors import ConfigError
from meshswarm.identity import Identity
from meshswarm.net.swarm import DAY_S, EDGE_S, SEAL_BYTES, Role, Swarm, key_id

KEY = bytes(range(32))
NEW_KEY = b"n" * 32
NEWER_KEY = b"w" * 32
NOON = 20_000 * DAY_S + DAY_S // 2
ALICE, BOB = (Identity.from_seed(letter * 32).peer_id for letter in (b"a", b"b"))


def test_pinned_values_so_that_releases_find_each_other() -> None:
    assert Swarm("public").dht_key(b"topic").hex() == "3e70a684e72f114e50404b6f88e50b15bfa2aab0"
    assert Swarm("office", KEY).dht_key(b"topic").hex() == "3f9fa787912628c1254d1ae9bc88abb620caf66a"
    tag = Swarm("office", KEY).tag(Role.CLIENT, b"fields")
    assert tag.hex() == "376dd142cabacbd6eb57dea65fce646539098077595d86544a91a64cc619f6d9"


def test_a_private_swarm_is_its_key_and_a_public_one_its_name() -> None:
    assert Swarm("a", KEY).swarm_id == Swarm("b", KEY).swarm_id
    assert Swarm("a").swarm_id != Swarm("b").swarm_id
    assert Swarm("a").swarm_id != Swarm("a", KEY).swarm_id
    assert Swarm("a", KEY).is_private and not Swarm("a").is_private


@given(fields=st.binary(max_size=200), other=st.binary(max_size=200))
def test_a_tag_holds_for_its_fields_role_and_swarm_alone(fields: bytes, other: bytes) -> None:
    swarm = Swarm("office", KEY)
    tag = swarm.tag(Role.CLIENT, fields)
    assert swarm.has_tag(Role.CLIENT, fields, tag)
    assert swarm.has_tag(Role.CLIENT, other, tag) == (other == fields)
    assert not swarm.has_tag(Role.SERVER, fields, tag)
    assert not Swarm("office").has_tag(Role.CLIENT, fields, tag)
    assert not Swarm("office", KEY[::-1]).has_tag(Role.CLIENT, fields, tag)
    assert not swarm.has_tag(Role.CLIENT, fields, b"")


def test_dht_keys_are_160_bits_and_differ_by_topic_and_swarm() -> None:
    keys = {Swarm(name).dht_key(topic) for name in ("a", "b") for topic in (b"", b"x", b"y")}
    assert len(keys) == 6
    assert {len(key) for key in keys} == {20}


def test_the_key_is_not_shown() -> None:
    assert KEY.hex() not in repr(vars(Swarm("office", KEY))) + repr(Swarm("office", KEY))
    assert repr(Swarm("office", KEY)) == "Swarm('office', private)"


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 65])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="a swarm's name is"):
        Swarm(name)


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="32 bytes, not 5"):
        Swarm("office", b"short")


# -- several keys


@pytest.mark.parametrize("keys", [[], [KEY] * 5, [KEY, b"short"]])
def test_bad_sets_of_keys_are_refused(keys: list[bytes]) -> None:
    with pytest.raises(ConfigError, match=r"keys|bytes"):
        Swarm.of_keys("office", keys)
    with pytest.raises(ConfigError, match=r"keys|bytes"):
        Swarm("office", KEY).renew(keys)


def test_the_first_key_signs_and_all_verify() -> None:
    both, old, new = (Swarm.of_keys("office", keys) for keys in ([NEW_KEY, KEY], [KEY], [NEW_KEY]))
    assert both.tag(Role.CLIENT, b"f") == new.tag(Role.CLIENT, b"f") != old.tag(Role.CLIENT, b"f")
    assert (
        both.older_tags(Role.CLIENT, b"f") == [old.tag(Role.CLIENT, b"f")] and old.older_tags(Role.CLIENT, b"f") == []
    )
    assert both.has_tag(Role.CLIENT, b"f", old.tag(Role.CLIENT, b"f"))
    assert both.has_tag(Role.CLIENT, b"f", new.tag(Role.CLIENT, b"f"))
    assert not old.has_tag(Role.CLIENT, b"f", both.tag(Role.CLIENT, b"f"))


def test_a_change_of_key_moves_nothing() -> None:
    before = Swarm("office", KEY)
    during = Swarm.of_keys("office", [NEW_KEY, KEY])
    after = Swarm.of_keys("office", [NEW_KEY], lineage=KEY)
    assert before.swarm_id == during.swarm_id == after.swarm_id
    assert before.dht_key(b"topic") == during.dht_key(b"topic") == after.dht_key(b"topic")
    assert Swarm("office", NEW_KEY).swarm_id != after.swarm_id


def test_renew_works_on_the_object_that_everybody_holds() -> None:
    swarm, said = Swarm("office", KEY), []
    swarm.on_change(lambda: said.append(swarm.admits(BOB)))
    where = swarm.swarm_id, swarm.dht_key(b"topic")
    swarm.renew([NEW_KEY, KEY], expelled=[BOB])
    assert said == [False]
    assert swarm.tag(Role.CLIENT, b"f") == Swarm("office", NEW_KEY).tag(Role.CLIENT, b"f")
    assert (swarm.swarm_id, swarm.dht_key(b"topic")) == where
    with pytest.raises(ConfigError, match="public"):
        Swarm("office").renew([KEY])


def test_the_expelled_are_not_admitted_whatever_they_know() -> None:
    swarm = Swarm.of_keys("office", [NEW_KEY, KEY])
    tags = [swarm.tag(Role.CLIENT, b"f")]
    assert swarm.admits(BOB) and swarm.admits_tags(BOB, Role.CLIENT, b"f", tags)
    swarm.renew([NEW_KEY, KEY], expelled=[BOB])
    assert not swarm.admits(BOB) and not swarm.admits_tags(BOB, Role.CLIENT, b"f", tags)
    assert swarm.admits(ALICE) and swarm.admits_tags(ALICE, Role.CLIENT, b"f", tags)
    assert not swarm.admits_tags(ALICE, Role.SERVER, b"f", tags) and not swarm.admits_tags(ALICE, Role.CLIENT, b"f", [])


def test_after_an_expulsion_an_older_key_lets_in_its_listed_holders_alone() -> None:
    swarm, old = Swarm.of_keys("office", [NEW_KEY, KEY]), Swarm("office", KEY)
    tags = [old.tag(Role.CLIENT, b"f")]
    assert swarm.admits_tags(ALICE, Role.CLIENT, b"f", tags)
    swarm.renew([NEW_KEY, KEY], holders=[BOB])
    assert swarm.admits_tags(BOB, Role.CLIENT, b"f", tags)
    assert not swarm.admits_tags(ALICE, Role.CLIENT, b"f", tags)
    behind = Swarm("office", KEY)
    behind.renew([KEY], holders=[BOB], is_behind=True)
    assert behind.admits_tags(BOB, Role.CLIENT, b"f", tags) and not behind.admits_tags(ALICE, Role.CLIENT, b"f", tags)
    newest = [b"?" * 32, swarm.tag(Role.CLIENT, b"f"), *tags]
    assert swarm.admits_tags(ALICE, Role.CLIENT, b"f", newest)


def test_a_public_swarm_admits_everybody_who_knows_its_name() -> None:
    swarm = Swarm("office")
    assert swarm.admits(ALICE) and swarm.admits_tags(ALICE, Role.CLIENT, b"f", [swarm.tag(Role.CLIENT, b"f")])
    assert not swarm.admits_tags(ALICE, Role.CLIENT, b"f", [Swarm("other").tag(Role.CLIENT, b"f")])


# -- sealed data


@settings(deadline=None)
@given(key=st.binary(max_size=20), data=st.binary(max_size=300), at=st.integers(0, 10_000))
def test_sealed_data_is_for_members_under_its_key_alone(key: bytes, data: bytes, at: int) -> None:
    swarm = Swarm("office", KEY)
    sealed = swarm.seal(key, data)
    assert len(sealed) == len(data) + SEAL_BYTES and sealed == swarm.seal(key, data)
    assert swarm.unseal(key, sealed) == data
    assert swarm.unseal(key + b"x", sealed) is None
    assert Swarm("office", NEW_KEY).unseal(key, sealed) is None
    at %= len(sealed)
    assert swarm.unseal(key, sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]) is None
    assert swarm.unseal(key, sealed[:at]) is None


def test_sealed_data_shows_nothing_of_what_it_holds() -> None:
    sealed = Swarm("office", KEY).seal(b"key", b"the layers of a model" * 10)
    assert b"layers" not in sealed
    assert Swarm("office", KEY).seal(b"other", b"the layers of a model" * 10)[12:] != sealed[12:]


def test_who_lost_the_key_cannot_read_what_is_sealed_with_the_next() -> None:
    old, during = Swarm("office", KEY), Swarm.of_keys("office", [NEW_KEY, KEY])
    assert during.unseal(b"k", old.seal(b"k", b"said before")) == b"said before"
    assert old.unseal(b"k", during.seal(b"k", b"said after")) is None
    after = Swarm.of_keys("office", [NEW_KEY], lineage=KEY)
    assert after.unseal(b"k", during.seal(b"k", b"said after")) == b"said after"


def test_a_public_swarm_seals_nothing() -> None:
    assert Swarm("a").seal(b"k", b"data") == b"data" and Swarm("a").unseal(b"k", b"data") == b"data"


# -- outside


def test_rendezvous_hashes_change_by_the_day_and_overlap_near_midnight() -> None:
    swarm = Swarm("office", KEY)
    (noon,) = swarm.rendezvous_hashes(NOON)
    assert len(noon) == 20 and swarm.rendezvous_hashes(NOON + 3600.5) == [noon]
    (tomorrow,) = swarm.rendezvous_hashes(NOON + DAY_S)
    midnight = NOON + DAY_S // 2
    assert swarm.rendezvous_hashes(midnight - 1) == [noon, tomorrow]
    assert swarm.rendezvous_hashes(midnight) == [tomorrow, noon]
    assert swarm.rendezvous_hashes(midnight - EDGE_S - 1) == [noon]
    assert swarm.rendezvous_hashes(midnight + EDGE_S) == [tomorrow]
    assert len({noon, tomorrow, *Swarm("office").rendezvous_hashes(NOON), swarm.dht_key(b"")}) == 4


@settings(deadline=None)
@given(a=st.floats(0, 2e9), skew=st.floats(-EDGE_S, EDGE_S))
def test_members_meet_although_a_clock_is_hours_off(a: float, skew: float) -> None:
    swarm = Swarm("office", KEY)
    assert set(swarm.rendezvous_hashes(a)) & set(swarm.rendezvous_hashes(max(0.0, a + skew)))


def test_lan_names_of_a_private_swarm_change_by_the_day() -> None:
    private, public = Swarm("office", KEY), Swarm("office")
    assert private.lan_name(NOON) == private.lan_name(NOON + 60) != private.lan_name(NOON + DAY_S)
    assert public.lan_name(NOON) == public.lan_name(NOON + DAY_S) != private.lan_name(NOON)
    assert public.lan_name(NOON) != Swarm("other").lan_name(NOON)
    assert len(private.lan_name(NOON)) == 26 and private.lan_name(NOON).isalnum()


def test_in_an_overlap_members_with_either_key_meet_outside() -> None:
    old, both = Swarm("office", KEY), Swarm.of_keys("office", [NEW_KEY, KEY])
    newest = Swarm.of_keys("office", [NEWER_KEY, NEW_KEY, KEY])
    assert set(old.rendezvous_hashes(NOON)) <= set(both.rendezvous_hashes(NOON)) <= set(newest.rendezvous_hashes(NOON))
    assert old.lan_name(NOON) == both.lan_name(NOON) == newest.lan_name(NOON)


def test_after_an_expulsion_a_former_member_recognises_nothing_outside() -> None:
    former, swarm = Swarm("office", KEY), Swarm("office", KEY)
    swarm.renew([NEW_KEY, KEY], expelled=[BOB], holders=[ALICE])
    assert not set(former.rendezvous_hashes(NOON)) & set(swarm.rendezvous_hashes(NOON))
    assert former.lan_name(NOON) != swarm.lan_name(NOON) == Swarm("office", NEW_KEY).lan_name(NOON)


def test_a_key_id_names_a_key_and_is_none_of_its_other_secrets() -> None:
    assert key_id(KEY) != key_id(NEW_KEY) and len(key_id(KEY)) == 16
    assert key_id(KEY) != Swarm("office", KEY).swarm_id


def test_pieces_of_models_have_a_secret_of_their_own_that_follows_the_newest_key() -> None:
    assert Swarm("public").artifact_secret() is None
    secret = Swarm("office", KEY).artifact_secret()
    assert secret is not None and len(secret) == 32
    assert Swarm("another name", KEY).artifact_secret() == secret, "members agree on it"
    swarm = Swarm.of_keys("office", [NEW_KEY, KEY])
    assert swarm.artifact_secret() == Swarm("office", NEW_KEY).artifact_secret() != secret
    swarm.renew([NEWER_KEY, NEW_KEY])
    assert swarm.artifact_secret() == Swarm("office", NEWER_KEY).artifact_secret(), "who was expelled has not got it"
