"""Getting manifests from peers: any holder serves those it has, whoever signed them.

The rule this file keeps: a holder is a courier and nothing more. What it brings is checked as if it came from nobody; a
liar is passed over; and a name is given to a publisher only when all who were asked name the same one, unless a person
has pinned it before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from meshswarm.artifacts.manifests.manifest import MAX_MANIFEST_BYTES, SignedManifest
from meshswarm.artifacts.manifests.trust import ManifestChangedError, Manifests
from meshswarm.artifacts.merkle import HASH_BYTES, model_id_text
from meshswarm.artifacts.names import MAX_NAME_CHARS, NAME_PATTERN
from meshswarm.artifacts.store.store import Store
from meshswarm.config import Address
from meshswarm.errors import (
    ArtifactError,
    MeshswarmError,
    PeerUnreachableError,
    RefusedError,
    RemoteProtocolError,
    UnknownModelError,
)
from meshswarm.identity import PeerId
from meshswarm.net.endpoint import Endpoint

MANIFEST_REQUEST = "model/manifest"
ANSWER_TIMEOUT_S = 5.0
MAX_ASKED = 8
"""Holders, at the same time."""
_BY_ID, _BY_NAME = b"\0", b"\1"
_MAX_QUESTION_BYTES = 1 + MAX_NAME_CHARS
Holder = tuple[PeerId, tuple[Address, ...]]


def offer_manifests(endpoint: Endpoint, manifests: Manifests) -> None:
    """Answer other peers' questions for manifests, by name or by id."""

    async def answer(peer: PeerId, request: bytes) -> bytes:
        kind, what = request[:1], request[1:]
        if kind == _BY_ID and len(what) == HASH_BYTES:
            signed = await asyncio.to_thread(manifests.by_id, what)
        elif kind == _BY_NAME and NAME_PATTERN.fullmatch(what.decode("ascii", "replace")):
            signed = await asyncio.to_thread(manifests.by_name, what.decode("ascii"))
        else:
            raise RemoteProtocolError("a manifest was asked for by neither a name nor an id", peer=str(peer))
        if signed is None:
            raise RefusedError("this peer has no such manifest", peer=str(endpoint.peer_id))
        return signed.wire

    endpoint.handle_request(
        MANIFEST_REQUEST, answer, max_request_bytes=_MAX_QUESTION_BYTES, max_reply_bytes=MAX_MANIFEST_BYTES
    )


async def fetch_manifest_of(
    endpoint: Endpoint, manifests: Manifests, store: Store, model_id: bytes, holders: Sequence[Holder]
) -> SignedManifest:
    """What publishers say of a model, from up to `MAX_ASKED` of `holders`; kept, but no name gets a meaning by it.

    A manifest that the model's proved header contradicts is passed over. Raises the last holder's error where none
    has one.
    """
    header = None
    if await asyncio.to_thread(store.has_header, model_id):
        header = await asyncio.to_thread(store.header, model_id)
    failure: MeshswarmError = PeerUnreachableError(f"nobody who was asked has a manifest of {model_id_text(model_id)}")
    for answer in await _ask(endpoint, _BY_ID + model_id, holders):
        if isinstance(answer, MeshswarmError):
            failure = answer
        elif answer.manifest.model_id != model_id:
            failure = RemoteProtocolError("a peer answered with the manifest of another model")
        else:
            try:
                await asyncio.to_thread(manifests.keep, answer, header=header)
            except ArtifactError as error:
                failure = error
    signed = await asyncio.to_thread(manifests.by_id, model_id, header=header)
    if signed is None:
        raise failure
    return signed


async def fetch_manifest_named(
    endpoint: Endpoint,
    manifests: Manifests,
    store: Store,
    name: str,
    holders: Sequence[Holder],
    *,
    model_id: bytes | None = None,
) -> SignedManifest:
    """The newest manifest under `name`, from up to `MAX_ASKED` of `holders`, which is what the name means from now on.
    `model_id`: what the swarm otherwise means by the name, where that is known.

    Raises ManifestChangedError when only others than its known publisher claim the name, or when several do and none
    is known, or when an unknown one says that it is another model; UnknownModelError when nobody who was asked has such
    a manifest.
    """
    answers = await _ask(endpoint, _BY_NAME + name.encode(), holders)
    named = [each for each in answers if isinstance(each, SignedManifest) and each.manifest.name == name]
    pin = await asyncio.to_thread(manifests.pin, name)
    owned = named if pin is None else [each for each in named if each.publisher == pin.publisher]
    publishers = sorted({str(each.publisher) for each in owned})
    if len(publishers) > 1:
        raise ManifestChangedError(
            f"several publishers claim the name {name}: {', '.join(publishers)}. Say whom you mean with "
            f"`meshswarm models trust {name} PUBLISHER`, or name the model by its id"
        )
    if pin is None:
        for signed in owned:
            if model_id is not None and model_id != signed.manifest.model_id:
                raise _another(signed, model_id)
    failure: MeshswarmError = UnknownModelError(f"nobody who was asked has a manifest named {name}", param="model")
    for signed in sorted(owned or named, key=lambda each: each.manifest.number, reverse=True):
        try:
            return await asyncio.to_thread(_accept, manifests, store, signed)
        except ManifestChangedError:
            raise
        except ArtifactError as error:
            failure = error
    if pin is not None and pin.signed is not None:
        return pin.signed
    raise failure


def _another(signed: SignedManifest, model_id: bytes) -> ManifestChangedError:
    name = signed.manifest.name
    return ManifestChangedError(
        f"the publisher {signed.publisher} says that {name} is {model_id_text(signed.manifest.model_id)}; here it is "
        f"served as {model_id_text(model_id)}. Name it by its id, or say that you believe him with "
        f"`meshswarm models trust {name} {signed.publisher}`"
    )


def _accept(manifests: Manifests, store: Store, signed: SignedManifest) -> SignedManifest:
    model_id = signed.manifest.model_id
    return manifests.accept(signed, header=store.header(model_id) if store.has_header(model_id) else None)


async def _ask(endpoint: Endpoint, question: bytes, holders: Sequence[Holder]) -> list[SignedManifest | MeshswarmError]:
    """Each holder's answer, or why there is none. Nobody is waited for longer than `ANSWER_TIMEOUT_S`."""
    others = [holder for holder in dict(holders).items() if holder[0] != endpoint.peer_id]
    return list(await asyncio.gather(*(_ask_one(endpoint, question, *holder) for holder in others[:MAX_ASKED])))


async def _ask_one(
    endpoint: Endpoint, question: bytes, peer: PeerId, addresses: tuple[Address, ...]
) -> SignedManifest | MeshswarmError:
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            connection = await endpoint.dial(peer, addresses)
            wire = await connection.request(
                MANIFEST_REQUEST, question, timeout_s=ANSWER_TIMEOUT_S, max_reply_bytes=MAX_MANIFEST_BYTES
            )
        return SignedManifest.parse(wire)
    except TimeoutError:
        return PeerUnreachableError(f"peer {peer.short} kept a question for a manifest waiting", peer=str(peer))
    except MeshswarmError as error:
        return error
