"""The models that the benchmarks run, and where they are cut."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import random_model
from peers import MODEL

from meshswarm.artifacts import sources
from meshswarm.artifacts.gguf.check import check_hyperparameters, read_header

NAMES = ("smollm2", "1b", "tiny")


@dataclass(frozen=True)
class BenchModel:
    """`reference` is what `--model` takes. `layer_costs`: weights that a row meets in each layer; `output_cost`: and in
    the output matrix behind the last one, if a token comes of it."""

    name: str
    reference: str
    gguf: Path
    layer_costs: tuple[int, ...]
    output_cost: int

    @property
    def n_layers(self) -> int:
        return len(self.layer_costs)

    def cut(self, *shares: float, prompt: bool = False) -> list[str]:
        """Spans whose costs are in these proportions, as near as whole layers allow: those of a token of the answer, or
        of one of a long prompt."""
        done = list(itertools.accumulate(self._costs(prompt), initial=0))
        cuts = [0]
        for share in itertools.accumulate(shares[:-1]):
            goal = done[-1] * share / sum(shares)
            cuts.append(min(range(cuts[-1] + 1, self.n_layers), key=lambda layer: abs(done[layer] - goal)))
        return [f"{start}:{stop}" for start, stop in itertools.pairwise([*cuts, self.n_layers])]

    def share(self, span: str) -> float:
        """The part of the work of a token of the answer that lies in `span`."""
        start, stop = map(int, span.split(":"))
        costs = self._costs(prompt=False)
        return sum(costs[start:stop]) / sum(costs)

    def _costs(self, prompt: bool) -> list[int]:
        return [*self.layer_costs[:-1], self.layer_costs[-1] + (0 if prompt else self.output_cost)]


def bench_model(name: str) -> BenchModel:
    """The model of that name in NAMES, made or fetched if it is not here yet."""
    if name == "smollm2":
        return _described(name, MODEL, sources.fetch(MODEL))
    path = random_model.ensure(random_model.SHAPES[name])
    return _described(name, str(path), path)


def _described(name: str, reference: str, gguf: Path) -> BenchModel:
    header = read_header(gguf)
    costs = [0] * check_hyperparameters(header).n_layers
    output_cost = 0
    for tensor in header.tensors.values():
        n_weights = tensor.n_bytes // tensor.type.block_bytes * tensor.type.block_elements
        if match := re.match(r"blk\.(\d+)\.", tensor.name):
            costs[int(match[1])] += n_weights
        elif tensor.name == ("output.weight" if "output.weight" in header.tensors else "token_embd.weight"):
            output_cost = n_weights
    return BenchModel(name, reference, gguf, tuple(costs), output_cost)
