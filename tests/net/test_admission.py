"""Admission counts strangers, so that a crowd of them costs nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshswarm.net.admission import Admission, Answer, Limits

LIMITS = Limits(max_connections=20, max_half_open=8, retry_above_half_open=4, max_per_address=3, max_per_network=5)


def enter(admission: Admission, host: str, *, finish: bool = True) -> Answer:
    answer = admission.asks(host, has_token=False)
    if answer is Answer.ACCEPT:
        admission.opened(host)
        if finish:
            admission.established()
    return answer


def test_one_address_gets_its_share_and_no_more() -> None:
    admission = Admission(LIMITS)
    assert [enter(admission, "192.0.2.1") for _ in range(4)] == [Answer.ACCEPT] * 3 + [Answer.REFUSE]
    assert enter(admission, "192.0.2.2") is Answer.ACCEPT
    admission.ended("192.0.2.1", was_established=True)
    assert enter(admission, "192.0.2.1") is Answer.ACCEPT


def test_neighbours_share_a_networks_limit() -> None:
    admission = Admission(LIMITS)
    answers = [enter(admission, f"192.0.2.{number}") for number in range(6)]
    assert answers == [Answer.ACCEPT] * 5 + [Answer.REFUSE]
    assert enter(admission, "192.0.3.1") is Answer.ACCEPT
    six = [enter(admission, f"2001:db8::{number}") for number in range(4)]
    assert six == [Answer.ACCEPT] * 3 + [Answer.REFUSE]  # one /64 is one address


def test_mapped_addresses_are_the_addresses_they_map() -> None:
    admission = Admission(LIMITS)
    hosts = ["192.0.2.1", "::ffff:192.0.2.1", "192.0.2.1", "::ffff:192.0.2.1"]
    assert [enter(admission, host) for host in hosts][-1] is Answer.REFUSE


def test_many_half_open_ask_for_a_token_and_too_many_are_refused() -> None:
    admission = Admission(LIMITS)
    for number in range(4):
        assert enter(admission, f"192.0.{number}.1", finish=False) is Answer.ACCEPT
    assert admission.asks("198.51.100.1", has_token=False) is Answer.RETRY
    assert admission.asks("198.51.100.1", has_token=True) is Answer.ACCEPT
    for number in range(4):
        admission.opened(f"203.0.{number}.1")
    assert admission.asks("198.51.100.1", has_token=True) is Answer.REFUSE
    for number in range(4):
        admission.ended(f"203.0.{number}.1", was_established=False)
    admission.established()
    assert admission.asks("198.51.100.1", has_token=False) is Answer.ACCEPT


def test_loopback_counts_in_the_totals_only() -> None:
    admission = Admission(LIMITS)
    assert [enter(admission, "127.0.0.1") for _ in range(21)] == [Answer.ACCEPT] * 20 + [Answer.REFUSE]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=80))
def test_no_limit_is_ever_passed_and_all_of_it_is_given_back(steps: list[tuple[int, bool, bool]]) -> None:
    admission = Admission(LIMITS)
    open_now: list[tuple[str, bool]] = []
    for number, leave, finish in steps:
        if leave and open_now:
            host, finished = open_now.pop(0)
            admission.ended(host, was_established=finished)
            continue
        host = f"10.0.{number}.1"
        if enter(admission, host, finish=finish) is Answer.ACCEPT:
            open_now.append((host, finish))
        assert len(open_now) <= LIMITS.max_connections
        assert sum(not finished for _, finished in open_now) <= LIMITS.retry_above_half_open
        assert all(sum(h == host for h, _ in open_now) <= LIMITS.max_per_address for host, _ in open_now)
    for host, finished in open_now:
        admission.ended(host, was_established=finished)
    assert vars(admission)["_by_group"] == {} and vars(admission)["_total"] == vars(admission)["_half_open"] == 0
