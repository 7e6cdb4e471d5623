"""What a peer has loaded, and what an OPEN may ask of it.

The rule this file keeps: whether a session's terms can be met follows from the OPEN and from what is loaded alone; who
else is here, and whether there is room, is the server's to say.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshswarm.span import Span
from meshswarm.stage.engine.engine import SpanEngine
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.sessions.messages import MAX_TOP_K, Open, RefusalReason, Refused, Returns


@dataclass(frozen=True, slots=True)
class Served:
    """The slice this peer has loaded. `is_whole_only`: no session may enter or leave it between its ends."""

    model_id: bytes
    n_layers: int
    span: Span
    slice_root: bytes
    engine: SpanEngine
    n_ctx: int
    window: int
    is_whole_only: bool = False


def terms_refusal(served: Served | None, opening: Open) -> Refused | None:
    """Why the terms of this OPEN cannot be met by what is loaded, or None."""
    if served is None or opening.model_id != served.model_id or opening.n_layers != served.n_layers:
        return Refused(RefusalReason.UNKNOWN_SPAN, "this model is not served here", 0)
    span = opening.span
    if served.is_whole_only and span != served.span:
        why = f"a part of a model is not computed here, on {served.engine.numclass}"
        return Refused(RefusalReason.UNKNOWN_SPAN, why, 0)
    if span.start != served.span.start or span.stop > served.span.stop:
        return Refused(RefusalReason.UNKNOWN_SPAN, f"layers {served.span} are served here, not {span}", 0)
    is_last = span.stop == served.n_layers
    if is_last != (opening.returns is Returns.LOGITS) or is_last != (opening.next is None):
        return Refused(RefusalReason.UNSUPPORTED, "only the last span returns logits to the head", 0)
    if (span.start == 0) != (opening.previous is None):
        return Refused(RefusalReason.UNSUPPORTED, "only the first span takes its rows from the head", 0)
    if not 2 <= opening.n_ctx <= served.n_ctx:
        return Refused(RefusalReason.CONTEXT, f"sessions may use up to {served.n_ctx} positions here", 0)
    if not 1 <= opening.top_k <= MAX_TOP_K:
        return Refused(RefusalReason.UNSUPPORTED, f"top_k {opening.top_k}", 0)
    if opening.profile is Profile.EXACT and served.engine.exact_obstacle is not None:
        return Refused(RefusalReason.UNSUPPORTED, served.engine.exact_obstacle, 0)
    return None
