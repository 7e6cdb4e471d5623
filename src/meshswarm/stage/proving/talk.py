"""The talk that a model's parts are compared with the whole by: beyond what any layer sees, back again, and on.

The rule this file keeps: whatever the header says that works only from some position on, the talk goes past it. Where
that cannot be, what was tried is all that is proved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshswarm.artifacts.gguf.check import GgufHeader, check_hyperparameters
from meshswarm.span import Span
from meshswarm.stage.engine.profile import EXACT_MAX_ROWS, Profile
from meshswarm.stage.families.cuts import ORIGINAL_CONTEXT
from meshswarm.stage.families.family import Rollback
from meshswarm.stage.families.table import FAMILIES
from meshswarm.stage.proving.span_chain import Chunk, SpanChain

LEAST_PROMPT = 192
MAX_PROMPT = 12_288
"""Enough for the windows of all families; no talk takes longer, and what is beyond is not proved."""
FAST_CHUNK = 96
"""Rows at a time: from 64 on llama.cpp's CPU back-end takes other kernels than for the fewer ones of `EXACT`."""
MARGIN = 2 * FAST_CHUNK
"""Positions of a prompt behind the one from which on all rules are at work."""
_ALONE = 4
_TURN = 13
_GUESSES = 3
TAIL = 2 * _ALONE + _TURN + _GUESSES + 2
"""Positions that a talk takes behind its prompt, at most."""
_COMPARED_ROWS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A chunk, and the whole model's logits of it."""

    chunk: Chunk
    logits: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where parts and whole do not agree."""

    spans: Sequence[Span]
    position: int
    size: float


def reach(header: GgufHeader) -> int:
    """The position from which on every rule of the model's layers that depends on positions has been at work: windows,
    attention to compressed positions and to those that an indexer picks, scales of far positions."""
    family = FAMILIES[check_hyperparameters(header).architecture]

    def number(key: str) -> int:
        value = header.scalar(f"{family.architecture}.{key}")
        return value if isinstance(value, int) else 0

    ratios = header.numbers(f"{family.architecture}.attention.compress_ratios")
    blocks = [] if ratios is None else [int(ratio) for ratio in ratios if ratio > 0]
    window = 0 if family.default_window is None else number("attention.sliding_window") or family.default_window
    is_scaled = f"{family.architecture}.attention.temperature_scale" in header.metadata
    return max(
        window,
        *blocks,
        # Where positions are compressed, an indexer picks among blocks of the smallest ratio there is.
        number("attention.indexer.top_k") * min(blocks, default=1),
        max(number("attention.temperature_length"), number(ORIGINAL_CONTEXT)) if is_scaled else 0,
    )


def _wanted_prompt(header: GgufHeader) -> int:
    """Beyond the reach, or as long as the model's context allows."""
    longest = max(1, check_hyperparameters(header).n_ctx_train - TAIL)
    return min(longest, max(LEAST_PROMPT, reach(header) + MARGIN))


def prompt_lengths(header: GgufHeader) -> list[int]:
    """How long the talk's prompt should be, and how long it may be where there is no room for that."""
    wanted = min(_wanted_prompt(header), MAX_PROMPT)
    return sorted({wanted, min(LEAST_PROMPT, wanted)}, reverse=True)


def proved_context(header: GgufHeader, n_prompt: int) -> int | None:
    """The longest session that a talk with a prompt of this length proves; None: as long as the model has."""
    return None if n_prompt >= _wanted_prompt(header) else n_prompt + TAIL


async def hold_talks(chain: SpanChain, prompt: Sequence[int]) -> list[list[Known]]:
    """Talk with the whole model, in each profile it has. Of a long prompt only `FAST` reads all: in `EXACT` other
    kernels are at work, and nothing else."""
    return [
        await _talk(chain, prompt if profile is Profile.FAST else prompt[:LEAST_PROMPT], profile)
        for profile in chain.profiles
    ]


async def _talk(chain: SpanChain, prompt: Sequence[int], profile: Profile) -> list[Known]:
    """A prompt in chunks, an answer token by token, a draft of which one token stands, and a second turn: in the middle
    of the prompt where the model can go back there, else at the end."""
    known: list[Known] = []

    async def say(pos0: int, tokens: Sequence[int], *, goes_back: bool = False, is_window: bool = False) -> None:
        chunk = Chunk(pos0, np.array(tokens, np.int32), profile, goes_back, is_window, _COMPARED_ROWS)
        known.append(Known(chunk, await chain.logits(chunk)))

    def best(row: int = -1) -> int:
        return int(known[-1].logits[row].argmax())

    size = FAST_CHUNK if profile is Profile.FAST else EXACT_MAX_ROWS
    with chain.session():
        for start in range(0, len(prompt), size):
            await say(start, prompt[start : start + size])
        end = len(prompt)
        for _ in range(_ALONE):
            await say(end, [best()])
            end += 1
        await say(end, [best(), *prompt[:_GUESSES]], is_window=True)
        await say(end + 1, [best(0)], goes_back=True)
        end += 2
        is_free = chain.rollback is Rollback.KV
        end = len(prompt) // 2 + 1 if is_free else end
        await say(end, prompt[-_TURN:], goes_back=is_free)
        end += len(prompt[-_TURN:])
        for _ in range(_ALONE):
            await say(end, [best()])
            end += 1
    return known


async def first_difference(chain: SpanChain, talk: Sequence[Known]) -> Difference | None:
    """The first chunk of which the chain computes other bits than the whole model did."""
    with chain.session():
        for known in talk:
            logits = await chain.logits(known.chunk)
            if not np.array_equal(logits, known.logits):
                return Difference(chain.spans, known.chunk.pos0, float(np.abs(logits - known.logits).max()))
    return None
