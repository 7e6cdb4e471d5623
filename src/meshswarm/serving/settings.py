"""What a person chose to serve, and the parts of the peer that serving needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshswarm.artifacts.store.store import Store
from meshswarm.config import Home
from meshswarm.dht.node import Dht
from meshswarm.identity import Identity
from meshswarm.net.endpoint import Endpoint
from meshswarm.span import Span
from meshswarm.stage.engine.llama_options import DEFAULT_OPTIONS, LlamaOptions
from meshswarm.stage.sessions.server import SpanServer
from meshswarm.stage.slices.store import Slices
from meshswarm.tasks import Tasks

if TYPE_CHECKING:
    from meshswarm.fetching.library import Library

DEFAULT_N_CTX = 4095  # with the cell that the exact profile pads with, a whole number of llama.cpp's 256-cell steps

Report = Callable[[Mapping[str, Any]], None]
"""Takes what a person or a program should know: a mapping with "event" and that event's fields."""


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """What a person chose to serve, and how. None means: the default, or whatever fits. `yields`: the machine's owner
    comes first. `is_auto`: the peer chooses the model itself, and `because` says why, as a clause, once it has.
    `is_mobile`: it may go over to other layers by itself. `slice_only`: of what was fetched no more is kept than the
    slices that are loaded. `changes_model`: it may go over to another model by itself."""

    model: str
    span: Span | None = None
    memory_bytes: int | None = None
    n_threads: int | None = None
    n_ctx: int | None = None
    n_sessions: int = 4
    llama_options: LlamaOptions = DEFAULT_OPTIONS
    yields: bool = False
    is_auto: bool = False
    is_mobile: bool = False
    slice_only: bool = False
    waits: bool = False
    """While nobody is there who could know the model, rather than end."""
    changes_model: bool = False
    because: str = ""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts of the peer that serving layers needs."""

    home: Home
    identity: Identity
    endpoint: Endpoint
    dht: Dht
    store: Store
    slices: Slices
    spans: SpanServer
    tasks: Tasks
    report: Report
    library: Library | None = None
    """Gets what is not on the disk; None where only what is there can be served."""
