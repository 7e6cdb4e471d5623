"""What the sessions' tests share: an engine for each, none of which has to know how fast it is."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def sessions_are_not_timed(unmeasured: None) -> None:
    pass
