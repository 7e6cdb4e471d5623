"""What several summaries say together: one is none, one liar moves nothing, and what has died since is not told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.routing.gossip.virtual import MODEL, SCOPE, World, push

from meshswarm.identity import Identity
from meshswarm.routing.gossip.messages import Word, WordKind
from meshswarm.routing.gossip.summary import Holding, Summary
from meshswarm.routing.gossip.told import together
from meshswarm.span import Span

MakeWorld = Callable[..., World]


@pytest.fixture
def sums_up(who: Callable[[int], Identity]) -> Callable[..., Summary]:
    """Peer number `author` says that these spans are held, one peer each."""

    def make(author: int, *spans: str, n_layers: int = 30, asked: float = 0.0) -> Summary:
        held = [Holding(who(500 + place).peer_id, Span.parse(span), 1000) for place, span in enumerate(spans)]
        return Summary.sign(who(author), SCOPE, 1, MODEL, n_layers, held, asked)

    return make


def test_one_opinion_is_none_and_of_two_the_lesser_counts(sums_up: Callable[..., Summary]) -> None:
    whole, part = sums_up(1, "0:30", "0:10", asked=3.0), sums_up(2, "0:20", asked=1.0)
    assert together([], 30) is None and together([whole], 30) is None and together([whole, whole], 30) is None
    told = together([whole, part], 30)
    assert told is not None and not told.is_whole and (told.n_peers, told.n_authors) == (1, 2)
    assert told.covered == (Span(0, 20),) and told.missing == (Span(20, 30),)
    assert told.tokens_per_s == 0.0 and told.requests_per_s == 1.0
    assert together([whole, part], 31) is None, "they speak of another number of layers"


@pytest.mark.parametrize("lie", [(), ("0:30",) * 50])
def test_one_liar_of_three_moves_nothing(sums_up: Callable[..., Summary], lie: tuple[str, ...]) -> None:
    honest = [sums_up(1, "0:15", "15:30"), sums_up(2, "0:15", "15:30")]
    told = together([*honest, sums_up(3, *lie)], 30)
    assert told is not None and told.is_whole and told.holders == (1,) * 30 and told.n_peers == 2


def test_a_swarm_tells_what_is_served_and_no_more_once_somebody_has_gone(make_world: MakeWorld) -> None:
    world = make_world()
    nodes = world.swarm(16)
    servers, head = nodes[:6], nodes[10]
    for place, node in enumerate(servers):
        world.serve(node, f"{place % 3 * 10}:{place % 3 * 10 + 10}")
        world.introduce(node, servers[:place], is_kin=True)
    head.core.asked(MODEL, world.now)
    assert head.core.told(MODEL, 30, world.now) is None
    world.run(60)
    told = head.core.told(MODEL, 30, world.now)
    assert told is not None and told.is_whole and told.n_peers >= 5, world.seed
    assert head.core.told(bytes(32), 30, world.now) is None
    world.kill(servers[0])
    world.run(10)
    assert head.core.told(MODEL, 30, world.now) is None, world.seed


def test_authors_that_nobody_knows_tell_nothing(make_world: MakeWorld, sums_up: Callable[..., Summary]) -> None:
    world = make_world()
    one, liar = world.swarm(2)
    world.run(5)
    for author in (901, 902, 903):
        push(world, liar, [one], Word(WordKind.SUMMARY, sums_up(author, "0:30").wire))
    assert len(one.core.coverage(MODEL, world.now)) == 3 and one.core.told(MODEL, 30, world.now) is None
