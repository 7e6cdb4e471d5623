"""`meshswarm models publish` and `models trust`: what this peer says of a model, and whose word a name is.

The rule this file keeps: nothing is said of a model that was not seen here. A remote file is streamed once, hashed, and
not kept; its header and piece layers are, so that this peer can prove them to others. Cuts and wire dtypes are those
proved on this machine or by this project's tests, never another publisher's.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshswarm.artifacts.gguf.check import GgufHeader
from meshswarm.artifacts.gguf.split import model_stem
from meshswarm.artifacts.manifests.facts import Calibration, ProvedCuts, ProvedWire, check_licence, check_source
from meshswarm.artifacts.manifests.manifest import MAX_SOURCES, Manifest, SignedManifest
from meshswarm.artifacts.manifests.trust import Manifests
from meshswarm.artifacts.merkle import Progress, model_id, model_id_text
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.artifacts.names import NAME_PATTERN, model_name
from meshswarm.artifacts.sources import Say, is_source
from meshswarm.artifacts.sources.references import is_remote
from meshswarm.artifacts.store.store import Store
from meshswarm.commands.control import find_running
from meshswarm.config import Home
from meshswarm.errors import ArtifactError, ConfigError, MeshswarmError, UnknownModelError
from meshswarm.head.vocabulary import Vocabulary
from meshswarm.identity import Identity, PeerId
from meshswarm.stage.engine.llama import numclass
from meshswarm.stage.engine.memory import room
from meshswarm.stage.families.cuts import legal_cuts
from meshswarm.stage.families.proofs import PROVED_BUILDS, Proofs, installed_build
from meshswarm.stage.proving.calibration import calibrate
from meshswarm.stage.proving.texts import PROOF_TEXTS
from meshswarm.stage.proving.verify import Material
from meshswarm.stage.proving.wire_proofs import WireProofs
from meshswarm.stage.sessions.messages import Dtype


@dataclass(frozen=True, slots=True)
class Wish:
    """What a person wants said. None: as the file says it. `is_calibrated`: measured here, if it can be."""

    name: str | None = None
    licence: str | None = None
    sources: tuple[str, ...] = ()
    is_calibrated: bool = True
    n_threads: int | None = None


def publish(home: Home, ref: str, wish: Wish, progress: Progress | None, say: Say) -> dict[str, Any]:
    """Sign a manifest for the model behind `ref` and keep it where this folder's peer serves it from. `reach` in what
    is returned: the swarm and the address of the peer that runs in the folder, None when none does.

    Raises ConfigError for wishes that cannot be, ManifestChangedError where the name is another publisher's.
    """
    _check(wish)
    store = Store(home.create().root)
    manifests = Manifests(home.root)
    identity = Identity.load_or_create(home.key)
    model, sources = _known(store, manifests, ref, progress, say)
    header = store.header(model.model_id)
    name = wish.name or model.name
    _check_name(name)
    pin = manifests.pin(name)
    before = None if pin is None or pin.publisher != identity.peer_id else pin.signed
    known = before.manifest if before is not None and before.manifest.model_id == model.model_id else None
    manifest = Manifest.of(
        model,
        header,
        store.files(model.model_id),
        number=manifests.next_number(name),
        name=name,
        licence=wish.licence,
        wire=_wire(home, model.model_id),
        cuts=_cuts(home, model.model_id, header),
        sources=tuple(dict.fromkeys((*wish.sources, *sources, *(known.sources if known else ()))))[:MAX_SOURCES],
    )
    # Before the long part: a name that is another's is not worth measuring for.
    manifests.accept(manifest.sign(identity), header=header)
    calibrations = _calibrations(home, store, model, header, wish, say) or (known.calibrations if known else ())
    if calibrations:
        manifest = replace(manifest, number=manifests.next_number(name), calibrations=calibrations)
        manifests.accept(manifest.sign(identity), header=header)
    signed = manifests.by_name(name)
    assert signed is not None
    return {**_facts_of(signed, manifests), "reach": _reach(home)}


def trust(home: Home, ref: str, publisher: str | None) -> dict[str, Any]:
    """From now on the name `ref` is the publisher's, a PeerId; None forgets whose a name is, or what a source gave.

    Raises ConfigError for what is neither.
    """
    manifests = Manifests(home.create().root)
    if is_source(ref):
        if publisher is not None:
            raise ConfigError(f"{ref[:80]} is a source, and has no publisher: forget what it gave with --forget")
        return {"source": ref, "changed": manifests.forget_source(ref)}
    _check_name(ref)
    before = manifests.pin(ref)
    if publisher is None:
        changed = manifests.forget(ref)
    else:
        try:
            peer = PeerId.parse(publisher)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        manifests.trust(ref, peer)
        changed = before is None or before.publisher != peer
    was = None if before is None else str(before.publisher)
    return {"name": ref, "publisher": publisher, "was": was, "changed": changed}


def manifest_facts(home: Home, own_id: bytes) -> dict[str, Any] | None:
    """What is published of a model, as far as it is known here; None when nothing is."""
    manifests = Manifests(home.root)
    store = Store(home.root)
    header = store.header(own_id) if store.has_header(own_id) else None
    signed = manifests.by_id(own_id, header=header)
    return None if signed is None else _facts_of(signed, manifests)


def _reach(home: Home) -> dict[str, str] | None:
    running = find_running(home)
    try:
        status = None if running is None else running.get("/meshswarm/status")
    except MeshswarmError:
        return None  # it has just ended
    return None if status is None else {"swarm": status["swarm"], "address": status["address"]}


def _facts_of(signed: SignedManifest, manifests: Manifests) -> dict[str, Any]:
    manifest = signed.manifest
    pin = manifests.pin(manifest.name)
    return {
        "name": manifest.name,
        "model_id": model_id_text(manifest.model_id),
        "publisher": str(signed.publisher),
        "is_pinned": pin is not None and pin.publisher == signed.publisher,
        "number": manifest.number,
        "bytes": manifest.n_bytes,
        "files": len(manifest.files),
        "layers": manifest.n_layers,
        "licence": manifest.licence,
        "chat_template": manifest.template_hash.hex(),
        "wire": [{"dtype": each.dtype, "hops": each.hops, "build": each.build} for each in manifest.wire],
        "cuts": [
            {"build": each.build, "numclass": each.numclass, "starts": list(each.starts)} for each in manifest.cuts
        ],
        "sources": list(manifest.sources),
        "calibrations": [
            {
                "depth": row.depth,
                "numclasses": [row.numclass, row.other],
                "h50": row.h50_ppb / 1e9,
                "h99": row.h99_ppb / 1e9,
            }
            for row in manifest.calibrations
        ],
    }


def manifest_lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The same for a person: what, and what of it."""
    owner = "" if facts["is_pinned"] else " (nobody here has asked for it by this name yet)"
    wire = ", ".join(f"{each['dtype']} over {each['hops']} hops" for each in facts["wire"])
    template = facts["chat_template"][:16]
    deepest = max(facts["calibrations"], key=lambda row: (row["depth"], row["h99"]), default=None)
    return [
        ("publisher", f"{facts['publisher']}, as {facts['name']}{owner}"),
        ("signed", _day(facts["number"])),
        ("licence", facts["licence"] or "not said"),
        ("chat", f"by the template in its file, which begins with the hash {template}" if template else "no template"),
        ("shorter rows", f"{wire}, proved to change no answer" if wire else "none proved: peers send each other f32"),
        ("also at", ", ".join(facts["sources"]) or "nowhere: only peers that hold it give it"),
        (
            "machines",
            "how far honest ones are apart was not measured"
            if deepest is None
            else f"honest ones, {deepest['depth']} layers on, are {deepest['h50']:.2%} apart in the middle and "
            f"{deepest['h99']:.2%} at most",
        ),
    ]


def show_published(facts: dict[str, Any]) -> None:
    print(f"{facts['name']} is published: {facts['layers']} layers, {facts['bytes'] / 1e6:,.0f} MB")
    print(f"id {facts['model_id']}")
    for what, words in manifest_lines(facts):
        print(f"  {what:<12} {words}")
    reach = facts["reach"] or {"swarm": "SWARM", "address": "ADDRESS"}
    swarm, address = shlex.quote(reach["swarm"]), reach["address"]
    pull = f"meshswarm models pull {facts['name']} --swarm {swarm} --join {address}"
    if facts["reach"] is None:
        print(f"Others can fetch it while a peer runs here: meshswarm serve --model {facts['name']} --swarm SWARM")
        print(f"It prints its address. Then they fetch it with: {pull}")
    else:
        print(f"Others fetch it with: {pull}")


def show_trust(told: dict[str, Any]) -> None:
    if "source" in told:
        print(f"Whatever {told['source']} gives next is right." if told["changed"] else "It never gave anything here.")
    elif told["publisher"] is None:
        print(f"The name {told['name']} is nobody's{' again' if told['changed'] else ', as it was'}.")
    else:
        was = "" if told["was"] in (None, told["publisher"]) else f", not {told['was']}'s any more"
        print(f"The name {told['name']} is {told['publisher']}'s{was}.")


def _day(number: int) -> str:
    """When, as editions published by this program are numbered by time; the number where it is none."""
    try:
        return f"on {datetime.fromtimestamp(number / 1000, UTC):%Y-%m-%d at %H:%M} UTC"
    except (OverflowError, OSError, ValueError):
        return f"as its edition {number}"


def _check(wish: Wish) -> None:
    try:
        check_licence(wish.licence or "")
        for source in wish.sources:
            check_source(source)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if wish.name is not None:
        _check_name(wish.name)


def _check_name(name: str) -> None:
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(f"{name[:80]!r} is not a model's name: 1 to 96 of a-z, 0-9, '.', '_' and '-'")


def _known(
    store: Store, manifests: Manifests, ref: str, progress: Progress | None, say: Say
) -> tuple[ModelInfo, Sequence[str]]:
    """The model whose header is proved here, streamed for that if need be, and where others may get it."""
    found = store.find_any(ref)
    if found is None and is_remote(ref):
        return _streamed(store, manifests, ref, progress, say)
    if found is None and is_source(ref):
        found = store.obtain(ref, say=say, progress=progress)
    if found is None:
        raise UnknownModelError(
            f"no model {ref[:80]!r} is known here: give a path, a URL or a stored name", param="model"
        )
    return found, [ref] if _is_public(ref) else []


def _is_public(ref: str) -> bool:
    try:
        return bool(check_source(ref))
    except ValueError:
        return False


def _streamed(
    store: Store, manifests: Manifests, ref: str, progress: Progress | None, say: Say
) -> tuple[ModelInfo, Sequence[str]]:
    """Look at all bytes of a remote model once. Its header and piece layers are kept, nothing else."""
    from meshswarm.artifacts.sources.download import hash_remote
    from meshswarm.artifacts.sources.hub_ref import hub_ref
    from meshswarm.artifacts.sources.remote import Listeners, locate
    from meshswarm.artifacts.sources.stream_hash import Hashed, proof_message

    located = locate(ref, Path())
    listeners = Listeners(progress, None)

    async def look() -> list[Hashed]:
        hashed = []
        for each in located:
            say(f"Reading {each.target.name} once to hash it; nothing of it is kept but its header")
            async with each.source as source:
                hashed.append(await hash_remote(source, progress=listeners.hear, say=say, expected=each.expected))
            listeners.next_file(hashed[-1].content.length)
        return hashed

    files = asyncio.run(look())
    own_id = model_id([(file.content.length, file.content.root) for file in files])
    manifests.note_source(ref, own_id)
    header = store.save_foreign_header(own_id, proof_message(files))
    for index, file in enumerate(files):
        store.save_piece_layer(own_id, index, file.piece_layer)
    name = model_name(model_stem(located[0].target), _general_name(header))
    hub, commit = hub_ref(ref), re.search(r"/resolve/([0-9a-f]{40})/", located[0].source.url)
    pinned = ref if hub is None or commit is None else f"hf:{hub.repo_id}/{hub.file}@{commit[1]}"
    return store.describe(own_id, name), [pinned] if _is_public(pinned) else []


def _general_name(header: GgufHeader) -> str | None:
    try:
        return header.text("general.name")
    except ArtifactError:
        return None


def _wire(home: Home, own_id: bytes) -> tuple[ProvedWire, ...]:
    proof = WireProofs(home.proofs).of(own_id)
    if proof is None:
        return ()
    narrower = [dtype for dtype in proof.proved() if dtype is not Dtype.F32]
    return tuple(ProvedWire(str(dtype), proof.hops, proof.build, proof.numclass) for dtype in narrower)


def _cuts(home: Home, own_id: bytes, header: GgufHeader) -> tuple[ProvedCuts, ...]:
    """By this project's tests on the builds they ran on, and by what was tried here on another."""
    build, here = installed_build(), Proofs.here(home.proofs, own_id, numclass())
    cuts = legal_cuts(header, here)
    if cuts.refusal is not None:
        return ()
    tried_on = "" if build in PROVED_BUILDS else numclass()
    return (ProvedCuts(build, tried_on, cuts.starts, cuts.max_ctx or 0),)


def _calibrations(
    home: Home, store: Store, model: ModelInfo, header: GgufHeader, wish: Wish, say: Say
) -> tuple[Calibration, ...]:
    """Measured here; none where that cannot be, which is said."""
    if not wish.is_calibrated:
        return ()
    if store.paths(model.model_id) is None:
        say("Not calibrated: that needs the model's file on this disk")
        return ()
    try:
        vocabulary = Vocabulary.load(header, home.vocabularies)
        prompts = [vocabulary.begin(vocabulary.encode(text)) for text in PROOF_TEXTS]
        material = Material(store.path(model.model_id), header, model.model_id, prompts)
        n_threads = wish.n_threads or max(1, (os.cpu_count() or 2) // 2)
        return asyncio.run(
            calibrate(
                material,
                model.encoding,
                folder=home.root,
                n_threads=n_threads,
                available_bytes=room().free,
                say=lambda sentence: say(f"Calibrating: {sentence}"),
            )
        )
    except MeshswarmError as error:
        say(f"Not calibrated: {error}")
        return ()
