"""Write tokens: of one peer, of one time, of one process."""

from meshswarm.dht.tokens import TOKEN_PERIOD_S, TokenIssuer
from meshswarm.identity import PeerId

ONE, OTHER = PeerId(b"1" * 32), PeerId(b"2" * 32)


def test_a_token_is_good_for_its_peer_for_one_to_two_periods() -> None:
    issuer = TokenIssuer(b"s" * 32)
    token = issuer.issue(ONE, 1000.0)
    assert issuer.accepts(token, ONE, 1000.0)
    assert issuer.accepts(token, ONE, 1000.0 + TOKEN_PERIOD_S)
    assert not issuer.accepts(token, ONE, 1000.0 + 2 * TOKEN_PERIOD_S)


def test_a_token_is_of_no_use_to_others_or_elsewhere() -> None:
    issuer = TokenIssuer(b"s" * 32)
    token = issuer.issue(ONE, 1000.0)
    assert not issuer.accepts(token, OTHER, 1000.0)
    assert not TokenIssuer(b"t" * 32).accepts(token, ONE, 1000.0)
    for wrong in (b"", token[:-1], token + b"x", bytes(len(token))):
        assert not issuer.accepts(wrong, ONE, 1000.0)
