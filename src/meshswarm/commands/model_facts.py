"""`meshswarm models show` and `models prove`: what a model is made of, where it may be cut, what it takes; proofs."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshswarm.artifacts.merkle import Progress
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.artifacts.sources import is_remote, is_source
from meshswarm.artifacts.store.store import Store
from meshswarm.commands.control import find_running
from meshswarm.commands.models import disk_facts
from meshswarm.commands.publish import manifest_facts
from meshswarm.config import Home
from meshswarm.errors import UnknownModelError
from meshswarm.head.vocabulary import Vocabulary
from meshswarm.span import Span
from meshswarm.stage.engine.llama import numclass
from meshswarm.stage.engine.llama_options import LlamaOptions
from meshswarm.stage.engine.memory import room
from meshswarm.stage.families.cuts import legal_cuts
from meshswarm.stage.families.proofs import CutProof, Proofs, installed_build, note
from meshswarm.stage.families.table import FAMILIES
from meshswarm.stage.proving.texts import PROOF_TEXTS
from meshswarm.stage.proving.verify import Material, SplitDiffersError, verify
from meshswarm.stage.proving.wire_proofs import WireProofs
from meshswarm.stage.sessions.messages import Dtype
from meshswarm.stage.sessions.rows_codec import row_bytes
from meshswarm.stage.sizes.memory import PROCESS_BYTES, Load, MemoryModel, SpanMemory
from meshswarm.stage.sizes.plan import MemoryPlan, plan_memory

_DEFAULT_OPTIONS = LlamaOptions()


@dataclass(frozen=True, slots=True)
class MemoryQuestion:
    """What memory is asked for: sessions, their positions, and peers' rooms in bytes. `n_ctx` is cut to the model's."""

    n_ctx: int
    n_sessions: int
    rooms: tuple[int, ...] = ()
    options: LlamaOptions = _DEFAULT_OPTIONS


def describe(home: Home, ref: str, question: MemoryQuestion, progress: Progress | None) -> dict[str, Any]:
    """Everything about the model behind `ref`, which is fetched if need be, from its header alone. A file that is only
    looked at is not noted in the folder."""
    store = Store(home.create().root)
    with tempfile.TemporaryDirectory() as beside:
        found = store.find_noted(ref)
        if found is None and is_source(ref) and not is_remote(ref):
            store = Store(Path(beside))
        info = found or _obtained(home, store, ref, progress)
        header, disk = store.header(info.model_id), disk_facts(home, store, info.model_id)
    proofs = Proofs.here(home.proofs, info.model_id, numclass(question.options))
    load = Load(
        min(question.n_ctx, info.n_ctx_train), question.n_sessions, question.options.type_k, question.options.type_v
    )
    model = MemoryModel(header, load, proofs=proofs)
    family = FAMILIES.get(info.architecture)
    width = info.n_embd if family is None else family.row_width(info.n_embd)
    layers = [Span(layer, layer + 1) for layer in range(info.n_layers)]
    plan = plan_memory(header, question.rooms, load, proofs=proofs) if question.rooms else None
    return {
        "name": info.name,
        "model_id": info.id_text,
        "architecture": info.architecture,
        "encoding": info.encoding,
        "layers": info.n_layers,
        "bytes": sum(info.file_lengths),
        "n_ctx": info.n_ctx_train,
        "cuts": {"starts": list(model.cuts.starts), "sentence": model.cuts.sentence},
        "layer_bytes": list(model.layer_weights),
        "outer_bytes": model.span(model.whole).weights - sum(model.layer_weights),
        "kv": {
            "token_bytes": model.token_bytes(model.whole),
            "token_bytes_by_layer": [model.token_bytes(layer) for layer in layers],
            "session_bytes": model.state_bytes(model.whole),
            "is_exact": model.is_exact,
        },
        "row_bytes": {str(dtype): row_bytes(dtype, width) for dtype in Dtype},
        "wire": _wire(home, info.model_id),
        "disk": disk,
        "manifest": manifest_facts(home, info.model_id),
        "load": {"n_ctx": load.n_ctx, "sessions": load.n_sessions},
        "whole": _memory(model.span(model.whole)),
        "plan": None if plan is None else _plan(plan),
    }


def _obtained(home: Home, store: Store, ref: str, progress: Progress | None) -> ModelInfo:
    try:
        return store.obtain(ref, progress=progress)
    except UnknownModelError as error:
        running = find_running(home)
        listed = [] if running is None else running.get("/v1/models")["data"]
        if not any(ref in (each["id"], each["meta"]["model_id"]) for each in listed):
            raise
        raise UnknownModelError(
            f"{ref[:80]} is served in the swarm but not here; `meshswarm models pull {ref[:80]}` fetches it",
            param="model",
        ) from error


def prove_model(
    home: Home, ref: str, n_threads: int | None, progress: Progress | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Prove the model behind `ref` on this machine and write down what was found. Raises MeshswarmError."""
    store = Store(home.create().root)
    info = store.obtain(ref, progress=progress)
    header = store.header(info.model_id)
    vocabulary = Vocabulary.load(header, home.vocabularies)
    prompts = [vocabulary.begin(vocabulary.encode(text)) for text in PROOF_TEXTS]
    material = Material(store.path(info.model_id), header, info.model_id, prompts)
    n_threads = n_threads or max(1, (os.cpu_count() or 2) // 2)
    try:
        verified = asyncio.run(
            verify(material, folder=home.root, n_threads=n_threads, available_bytes=room().free, say=say)
        )
    except SplitDiffersError as error:
        note(home.proofs, info.model_id, CutProof(numclass(), refusal=error.refusal))
        raise
    note(home.proofs, info.model_id, verified.cuts)
    WireProofs(home.proofs).note(info.model_id, verified.wire)
    cuts = legal_cuts(header, Proofs.here(home.proofs, info.model_id, verified.cuts.numclass))
    return {
        "name": info.name,
        "model_id": info.id_text,
        "cuts": {"starts": list(cuts.starts), "sentence": cuts.sentence},
        **_wire(home, info.model_id),
    }


def _wire(home: Home, model_id: bytes) -> dict[str, Any]:
    proof = WireProofs(home.proofs).of(model_id)
    is_current = proof is not None and proof.build == installed_build()
    proved = proof.proved() if proof is not None and is_current else (Dtype.F32,)
    return {
        "proved": [str(dtype) for dtype in proved],
        "is_current": is_current,
        "proof": None if proof is None else proof.as_json(),
    }


def _memory(memory: SpanMemory) -> dict[str, int]:
    return {**asdict(memory), "program": PROCESS_BYTES, "total": memory.total}


def _plan(plan: MemoryPlan) -> dict[str, Any]:
    spans = [
        {"peer": part.peer, "room": part.room, "layers": str(part.span), **_memory(part.memory)} for part in plan.spans
    ]
    return {"spans": spans, "refusal": plan.refusal}
