"""Where a model may be cut, and which zero layers a slice needs behind its own.

The rule this file keeps: what a row's patterns and needs forbid is refused before llama.cpp sees a slice, because
there the same fault ends the process, or computes wrong numbers without a word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshswarm.artifacts.gguf.check import Hyperparameters, check_hyperparameters
from meshswarm.artifacts.gguf.container import GgufHeader
from meshswarm.errors import ConfigError
from meshswarm.span import Span
from meshswarm.stage.families.family import Facts, Family, LayerKind, Pattern
from meshswarm.stage.families.listing import unlisted
from meshswarm.stage.families.proofs import PROVED_BUILDS, CutProof, Proofs
from meshswarm.stage.families.table import FAMILIES, KNOWN_OBSTACLES

ORIGINAL_CONTEXT = "rope.scaling.original_context_length"
"""Up to this many positions a context is small for llama.cpp; without the setting, up to those of the training."""


class IllegalCutError(ConfigError):
    """This model cannot be cut there, or not at all; the message says why and what can be served instead."""


@dataclass(frozen=True, slots=True)
class LegalCuts:
    """Where spans of a model may start and stop: at `starts`, and stop at its end. `refusal`: why it is never split;
    `reason`: why not elsewhere, as a clause, empty where it may be cut anywhere."""

    n_layers: int
    starts: tuple[int, ...]
    refusal: str | None
    reason: str = ""
    max_ctx: int | None = None
    """Positions a session may have in a part of it, where that is less than in the whole."""

    @property
    def sentence(self) -> str:
        """For a person."""
        if self.refusal is not None:
            return self.refusal
        limit = "" if self.max_ctx is None else f"; a session in parts of it has at most {self.max_ctx} positions"
        if len(self.starts) == self.n_layers:
            return f"can be cut between any two of its {self.n_layers} layers{limit}"
        if len(self.starts) == 1:
            return f"can be cut nowhere in its {self.n_layers} layers: {self.reason}"
        starts = ", ".join(map(str, self.starts[1:]))
        return f"can be cut before {starts} of its layers 0:{self.n_layers}: {self.reason}{limit}"

    @property
    def is_whole_apart(self) -> bool:
        """Whether a peer with the whole model may compute other numbers than its parts do, so that no route may enter
        or leave it between its ends."""
        return self.refusal is not None or self.max_ctx is not None

    def allow(self, span: Span) -> bool:
        is_whole = span == Span(0, self.n_layers)
        ends = (*self.starts, self.n_layers)
        return is_whole or (self.refusal is None and span.start in self.starts and span.stop in ends)


def legal_cuts(header: GgufHeader, proofs: Proofs | None = None) -> LegalCuts:
    """Where the model whose checked header is `header` may be cut. `proofs`: what is proved about it, on which build
    (None: the installed one, knowing nothing of this very model)."""
    shape = check_hyperparameters(header)
    proofs = proofs or Proofs.installed()
    refusal = _refusal(header, shape, proofs)
    if refusal is not None:
        return LegalCuts(shape.n_layers, (0,), refusal)
    family = FAMILIES[shape.architecture]
    facts = layer_facts(header, family, shape.n_layers)
    multiple = _start_multiple(header, family)
    starts = range(multiple, shape.n_layers, multiple)
    legal = (0, *(at for at in starts if _may_start(family, facts, at)))
    cuts = LegalCuts(shape.n_layers, legal, None, _start_rule(family, multiple), small_context(header, family))
    return cuts if proofs.cover_table or proofs.found is None else _as_tried(cuts, proofs.found, proofs.build)


def _as_tried(cuts: LegalCuts, found: CutProof, build: str) -> LegalCuts:
    """What is left where only what was tried on this machine is proved."""
    starts = tuple(start for start in cuts.starts if start == 0 or start in found.starts)
    here = f"with llama-cpp-python {build} no other cut of it was tried on this machine"
    rules = [cuts.reason, here if len(starts) < len(cuts.starts) else ""]
    limits = [limit for limit in (cuts.max_ctx, found.max_ctx) if limit is not None]
    reason = ", and ".join(rule for rule in rules if rule)
    return replace(cuts, starts=starts, reason=reason, max_ctx=min(limits, default=None))


def _may_start(family: Family, facts: Sequence[Facts], layer: int) -> bool:
    """Whether spans may start at this layer, and a last one too."""
    if family.start_kind is not None and not family.start_kind.is_kind(facts[layer]):
        return False
    rest = Span(layer, len(facts))
    return family.zero_layers_compute_nothing or not any(_is_lacking(kind, facts, rest) for kind in family.needed_kinds)


def small_context(header: GgufHeader, family: Family) -> int | None:
    """The largest context that counts as small, in a model that computes otherwise in a large one."""
    if not family.factors_by_context & header.tensors.keys():
        return None
    named = header.scalar(f"{family.architecture}.{ORIGINAL_CONTEXT}")
    return named if isinstance(named, int) else check_hyperparameters(header).n_ctx_train


def _start_rule(family: Family, multiple: int) -> str:
    """What holds of every start, as a clause."""
    rules = []
    if multiple > 1:
        rules.append(f"llama.cpp counts a period of {multiple} layers from the first one it has")
    if family.start_kind is not None:
        rules.append(f"a span starts at a layer {family.start_kind.name}")
    if not family.zero_layers_compute_nothing:
        kinds = " and ".join(kind.name for kind in family.needed_kinds)
        rules.append(f"the last span holds a layer of {kinds}")
    return ", and ".join(rules)


def check_cut(header: GgufHeader, span: Span, proofs: Proofs | None = None) -> Family | None:
    """The row to cut `span` by; None when the span is the whole model and nothing is cut.

    Raises IllegalCutError for a span outside the model, a cut that its row does not allow, or one that is not proved
    for this model (`proofs`; None: as `legal_cuts` takes it).
    """
    shape = check_hyperparameters(header)
    whole = Span(0, shape.n_layers)
    if span.stop > shape.n_layers:
        raise IllegalCutError(f"the layers {span} are outside the model, which has the layers {whole}")
    if span == whole:
        return None
    cuts = legal_cuts(header, proofs)
    if cuts.refusal is not None:
        raise IllegalCutError(f"the layers {span} cannot be served alone: {cuts.refusal}")
    if not cuts.allow(span):
        raise IllegalCutError(f"the layers {span} cannot be served alone: this model {cuts.sentence}")
    return FAMILIES[shape.architecture]


def _start_multiple(header: GgufHeader, family: Family) -> int:
    settings = [header.scalar(f"{family.architecture}.{key}") for key in family.start_multiple_keys]
    return math.lcm(family.start_multiple, *(value for value in settings if isinstance(value, int) and value > 0))


def _refusal(header: GgufHeader, shape: Hyperparameters, proofs: Proofs) -> str | None:
    """Why this model is not split here."""
    whole = f"models of the architecture {shape.architecture!r} are served whole (layers 0:{shape.n_layers})"
    if shape.architecture not in FAMILIES:
        known = KNOWN_OBSTACLES.get(shape.architecture)
        if known is not None:
            return f"{whole}, because {known}"
        return f"{whole}, because no test has proved yet that they can be split exactly (proved: {_proved()})"
    if proofs.found is not None and proofs.is_refuted:
        return (
            f"this model is served whole (layers 0:{shape.n_layers}) on this machine, because `meshswarm models "
            f"prove` found with llama-cpp-python {proofs.build} that {proofs.found.refusal}"
        )
    if not proofs.cover_table and proofs.found is None:
        builds = ", ".join(sorted(PROVED_BUILDS))
        return (
            f"{whole}, because their cuts are proved with llama-cpp-python {builds} and this is {proofs.build}; "
            f"`meshswarm models prove` can prove those of this model here"
        )
    return unlisted(header, FAMILIES[shape.architecture], shape.n_layers)


def _proved() -> str:
    return ", ".join(sorted(FAMILIES))


def slice_pads(header: GgufHeader, span: Span) -> tuple[int, ...]:
    """The model's layers that the zero layers behind the slice `span` are shaped like, in order. `span` is legal.

    A zero layer adds nothing to the residual. A span that gives rows stops before it; a last span computes it in vain.
    There is one for every kind of layers that the row needs and the span lacks; as many as a number of layers with a
    meaning of its own takes; and one in every first span: the last layer of a graph drops all rows whose logits nobody
    wants, and wanting them all would cost a buffer of n_vocab floats a row (measured on SmolLM2: 27 MB at 128 rows and
    97 MB at 512). Behind a zero layer that is never computed, its rows leave without.
    """
    shape = check_hyperparameters(header)
    family = FAMILIES[shape.architecture]
    facts = layer_facts(header, family, shape.n_layers)
    pads = [_last_of(kind, facts) for kind in family.needed_kinds if _is_lacking(kind, facts, span)]
    # The next layer of the model, where there is one: it continues every period that llama.cpp has in its code.
    usual = min(span.stop, shape.n_layers - 1)
    if not pads and span.start == 0:
        pads.append(usual)
    if shape.n_layers in family.matched_counts:
        pads += [usual] * (shape.n_layers - len(span) - len(pads))
    while len(span) + len(pads) in (family.matched_counts - {shape.n_layers}) | family.avoided_counts:
        pads.append(usual)
    return tuple(pads)


def _is_lacking(kind: LayerKind, facts: Sequence[Facts], span: Span) -> bool:
    return any(map(kind.is_kind, facts)) and not any(map(kind.is_kind, facts[span.start : span.stop]))


def _last_of(kind: LayerKind, facts: Sequence[Facts]) -> int:
    """A layer of this kind: the last one, since a model's first layers are more often unlike the rest."""
    return max(layer for layer, fact in enumerate(facts) if kind.is_kind(fact))


def layer_facts(header: GgufHeader, family: Family, n_layers: int) -> list[Facts]:
    """What each of the model's layers is; 0 where the model has no such setting."""
    columns = {key: _per_layer(header, f"{family.architecture}.{key}", n_layers) for key in family.layer_keys}
    columns |= {pattern.key: pattern_values(header, family, pattern, n_layers) for pattern in family.patterns}
    return [{key: values[layer] if values else 0 for key, values in columns.items()} for layer in range(n_layers)]


def pattern_values(header: GgufHeader, family: Family, pattern: Pattern, n_layers: int) -> tuple[int, ...] | None:
    """The value of each layer; None in a model without the pattern."""
    prefix = family.architecture + "."
    if pattern.needs_key is not None and not header.scalar(prefix + pattern.needs_key):
        return None
    entry = header.metadata.get(prefix + pattern.key)
    if entry is not None and entry.is_array:
        return _per_layer(header, prefix + pattern.key, n_layers)
    if pattern.long_context and _context(header, prefix) >= pattern.long_context:
        if len(pattern.long_values) < n_layers:
            raise header.fault(
                prefix + pattern.key, f"is missing, and known for {len(pattern.long_values)} layers only"
            )
        return pattern.long_values[:n_layers]
    period_key = prefix + (pattern.period_key or pattern.key)
    period = header.scalar(period_key)
    if period is None:
        period = pattern.default_period
    if not isinstance(period, int) or period < 0:
        raise header.fault(period_key, f"is {period}, not a number of layers")
    return tuple(int(period == 0 or layer % period < period - 1) for layer in range(n_layers))


def _context(header: GgufHeader, prefix: str) -> int:
    n_ctx_train = header.scalar(prefix + "context_length")
    return n_ctx_train if isinstance(n_ctx_train, int) else 0


def _per_layer(header: GgufHeader, key: str, n_layers: int) -> tuple[int, ...] | None:
    """One integer for each layer, from an array or from one value for all; None when the key is missing."""
    entry = header.metadata.get(key)
    if entry is None:
        return None
    if not entry.is_array:
        value = header.scalar(key)
        if not isinstance(value, int):
            raise header.fault(key, "is not an integer")
        return (int(value),) * n_layers
    values = header.numbers(key)
    assert values is not None
    if len(values) < n_layers:
        raise header.fault(key, f"has {len(values)} items for {n_layers} layers")
    return tuple(int(value) for value in values[:n_layers])
