"""What can go wrong, sorted by whose fault it is and what a person can do about it.

Every error a user, a client or another peer may see derives from `MeshswarmError`. Its message is one sentence that
says what happened, to which peer or file, and what to do; `retry_after_s` says when trying again makes sense.
Packages define their own subclasses next to the code that raises them, always below one of the classes here.

The rule this file keeps: a text that came from elsewhere (another peer, a file, a server) steers nobody's terminal and
invents no line of output.
"""

from __future__ import annotations

MAX_MESSAGE_CHARS = 4000
MAX_REMOTE_CHARS = 1000


def printable(text: str, at_most: int | None = None, *, keeps: str = "\n\t") -> str:
    """`text` as it may reach a terminal: no control or formatting character but those in `keeps`, the others as their
    escapes, and at most so many characters."""
    if at_most is not None and len(text) > at_most:
        text = f"{text[:at_most]}..."
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keeps else each.encode("unicode_escape").decode() for each in text
    )


class MeshswarmError(Exception):
    """Base of every error of this package; `str(error)` is a sentence for a person.

    Whoever's words are in `message`, it may be shown on a terminal: it is `printable`, and bounded.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(printable(message, MAX_MESSAGE_CHARS))
        self.retry_after_s = retry_after_s


class LocalError(MeshswarmError):
    """This peer's own fault: its settings, its disk, its machine."""


class ConfigError(LocalError):
    """A setting or a command-line value that cannot work."""


class OutOfMemoryError(LocalError):
    """This machine has not the memory for it; the message says what was needed, and what would fit where that is
    known."""


class RequestError(MeshswarmError):
    """The client's request cannot be served as it stands (HTTP 400 unless a subclass says otherwise)."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class UnknownModelError(RequestError):
    """No model by this name or id is known here (HTTP 404)."""


class RemoteError(MeshswarmError):
    """Another peer broke the protocol or its word. `peer` is its PeerId as text, when known. The message is one
    line."""

    def __init__(self, message: str, *, peer: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(printable(message, MAX_REMOTE_CHARS, keeps=""), retry_after_s=retry_after_s)
        self.peer = peer


class RemoteProtocolError(RemoteError):
    """A remote peer sent something the protocol does not allow."""


class PeerUnreachableError(RemoteError):
    """A peer did not answer, answered as somebody else, or went away; the message names the peer and the step."""


class RefusedError(RemoteError):
    """A peer answered in good order that it will not do this (no room, unknown span, draining)."""


class NoRouteError(MeshswarmError):
    """The swarm, as seen from here, cannot run this model now (HTTP 503). The message names the missing layers."""


class ArtifactError(MeshswarmError):
    """A model file or a slice of one is damaged, hostile, or not what its id says."""
