"""What rendering a chat template may cost, counted as it happens.

The rule this file keeps: every value a template makes is paid for before it is made, or is small beside what it was
made from. A template comes with a model, and a model may come from anyone; without this, three lines of it could
take all memory, or a core for ever. Work is counted in characters, so that the same template always ends at the same
place; the clock only stops what is slow for other reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import Undefined

from meshswarm.errors import RequestError

STEP = 64
"""Work of one operation, whatever it does: about a microsecond, or a list item's memory."""
MAX_DEPTH = 64
MAX_TEXT = 4 << 20
BASE_WORK = 16 << 20
WORK_PER_CHARACTER = 16
WORK_PER_MESSAGE = 512 * STEP


class TemplateLimitError(RequestError):
    """A chat template takes more time, memory or text than any honest one does."""


class Meter:
    """The account of one rendering: so much `work`, in characters, and no longer than until `clock()` is `deadline`."""

    def __init__(self, work: int, deadline: float, clock: Callable[[], float]) -> None:
        self._left = work
        self._deadline = deadline
        self._clock = clock

    def charge(self, work: int = STEP) -> None:
        """Pay for an operation. Raises TemplateLimitError when that is more than there is, or time is up."""
        self._left -= work
        if self._left < 0:
            raise TemplateLimitError("the model's chat template does more work than a template may")
        if self._clock() > self._deadline:
            raise TemplateLimitError("the model's chat template takes longer than a template may")

    def charge_text(self, length: int) -> None:
        """Pay for a string of `length` characters that is about to be made."""
        if length > MAX_TEXT:
            raise TemplateLimitError(f"the model's chat template makes a text of more than {MAX_TEXT} characters")
        self.charge(STEP + length)

    def charge_value(self, value: Any, *, per_character: int = 1, only_plain: bool = False) -> tuple[int, int]:
        """Pay for `value` and everything in it, `per_character` times its size. Returns (number of values, depth).

        Raises TemplateLimitError when it is nested too deep, or, with `only_plain`, holds anything but texts, numbers,
        lists and mappings: what an object prints as is its own affair, and may be endless.
        """
        n_values = deepest = 0
        waiting = [(value, 0)]
        while waiting:
            item, depth = waiting.pop()
            n_values += 1
            deepest = max(deepest, depth)
            if depth > MAX_DEPTH:
                raise TemplateLimitError(f"the model's chat template nests values more than {MAX_DEPTH} deep")
            if isinstance(item, str):
                self.charge((STEP + len(item)) * per_character)
                continue
            self.charge(STEP * per_character)
            if isinstance(item, dict):
                waiting += [(part, depth + 1) for pair in item.items() for part in pair]
            elif isinstance(item, list | tuple):
                waiting += [(part, depth + 1) for part in item]
            elif only_plain and not (item is None or isinstance(item, int | float | Undefined)):
                raise TemplateLimitError(f"the model's chat template prints a {type(item).__name__}")
        return n_values, deepest


_current: ContextVar[Meter] = ContextVar("template_meter")


@contextmanager
def metered(meter: Meter) -> Iterator[None]:
    """Within this block, templates of this thread pay from `meter`."""
    token = _current.set(meter)
    try:
        yield
    finally:
        _current.reset(token)


def meter() -> Meter:
    """The account of the rendering going on in this thread."""
    return _current.get()
