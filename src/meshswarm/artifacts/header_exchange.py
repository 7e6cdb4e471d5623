"""Getting a model's header (its vocabulary, its chat template) from a peer that holds the model.

A head needs no weights to talk to a model, only these few megabytes; every block of them is checked against the model
id before anything is parsed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from meshswarm.artifacts.header_proof import MAX_MESSAGE_BYTES
from meshswarm.artifacts.merkle import HASH_BYTES, model_id_text
from meshswarm.artifacts.store import Store
from meshswarm.config import Address
from meshswarm.errors import ArtifactError, MeshswarmError, PeerUnreachableError, RefusedError, RemoteProtocolError
from meshswarm.identity import PeerId
from meshswarm.net.endpoint import Endpoint

HEADER_REQUEST = "model/header"
FETCH_TIMEOUT_S = 60.0


def offer_headers(endpoint: Endpoint, store: Store) -> None:
    """Answer other peers' requests for the headers of models in `store`."""

    async def answer(peer: PeerId, request: bytes) -> bytes:
        if len(request) != HASH_BYTES:
            raise RemoteProtocolError("a header was asked for by something that is not a model id", peer=str(peer))
        if not store.has_header(request):
            raise RefusedError("this peer does not hold that model", peer=str(endpoint.peer_id))
        return await asyncio.to_thread(store.header_proof, request)

    endpoint.handle_request(HEADER_REQUEST, answer, max_request_bytes=HASH_BYTES, max_reply_bytes=MAX_MESSAGE_BYTES)


async def fetch_header(
    endpoint: Endpoint, store: Store, model_id: bytes, holders: Sequence[tuple[PeerId, tuple[Address, ...]]]
) -> None:
    """Fetch the header of `model_id` from the first holder that gives the right one, and keep it in `store`.

    Raises the last holder's error when none does; a holder that lies is only passed over.
    """
    failure: MeshswarmError = PeerUnreachableError(
        f"no peer is known that holds the model {model_id_text(model_id)}, so its vocabulary cannot be fetched"
    )
    for peer, addresses in holders:
        try:
            connection = await endpoint.dial(peer, addresses)
            message = await connection.request(
                HEADER_REQUEST, model_id, timeout_s=FETCH_TIMEOUT_S, max_reply_bytes=MAX_MESSAGE_BYTES
            )
            await asyncio.to_thread(store.save_foreign_header, model_id, message)
        except ArtifactError as error:
            failure = RemoteProtocolError(f"peer {peer.short}: {error}", peer=str(peer))
        except MeshswarmError as error:
            failure = error
        else:
            return
    raise failure
