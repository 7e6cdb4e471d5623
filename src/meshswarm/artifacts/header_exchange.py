"""Getting a model's header (its vocabulary, its chat template) from a peer that holds the model.

A head needs no weights to talk to a model, only these few megabytes; every block of them is checked against the model
id before anything is parsed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from meshswarm.artifacts.header_proof import MAX_MESSAGE_BYTES
from meshswarm.artifacts.merkle import HASH_BYTES, model_id_text
from meshswarm.artifacts.store.store import Store
from meshswarm.config import Address
from meshswarm.errors import ArtifactError, MeshswarmError, PeerUnreachableError, RefusedError, RemoteProtocolError
from meshswarm.identity import PeerId
from meshswarm.net.endpoint import Endpoint

HEADER_REQUEST = "model/header"
FETCH_TIMEOUT_S = 60.0
PATIENCE_S = 2.0
"""A holder that has not answered for so long may still do so, but the next one is asked as well."""
MAX_ASKED = 6
"""At the same time: what holders send is in memory until it can be checked, up to 65 MiB each."""


def offer_headers(endpoint: Endpoint, store: Store) -> None:
    """Answer other peers' requests for the headers of models in `store`."""

    async def answer(peer: PeerId, request: bytes) -> bytes:
        if len(request) != HASH_BYTES:
            raise RemoteProtocolError("a header was asked for by something that is not a model id", peer=str(peer))
        if not await asyncio.to_thread(store.has_header, request):
            raise RefusedError("this peer does not hold that model", peer=str(endpoint.peer_id))
        return await asyncio.to_thread(store.header_proof, request)

    endpoint.handle_request(HEADER_REQUEST, answer, max_request_bytes=HASH_BYTES, max_reply_bytes=MAX_MESSAGE_BYTES)


async def fetch_header(
    endpoint: Endpoint, store: Store, model_id: bytes, holders: Sequence[tuple[PeerId, tuple[Address, ...]]]
) -> None:
    """Fetch the header of `model_id` from the first holder that gives the right one, and keep it in `store`.

    Holders are asked in turn, the next as soon as one fails or keeps us waiting; who has done so longest is given up
    for the next where many do. Raises the last one's error when none gives it; a holder that lies is only passed over.
    """
    failure: MeshswarmError = PeerUnreachableError(
        f"no peer is known that holds the model {model_id_text(model_id)}, so its vocabulary cannot be fetched"
    )
    waiting = deque(holders)
    asked: list[asyncio.Task[MeshswarmError | None]] = []  # the first since longest
    try:
        while waiting or asked:
            if waiting:
                if len(asked) == MAX_ASKED:
                    given_up = asked.pop(0)
                    given_up.cancel()
                    await asyncio.wait([given_up])
                asked.append(asyncio.create_task(_fetch_from(endpoint, store, model_id, *waiting.popleft())))
            patience_s = PATIENCE_S if waiting else None
            done, _ = await asyncio.wait(asked, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            asked = [task for task in asked if task not in done]
            for task in done:
                error = task.result()
                if error is None:
                    return
                failure = error
    finally:
        for task in asked:
            task.cancel()
    raise failure


async def _fetch_from(
    endpoint: Endpoint, store: Store, model_id: bytes, peer: PeerId, addresses: tuple[Address, ...]
) -> MeshswarmError | None:
    """Why this holder did not give the right header; None when it did, and `store` keeps it."""
    try:
        connection = await endpoint.dial(peer, addresses)
        message = await connection.request(
            HEADER_REQUEST, model_id, timeout_s=FETCH_TIMEOUT_S, max_reply_bytes=MAX_MESSAGE_BYTES
        )
        await asyncio.to_thread(store.save_foreign_header, model_id, message)
    except ArtifactError as error:
        return RemoteProtocolError(f"peer {peer.short}: {error}", peer=str(peer))
    except MeshswarmError as error:
        return error
    return None
