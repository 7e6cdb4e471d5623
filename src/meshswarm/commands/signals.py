"""What a signal means to a command that runs an event loop: the first asks for one thing, the next for another.

The rule this file keeps: after the last of them a signal ends the process as usual, so nothing can keep a person from
ending it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence

INTERRUPT = (signal.SIGINT,)
INTERRUPT_OR_END = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def on_signals(numbers: Sequence[signal.Signals], *steps: Callable[[], object]) -> Iterator[None]:
    """Within the block the first of each of these signals calls the first of `steps` in the loop, the second the
    second."""
    loop = asyncio.get_running_loop()
    left = {number: list(steps) for number in numbers}

    def step(number: signal.Signals) -> None:
        if left[number]:
            left[number].pop(0)()
        if not left[number]:
            _restore(loop, number)

    for number in numbers:
        try:
            loop.add_signal_handler(number, step, number)
        except (NotImplementedError, RuntimeError):  # Windows
            with contextlib.suppress(ValueError):  # not in the main thread: no signal comes here
                signal.signal(number, lambda at, _frame: loop.call_soon_threadsafe(step, signal.Signals(at)))
    try:
        yield
    finally:
        for number in numbers:
            _restore(loop, number)


def _restore(loop: asyncio.AbstractEventLoop, number: signal.Signals) -> None:
    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
        loop.remove_signal_handler(number)
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
