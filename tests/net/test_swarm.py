"""A swarm's secrets: the same for its members, useless to everybody else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.errors import ConfigError
from meshswarm.net.swarm import Role, Swarm

KEY = bytes(range(32))


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
