"""Two peers with one key, as others see them."""

from meshswarm.dht.twins import Instances, twins_sentence
from meshswarm.identity import PeerId

PEER = PeerId(b"p" * 32)


def test_a_peer_that_starts_again_and_again_is_one() -> None:
    instances = Instances()
    for number in range(20):
        assert not instances.saw(PEER, bytes([number]) * 8)
        assert not instances.saw(PEER, bytes([number]) * 8)


def test_an_instance_that_comes_back_after_another_is_a_second_peer() -> None:
    instances = Instances()
    assert not instances.saw(PEER, b"one")
    assert not instances.saw(PEER, b"two")
    assert instances.saw(PEER, b"one")
    assert instances.saw(PEER, b"two")
    assert not instances.saw(PeerId(b"q" * 32), b"one")
    assert PEER.short in twins_sentence(PEER)
