"""Names on the local network: members know them, and nobody else learns anything from them."""

from __future__ import annotations

import pytest

from meshswarm.discovery.label import NONCE_BYTES, is_of_swarm, make_label
from meshswarm.net.swarm import DAY_S, Swarm

NOW = 2_000_000_000.0
PUBLIC, PRIVATE, OTHER = Swarm("home"), Swarm("home", b"k" * 32), Swarm("home", b"o" * 32)


def label(swarm: Swarm, nonce: int = 1, now_s: float = NOW) -> str:
    return make_label(swarm.lan_name(now_s), nonce.to_bytes(NONCE_BYTES))


@pytest.mark.parametrize("swarm", [PUBLIC, PRIVATE])
def test_members_know_each_others_names_with_clocks_a_day_apart(swarm: Swarm) -> None:
    for shift_s in (-DAY_S, -3600, 0, 3600, DAY_S):
        assert is_of_swarm(label(swarm), swarm, NOW + shift_s)


def test_nobody_else_takes_them_for_its_own() -> None:
    swarms = PUBLIC, PRIVATE, OTHER, Swarm("office")
    for one in swarms:
        for other in swarms:
            assert is_of_swarm(label(one), other, NOW) is (one is other)


def test_names_of_a_private_swarm_share_nothing_and_fit_into_dns() -> None:
    names = {label(PRIVATE, nonce, NOW + day * DAY_S) for nonce in range(20) for day in range(20)}
    assert len(names) == 400
    assert len({name.partition("-")[2] for name in names}) == 400, "no tag comes twice, with the same nonce neither"
    assert all(len(name) <= 63 and PRIVATE.lan_name(NOW) not in name for name in names)
    assert not is_of_swarm(label(PRIVATE), PRIVATE, NOW + 3 * DAY_S), "a name says nothing some days later"


@pytest.mark.parametrize("text", ["", "-", "printer", "0" * 37, "g" * 16 + "-" + "0" * 20, label(PRIVATE)[:-1] + "?"])
def test_other_names_are_nobodys(text: str) -> None:
    assert not is_of_swarm(text, PRIVATE, NOW)
