"""Choosing the next token at the head, exactly, from the few logits that travel.

The rule this file keeps: the choice is a function of the *whole* row of logits, the parameters, the tokens so far and
`(seed, position)`, and of nothing else. The last span sends the top k logits and the mass of the rest; from those the
sampler works out what the whole row would give, and where they leave any doubt it asks for the whole row
(`NeedFullRow`). So k changes how often the row is fetched, never which token comes out, and an answer that is taken
up again on another route goes on as it would have.

The parameters act in this order: logit bias; repeat penalty; frequency and presence penalties (llama.cpp's order);
temperature, top-k, top-p, min-p, each on what the one before left (Hugging Face's and vLLM's order; llama.cpp applies
temperature last). Then one draw: tokens lie on the unit interval from the most to the least likely, equal ones by lower
id, and a hash of seed and position says where the draw falls.

How the whole row is known without being there. Every logit left out is at most the smallest one sent, `z_k`. The
tokens whose adjusted logit is above whatever an unsent one could reach are the true start of the ordering: the *head*.
Everything else is the *rest*, known by an interval for its mass. Each filter and the draw are decided for both ends of
that interval; when the ends agree, so would the whole row.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshswarm.errors import RemoteProtocolError, RequestError
from meshswarm.head.sampling_params import SamplingParams
from meshswarm.stage.sessions.messages import MAX_TOP_K

__all__ = ["NeedFullRow", "Sampler", "SamplingParams", "Token", "TopRow", "unit_draw"]

REPEAT_WINDOW = 64
"""Tokens that `repeat_penalty` looks back over: llama.cpp's default `penalty_last_n`."""
_TAIL_TOLERANCE = 1e-4
"""How far, relatively, the tail's mass may be off: it was summed elsewhere, perhaps in single precision. Fetching a row
for it costs nothing against how often a draw lands in the tail itself (under 128 borders x 1e-4 of the tail's mass)."""
_SUM_TOLERANCE = 1e-9
"""Relative; far above the rounding of a sum over any vocabulary in double precision."""
_K_BY_TEMPERATURE = ((0.6, 128), (0.9, 256), (math.inf, 512))
"""Measured on SmolLM2-135M, chat: mass outside the top k is 0.0001 (T 0.5, k 128), 0.003 (T 0.8, k 256), 0.010 (T 1,
k 512), and each draw that lands there costs a fetch of the whole row."""


class TopRow(Protocol):
    """What the last span returns for one row. `ids` int32 [k] and `logits` float32 [k], descending, equal ones by lower
    id; `tail_log_mass`: log of the sum of exp(logit / temperature) over all other ids, -inf when there are none."""

    @property
    def ids(self) -> NDArray[np.int32]: ...
    @property
    def logits(self) -> NDArray[np.float32]: ...
    @property
    def tail_log_mass(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Token:
    """The next token."""

    id: int


@dataclass(frozen=True, slots=True)
class NeedFullRow:
    """What was sent cannot decide: call `next` again with the whole row."""


@dataclass(slots=True)
class _Ordering:
    """The start of the true ordering. `ids`, `weights` [n] (the first weight is 1, descending) and their running sums
    `sums`; the rest's mass is within [`rest_low`, `rest_high`], and no token of it weighs more than `rest_peak`."""

    ids: NDArray[np.int64]
    weights: NDArray[np.float64]
    sums: NDArray[np.float64]
    rest_low: float
    rest_high: float
    rest_peak: float

    def keep(self, count: int) -> None:
        """Drop everything from the `count`-th token on."""
        self.ids = self.ids[:count]
        self.weights = self.weights[:count]
        self.sums = self.sums[:count]
        self.rest_low = self.rest_high = self.rest_peak = 0.0

    @property
    def total_low(self) -> float:
        return float(self.sums[-1]) + self.rest_low

    @property
    def total_high(self) -> float:
        return float(self.sums[-1]) + self.rest_high


class Sampler:
    """Chooses the tokens of one answer. `prompt`: its token ids. Raises RequestError for an id, in the prompt or
    biased, that the vocabulary of `n_vocab` tokens does not have.

    Per token: `next`, with the whole row if it asks for it, then `accept` of what it returned (or of whatever else
    stands there).
    """

    def __init__(self, params: SamplingParams, n_vocab: int, prompt: Sequence[int]) -> None:
        self.params = params
        self.n_vocab = n_vocab
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.position = len(prompt)
        """Index in prompt + answer of the token that comes next."""
        self._recent = deque(prompt[-REPEAT_WINDOW:], maxlen=REPEAT_WINDOW)
        self._counts: dict[int, int] = {}
        self._bias = dict(params.logit_bias)
        penalised = params.repeat_penalty != 1 or params.frequency_penalty or params.presence_penalty
        self._takes_the_top = params.greedy and not self._bias and not penalised
        for name, ids in (("logit_bias", self._bias), ("prompt", prompt)):
            if ids and not (min(ids) >= 0 and max(ids) < n_vocab):
                raise RequestError(f"{name} has a token id outside the model's 0 to {n_vocab - 1}", param=name)

    @property
    def k_needed(self) -> int:
        """How many logits to ask the last span for. Fewer are fetched again more often; the answer is the same."""
        params = self.params
        if params.greedy:
            base = 1
        elif params.top_k:
            base = params.top_k
        else:
            base = next(k for limit, k in _K_BY_TEMPERATURE if params.temperature <= limit)
        reach = sum(bias < 0 for bias in self._bias.values())
        if params.repeat_penalty > 1 or params.frequency_penalty > 0 or params.presence_penalty > 0:
            reach += REPEAT_WINDOW
        return min(base + reach, self.n_vocab, MAX_TOP_K)

    def accept(self, token: int) -> None:
        """`token` stands at `position`."""
        self._recent.append(token)
        self._counts[token] = self._counts.get(token, 0) + 1
        self.position += 1

    def next(self, row: TopRow, full_row: NDArray[np.float32] | None = None) -> Token | NeedFullRow:
        """The token at `position`. `full_row`: float32 [n_vocab], all logits of the same row.

        Raises RemoteProtocolError when the row breaks its own description, RequestError when the bias forbids every
        token.
        """
        if self._takes_the_top and len(row.ids) == 1:
            return self._top(row)
        ids, logits, tail_log_mass = self._checked(row, full_row)
        ordering = self._order(ids, logits, tail_log_mass)
        if ordering is None:
            return NeedFullRow()
        if self.params.greedy:
            return Token(int(ordering.ids[0]))
        if not (self._cut_top_k(ordering) and self._cut_top_p(ordering)):
            return NeedFullRow()
        self._cut_min_p(ordering)
        return self._draw(ordering)

    # -- the row

    def _top(self, row: TopRow) -> Token:
        """The most likely token, when nothing can change the order: what `next` gives, in a tenth of the time."""
        token, logit = int(row.ids[0]), float(row.logits[0])
        if not 0 <= token < self.n_vocab or len(row.logits) != 1:
            raise RemoteProtocolError("the last span returned logits for ids that are not the model's")
        if not logit < math.inf or math.isnan(row.tail_log_mass):
            raise RemoteProtocolError("the last span returned logits that are not in order, or no numbers")
        return Token(token)

    def _checked(
        self, row: TopRow, full_row: NDArray[np.float32] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], float]:
        """Ids and logits, descending, and the tail's log-mass: from the whole row when there is one."""
        ids, logits = row.ids.astype(np.int64), row.logits.astype(np.float64)
        k = len(ids)
        if not 0 < k <= self.n_vocab or len(logits) != k or ids.min() < 0 or ids.max() >= self.n_vocab:
            raise RemoteProtocolError("the last span returned logits for ids that are not the model's")
        steps = np.diff(logits)
        in_order = (steps < 0) | ((steps == 0) & (ids[:-1] < ids[1:]))
        twice = (np.diff(np.sort(ids)) == 0).any()
        if not (in_order.all() and logits[0] < math.inf) or twice or math.isnan(row.tail_log_mass):
            raise RemoteProtocolError("the last span returned logits that are not in order, or no numbers")
        if full_row is None:
            return ids, logits, row.tail_log_mass if k < self.n_vocab else -math.inf
        if full_row.shape != (self.n_vocab,) or not (full_row < math.inf).all():
            raise RemoteProtocolError("the last span returned a full row of another length, or with no numbers in it")
        if not np.array_equal(full_row[ids], logits):
            raise RemoteProtocolError("the last span returned a full row that is not the row it had returned before")
        everything = _descending(full_row)
        return everything, full_row[everything].astype(np.float64), -math.inf

    # -- penalties and bias

    def _affected(self) -> NDArray[np.bool_]:
        """Per id of the vocabulary: whether a bias or penalty changes its logit."""
        params = self.params
        affected = np.zeros(self.n_vocab, bool)
        affected[list(self._bias)] = True
        if params.repeat_penalty != 1:
            affected[list(self._recent)] = True
        if params.frequency_penalty or params.presence_penalty:
            affected[list(self._counts)] = True
        return affected

    def _adjust(self, ids: NDArray[np.int64], logits: NDArray[np.float64]) -> NDArray[np.float64]:
        """Logits of `ids` after bias and penalties; rises with the logit for every id."""
        params = self.params
        recent = set(self._recent)
        adjusted = logits.copy()
        for index, token in enumerate(ids.tolist()):
            value = adjusted[index] + self._bias.get(token, 0.0)
            if token in recent:
                value = value * params.repeat_penalty if value <= 0 else value / params.repeat_penalty
            if count := self._counts.get(token):
                value -= count * params.frequency_penalty + params.presence_penalty
            adjusted[index] = value
        return adjusted

    def _order(self, ids: NDArray[np.int64], logits: NDArray[np.float64], tail_log_mass: float) -> _Ordering | None:
        """The start of the true ordering after bias, penalties and temperature; None when not even its first token
        is sure."""
        affected = self._affected()
        changed = affected[ids]
        affected[ids] = False
        adjusted = logits.copy()
        adjusted[changed] = self._adjust(ids[changed], logits[changed])
        whole = len(ids) == self.n_vocab
        smallest = float(logits[-1])
        if whole:
            ceiling = -math.inf
            unsent = np.zeros(0)
            sure = np.ones(len(ids), bool)
        else:
            hidden = np.flatnonzero(affected)
            unsent = self._adjust(hidden, np.full(len(hidden), smallest))
            ceiling = max(smallest, float(unsent.max(initial=-math.inf)))
            # Unsent ids with the logit z_k itself are higher than the sent ones with it: those come first for sure.
            untied = float(unsent.max(initial=-math.inf)) < ceiling
            sure = (adjusted > ceiling) | ((adjusted == ceiling) & (logits == smallest) & ~changed & untied)
        order = np.lexsort((ids, -adjusted)) if changed.any() else np.arange(len(ids))
        n_sure = int(sure[order].argmin()) if not sure.all() else len(ids)
        if n_sure == 0:
            return None
        peak = float(adjusted[order[0]])
        if peak == -math.inf:
            raise RequestError("logit_bias forbids every token", param="logit_bias")
        temperature = self.params.tail_temperature
        weights = np.exp((adjusted[order] - peak) / temperature)
        sums = np.cumsum(weights)
        ordering = _Ordering(ids[order[:n_sure]], weights[:n_sure], sums[:n_sure], 0.0, 0.0, 0.0)
        if not whole:
            known_rest = float(sums[-1] - sums[n_sure - 1])
            rounding = float(sums[-1]) * _SUM_TOLERANCE
            tail = _exp(tail_log_mass - peak / temperature)
            lost = len(unsent) * _exp((smallest - peak) / temperature)
            gained = sum(_exp((value - peak) / temperature) for value in unsent.tolist() if value > smallest)
            ordering.rest_low = max(0.0, known_rest + max(0.0, tail * (1 - _TAIL_TOLERANCE) - lost) - rounding)
            ordering.rest_high = known_rest + tail * (1 + _TAIL_TOLERANCE) + gained + rounding
            ordering.rest_peak = _exp((ceiling - peak) / temperature)
        return ordering

    # -- filters: each returns whether the ordering still decides

    def _cut_top_k(self, ordering: _Ordering) -> bool:
        wanted = self.params.top_k
        if wanted == 0 or wanted >= self.n_vocab:
            return True
        if wanted > len(ordering.ids):
            return False
        ordering.keep(wanted)
        return True

    def _cut_top_p(self, ordering: _Ordering) -> bool:
        top_p = self.params.top_p
        if top_p >= 1.0:
            return True
        low, high = top_p * ordering.total_low, top_p * ordering.total_high
        first, last = (int(np.searchsorted(ordering.sums, reach, side="left")) for reach in (low, high))
        n_sure = len(ordering.ids)
        if first == last < n_sure:
            ordering.keep(first + 1)
            return True
        if first < n_sure:
            return False
        reached = float(ordering.sums[-1])
        ordering.rest_low = max(0.0, low - reached)
        ordering.rest_high = max(0.0, min(ordering.rest_high, high + ordering.rest_peak - reached))
        return True

    def _cut_min_p(self, ordering: _Ordering) -> None:
        min_p = self.params.min_p
        if min_p == 0.0:
            return
        count = int(np.count_nonzero(ordering.weights >= min_p))
        if count < len(ordering.ids) or ordering.rest_peak < min_p * (1 - _SUM_TOLERANCE):
            ordering.keep(count)
        else:
            ordering.rest_low = 0.0

    def _draw(self, ordering: _Ordering) -> Token | NeedFullRow:
        share = unit_draw(self.seed, self.position)
        low, high = share * ordering.total_low, share * ordering.total_high
        first, last = (int(np.searchsorted(ordering.sums, point, side="right")) for point in (low, high))
        if ordering.rest_high == 0.0:
            # A product rounded up to the total itself means the last token that weighs anything.
            heaviest_end = int(np.searchsorted(ordering.sums, ordering.sums[-1], side="left"))
            return Token(int(ordering.ids[min(first, heaviest_end)]))
        if first == last < len(ordering.ids):
            return Token(int(ordering.ids[first]))
        return NeedFullRow()


def unit_draw(seed: int, position: int) -> float:
    """The draw for the token at `position`: uniform in [0, 1), 53 bits of a BLAKE2b hash of seed and position."""
    digest = hashlib.blake2b(
        struct.pack("<QQ", seed % 2**64, position), digest_size=8, person=b"meshswarm/draw/1"
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _descending(row: NDArray[np.float32]) -> NDArray[np.int64]:
    """The ids of `row` in order: largest logit first, equal ones by lower id.

    Sorts one integer per id, the logit's bits above the id's, which is several times faster than a stable sort.
    """
    bits = (row + np.float32(0.0)).view(np.uint32)  # the sum makes a negative zero equal to zero
    ascending = np.where(bits >> 31 == 1, ~bits, bits | np.uint32(1 << 31))
    keys = (~ascending).astype(np.uint64) << np.uint64(32) | np.arange(len(row), dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _exp(exponent: float) -> float:
    return math.exp(exponent) if exponent < 700 else math.inf
