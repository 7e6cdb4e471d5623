"""`/v1/models` and `/health`: which models there are, and whether one of them can be run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshswarm.api.failure import SERVER_ERROR, Failure
from meshswarm.head.request import ModelListing
from meshswarm.span import missing_layers


def model_object(listing: ModelListing) -> dict[str, Any]:
    return {
        "id": listing.id,
        "object": "model",
        "created": listing.created,
        "owned_by": "meshswarm",
        "meta": {
            "model_id": listing.model_id,
            "n_ctx": listing.n_ctx,
            "layers": listing.n_layers,
            "covered": [str(span) for span in listing.covered],
            "missing": [str(span) for span in missing_layers(listing.covered, listing.n_layers)],
            "holders": listing.holders,
            "ready": listing.ready,
        },
    }


def known_models(listings: Sequence[ModelListing]) -> str:
    """The names for a message."""
    return ", ".join(listing.id for listing in listings) or "none that this peer knows of"


def health_object(listings: Sequence[ModelListing]) -> tuple[int, dict[str, Any]]:
    """(HTTP status, body). It names no model: it is answered without a key. `listings`: as far as is known here, since
    no one who only looks may make this peer ask the swarm."""
    if any(listing.ready for listing in listings):
        return 200, {"status": "ok"}
    if listings:
        failure = Failure(503, "no model has all its layers served right now", SERVER_ERROR, code="no_route")
        return 503, {"status": "no route"} | failure.as_object()
    failure = Failure(503, "no model is known here yet", SERVER_ERROR, code="loading")
    return 503, {"status": "loading"} | failure.as_object()
