"""What happens in the background, whatever comes."""

from __future__ import annotations

import logging

import pytest

from meshswarm.dht.upkeep import _whatever_comes


async def test_a_mistake_in_one_errand_is_told_and_ends_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def mistaken() -> None:
        raise KeyError("a mistake of ours")

    with caplog.at_level(logging.ERROR):
        await _whatever_comes(mistaken)
    assert "a mistake of ours" in caplog.text
