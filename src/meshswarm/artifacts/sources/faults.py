"""What can go wrong with a server that a model is fetched from.

The rule this file keeps: whether it makes sense to ask again is in the type, so that nobody has to read a sentence.
"""

from __future__ import annotations

from meshswarm.errors import ArtifactError


class SourceError(ArtifactError):
    """A server or a URL will not do, and asking again will not change that."""


class PassingError(SourceError):
    """It may go better soon: no answer, a connection that broke, a server that is busy."""


class StalledError(PassingError):
    """The server sends nothing, or next to nothing."""


class ChangedError(SourceError):
    """The file on the server is not the one that was begun."""


class NoRangesError(SourceError):
    """The server gives whole files only."""


class DeniedError(SourceError):
    """The server wants to know who asks, or will not give the file to us (HTTP 401, 403)."""


class MissingError(SourceError):
    """The server has no such file (HTTP 404, 410)."""
