"""What the path of plans takes, and what it refuses."""

from __future__ import annotations

import pytest

from meshswarm.api.plan import read_plan
from meshswarm.errors import RequestError
from meshswarm.head.forecast import Asked


def test_what_is_asked_is_read() -> None:
    assert read_plan({"model": "m"}) == Asked("m")
    assert read_plan({"model": "m", "context": "4096", "prompt": "9", "streams": "3"}) == Asked("m", 4096, 9, 3)
    assert read_plan({}) == Asked(None)


@pytest.mark.parametrize("value", ["", "-1", "1.5", "1e9", "٣", "9" * 10, "0x10", " 5"])
def test_what_is_no_number_is_refused_by_name(value: str) -> None:
    with pytest.raises(RequestError, match="context is a whole number"):
        read_plan({"context": value})


def test_an_unknown_parameter_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="'contxt'") as caught:
        read_plan({"contxt": "5"})
    assert caught.value.code == "unknown_parameter"
