"""What the families' tests share: hundreds of engines, none of which has to know how fast it is."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def families_are_not_timed(unmeasured: None) -> None:
    pass
