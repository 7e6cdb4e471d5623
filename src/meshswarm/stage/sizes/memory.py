"""What a span of a model takes in memory, from the model's header alone: weights, K and V, and llama.cpp's work space.

The rule this file keeps: weights and K and V are exact, as llama.cpp allocates them for the slice, its zero layers
included; the work space is an estimate from above. A model whose layers are not known here is taken for plain
attention, and `is_exact` says so.
"""

from __future__ import annotations

import copy
import itertools
import re
from dataclasses import dataclass
from functools import cached_property

from meshswarm.artifacts.gguf.check import GgufHeader, check_hyperparameters
from meshswarm.span import Span
from meshswarm.stage.engine.checkpoints import saved_bytes
from meshswarm.stage.engine.kv_layers import LayerKv, is_kv_known, layer_kvs, session_cells
from meshswarm.stage.engine.llama_options import KvType
from meshswarm.stage.families.cuts import LegalCuts, legal_cuts, slice_pads
from meshswarm.stage.families.proofs import Proofs
from meshswarm.stage.sessions.messages import MAX_ROWS_PER_STEP
from meshswarm.stage.sizes.work_space import work_space_bytes
from meshswarm.stage.slices.slicing import slice_bytes, zero_layer_bytes

PROCESS_BYTES = 160 << 20
"""The program itself with its buffers, beside what a span takes (docs/benchmarks.md)."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a span is to hold: `n_sessions` sessions of `n_ctx` positions, K and V of these types."""

    n_ctx: int
    n_sessions: int
    type_k: KvType = KvType.F16
    type_v: KvType = KvType.F16


@dataclass(frozen=True, slots=True)
class SpanMemory:
    """Bytes that a span takes. `weights` are mapped from the file, so the system may drop and read them again; `saved`:
    states of sessions that are kept to go back to."""

    weights: int
    kv: int
    work: int
    saved: int = 0

    @property
    def total(self) -> int:
        """With the program around it."""
        return self.weights + self.kv + self.work + self.saved + PROCESS_BYTES


class MemoryModel:
    """What spans of one model take under a load. `proofs`: on which build they are cut (None: the installed one)."""

    def __init__(self, header: GgufHeader, load: Load, *, proofs: Proofs | None = None) -> None:
        self._weights = _Weights(header, proofs)
        self._set_load(load)

    def under(self, load: Load) -> MemoryModel:
        """The same model under another load."""
        other = copy.copy(self)
        other._set_load(load)
        return other

    def _set_load(self, load: Load) -> None:
        self.load = load
        cells = session_cells(load.n_ctx)
        self._kv = tuple(
            (layer.cell_bytes(cells, load.type_k, load.type_v) + layer.state_bytes) * load.n_sessions
            for layer in self.layers
        )
        self._kv_to = (0, *itertools.accumulate(self._kv))
        self._work = {
            has_vocabulary: work_space_bytes(
                self.header, n_rows=MAX_ROWS_PER_STEP, n_cells=cells, has_vocabulary=has_vocabulary
            )
            for has_vocabulary in (True, False)
        }

    @property
    def header(self) -> GgufHeader:
        return self._weights.header

    @property
    def n_layers(self) -> int:
        return self._weights.n_layers

    @property
    def whole(self) -> Span:
        return Span(0, self.n_layers)

    @property
    def cuts(self) -> LegalCuts:
        return self._weights.cuts

    @property
    def smallest_spans(self) -> list[Span]:
        """The parts that cannot be cut further, in order."""
        return [Span(start, stop) for start, stop in itertools.pairwise([*self.cuts.starts, self.n_layers])]

    @property
    def layers(self) -> tuple[LayerKv, ...]:
        """What each layer keeps of a session."""
        return self._weights.layer_kvs

    @property
    def layer_weights(self) -> tuple[int, ...]:
        """Bytes of each layer's tensors."""
        return self._weights.of_layers

    @property
    def is_exact(self) -> bool:
        return self._weights.is_kv_known

    def token_bytes(self, span: Span) -> float:
        """Bytes that one more position of a session takes in these layers, on average."""
        layers = self.layers[span.start : span.stop]
        return sum(layer.token_bytes(self.load.type_k, self.load.type_v) for layer in layers)

    def state_bytes(self, span: Span) -> int:
        """Bytes of a session in these layers that do not depend on its length."""
        return sum(layer.state_bytes for layer in self.layers[span.start : span.stop])

    def span(self, span: Span) -> SpanMemory:
        """What the legal span takes, with the zero layers that its slice ends in."""
        pads = self._weights.pads(span)
        kv = self._kv_to[span.stop] - self._kv_to[span.start] + sum(self._kv[pad] for pad in pads)
        has_vocabulary = span.start == 0 or span.stop == self.n_layers
        layers = (*self.layers[span.start : span.stop], *(self.layers[pad] for pad in pads))
        state = sum(layer.saved_bytes(self.load.type_k, self.load.type_v) for layer in layers)
        saved = saved_bytes(state) * self.load.n_sessions
        return SpanMemory(self._weights.of(span), kv, self._work[has_vocabulary], saved)


class _Weights:
    """What spans of one model take whatever their load."""

    def __init__(self, header: GgufHeader, proofs: Proofs | None) -> None:
        shape = check_hyperparameters(header)
        self.header = header
        self.n_layers = shape.n_layers
        self.is_kv_known = is_kv_known(shape.architecture)
        self.cuts = legal_cuts(header, proofs)
        self.layer_kvs = layer_kvs(header)
        self.of_layers = _layer_weights(header, shape.n_layers)
        self._to = (0, *itertools.accumulate(self.of_layers))
        self._proofs = proofs
        self._pads: dict[Span, tuple[int, ...]] = {}
        self._outer: dict[tuple[bool, bool], int] = {}

    def of(self, span: Span) -> int:
        """Bytes of the slice of a legal span."""
        position = span.start == 0, span.stop == self.n_layers
        if position not in self._outer:
            self._outer[position] = self._outer_bytes(*position)
        return self._layers_of(span) + self._outer[position]

    def pads(self, span: Span) -> tuple[int, ...]:
        """The layers that the slice's zero layers are shaped like."""
        if span not in self._pads:
            is_whole = span == Span(0, self.n_layers)
            self._pads[span] = () if is_whole else slice_pads(self.header, span)
        return self._pads[span]

    def _layers_of(self, span: Span) -> int:
        pads = sum(self._zero_layers[pad] for pad in self.pads(span))
        return self._to[span.stop] - self._to[span.start] + pads

    @cached_property
    def _zero_layers(self) -> tuple[int, ...]:
        return tuple(zero_layer_bytes(self.header, layer) for layer in range(self.n_layers))

    def _outer_bytes(self, is_first: bool, is_last: bool) -> int:
        """Bytes outside the layers in a span that is the model's first, its last, both or neither: by the example of
        one of that kind, whose slice is planned in full."""
        if is_first and is_last:
            return sum(_aligned(tensor.n_bytes, self.header) for tensor in self.header.tensors.values()) - self._to[-1]
        starts = self.cuts.starts
        if is_first:
            example = Span(0, starts[1])
        elif is_last:
            example = Span(starts[-1], self.n_layers)
        else:
            example = Span(starts[1], starts[2])
        return slice_bytes(self.header, example, proofs=self._proofs) - self._layers_of(example)


def _layer_weights(header: GgufHeader, n_layers: int) -> tuple[int, ...]:
    """Bytes of the tensors of each layer that computes, in order."""
    sizes = [0] * n_layers
    for tensor in header.tensors.values():
        match = re.match(r"blk\.(\d+)\.", tensor.name)
        if match is not None and int(match[1]) < n_layers:
            sizes[int(match[1])] += _aligned(tensor.n_bytes, header)
    return tuple(sizes)


def _aligned(n_bytes: int, header: GgufHeader) -> int:
    return -(-n_bytes // header.alignment) * header.alignment
