"""The models that the benchmarks run, and where they are cut."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import random_model
from peers import MODEL

from meshswarm.artifacts import sources
from meshswarm.artifacts.gguf import check_hyperparameters, read_header

NAMES = ("smollm2", "1b", "tiny")


@dataclass(frozen=True)
class BenchModel:
    """`reference` is what `--model` takes. `layer_costs`: weights that a row meets in each layer, the output matrix
    counted with the last one."""

    name: str
    reference: str
    gguf: Path
    layer_costs: tuple[int, ...]

    @property
    def n_layers(self) -> int:
        return len(self.layer_costs)

    def cut(self, *shares: float) -> list[str]:
        """Spans whose costs are in these proportions, as near as whole layers allow."""
        done = list(itertools.accumulate(self.layer_costs, initial=0))
        cuts = [0]
        for share in itertools.accumulate(shares[:-1]):
            goal = done[-1] * share / sum(shares)
            cuts.append(min(range(cuts[-1] + 1, self.n_layers), key=lambda layer: abs(done[layer] - goal)))
        return [f"{start}:{stop}" for start, stop in itertools.pairwise([*cuts, self.n_layers])]

    def cost(self, span: str) -> float:
        """The part of all work that lies in `span`."""
        start, stop = map(int, span.split(":"))
        return sum(self.layer_costs[start:stop]) / sum(self.layer_costs)


def bench_model(name: str) -> BenchModel:
    """The model of that name in NAMES, made or fetched if it is not here yet."""
    if name == "smollm2":
        return _described(name, MODEL, sources.fetch(MODEL))
    path = random_model.ensure(random_model.SHAPES[name])
    return _described(name, str(path), path)


def _described(name: str, reference: str, gguf: Path) -> BenchModel:
    header = read_header(gguf)
    costs = [0] * check_hyperparameters(header).n_layers
    for tensor in header.tensors.values():
        n_weights = tensor.n_bytes // tensor.type.block_bytes * tensor.type.block_elements
        if match := re.match(r"blk\.(\d+)\.", tensor.name):
            costs[int(match[1])] += n_weights
        elif tensor.name == ("output.weight" if "output.weight" in header.tensors else "token_embd.weight"):
            costs[-1] += n_weights
    return BenchModel(name, reference, gguf, tuple(costs))
