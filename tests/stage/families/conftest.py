"""What the families' tests share: hundreds of engines, none of which has to know how fast it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshswarm.stage.engine.engine import SpanEngine, Speed


@pytest.fixture(autouse=True, scope="module")
def unmeasured() -> Iterator[None]:
    """Engines skip the measurement of their speed, which would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpanEngine, "measure", lambda _engine, _budget_s: Speed(0, 0, 0, 0))
        yield
