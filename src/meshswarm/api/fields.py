"""Typed access to the fields of a JSON object that a client sent.

The rule this file keeps: a field is absent, null (which means the same), or exactly what it should be; anything else is
a RequestError whose `param` is the field's path, such as `messages[0].content`. Numbers are never read from strings.
"""

from __future__ import annotations

import math
from typing import Any

from meshswarm.api.failure import shown
from meshswarm.errors import RequestError

MAX_INT = 2**31 - 1
MAX_FLOAT = 1e300


def wrong_type(name: str, expected: str, value: object) -> RequestError:
    return RequestError(f"{name} must be {expected}, not {_kind(value)}", param=name, code="invalid_type")


def wrong_value(name: str, problem: str) -> RequestError:
    return RequestError(f"{name} {problem}", param=name, code="invalid_value")


def boolean(value: object, name: str, default: bool = False) -> bool:
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong_type(name, "true or false", value)
    return value


def number(value: object, name: str, default: float) -> float:
    """A number that a float can hold."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(name, "a number", value)
    if not -MAX_FLOAT <= value <= MAX_FLOAT:
        raise wrong_value(name, "is larger than any number that could be meant")
    return float(value)


def integer(value: object, name: str, low: int, high: int = MAX_INT) -> int | None:
    """A whole number in `[low, high]`; `256.0` counts as one, as clients without an integer type write it."""
    if value is None:
        return None
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(name, "a whole number", value)
    if not low <= value <= high:
        raise wrong_value(name, f"must be between {low} and {high}, not {shown(value)}")
    return value


def text(value: object, name: str) -> str:
    """A string that UTF-8 can carry: no lone surrogates."""
    if not isinstance(value, str):
        raise wrong_type(name, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong_value(name, "holds half of a surrogate pair, which is not text") from None
    return value


def array(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise wrong_type(name, "an array", value)
    return value


def json_object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    return value


def token_ids(values: list[Any], name: str) -> tuple[int, ...]:
    """Long prompts hold up the event loop, so paths are spelt out only when one of them is wrong."""
    if all(type(value) is int and 0 <= value <= MAX_INT for value in values):
        return tuple(values)
    return tuple(_token_id(value, f"{name}[{index}]") for index, value in enumerate(values))


def _token_id(value: object, name: str) -> int:
    found = integer(value, name, 0)
    if found is None:
        raise wrong_type(name, "a token id", value)
    return found


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"
