"""What a server's answer to "give me bytes A to B of this file" means.

The rule this file keeps: bytes are taken only from an answer that says exactly which they are. A server that gives
other bytes than it was asked for, packs them, or has another file by now is told apart from one that is only busy.
"""

from __future__ import annotations

import email.utils
import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshswarm.artifacts.merkle import MAX_FILE_BYTES
from meshswarm.artifacts.sources.faults import (
    ChangedError,
    DeniedError,
    MissingError,
    NoRangesError,
    PassingError,
    SourceError,
)

REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
MAX_RETRY_AFTER_S = 3600.0


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as its server describes it. `length` in bytes; `etag` only where it is a strong one, quotes included;
    `modified`: the Last-Modified header; `url`: where redirects ended."""

    length: int
    etag: str | None
    modified: str | None
    accepts_ranges: bool
    url: str

    @property
    def validator(self) -> str | None:
        """What tells the server which version of the file is meant (If-Range, RFC 9110, 13.1.5)."""
        return self.etag or self.modified

    def is_same(self, other: RemoteFile) -> bool:
        """True when both are one version of a file. Without any mark of a version, equal lengths have to do."""
        if self.length != other.length:
            return False
        if self.etag is not None and other.etag is not None:
            return self.etag == other.etag
        return self.modified == other.modified


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that carries the file's bytes from `start` up to `stop`, not included."""

    file: RemoteFile
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked for: the bytes [start, stop), to the end for None, of the file `known`, or of whatever is there.

    `version`: what the file is called by somebody who knows better than the server (the hub's SHA-256); then the
    server's own marks are not looked at. `where` names the source in messages.
    """

    where: str
    start: int = 0
    stop: int | None = None
    known: RemoteFile | None = None
    version: str | None = None

    def headers(self) -> dict[str, str]:
        """What to send along."""
        asked = {
            "accept-encoding": "identity",
            "range": f"bytes={self.start}-{'' if self.stop is None else self.stop - 1}",
        }
        if self.known is not None and self.version is None and self.known.validator is not None:
            asked["if-range"] = self.known.validator
        return asked


def read_answer(question: Question, status: int, headers: Mapping[str, str], url: str) -> Answer:
    """What an answer holds. `headers` has lower-case names; `url` is where it came from.

    Raises the SourceError that says why no bytes can be taken from it.
    """
    where = question.where
    _check_status(status, headers, where)
    if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise SourceError(f"{where} packs the file ({headers['content-encoding'][:20]}), though it was asked not to")
    if status == 200:
        start, stop, length = 0, _number(headers.get("content-length")), _number(headers.get("content-length"))
    else:
        start, stop, length = _content_range(headers, where)
    if length is None or stop is None:
        raise SourceError(f"{where} does not say how long the file is")
    file = _described(length, headers, status == 206, url, question)
    if question.known is not None and not file.is_same(question.known):
        raise ChangedError(f"the file at {where} has changed")
    if status == 200 and question.start:
        raise NoRangesError(f"{where} does not give parts of a file, only all of it")
    wanted_stop = length if question.stop is None or status == 200 else min(question.stop, length)
    if start != question.start or not start < stop <= wanted_stop:
        raise SourceError(f"{where} was asked for the bytes from {question.start} and gives {start} to {stop - 1}")
    body = _number(headers.get("content-length"))
    if body is not None and body != stop - start:
        raise SourceError(f"{where} announces {body} bytes for a part of {stop - start}")
    return Answer(file, start, stop)


def _check_status(status: int, headers: Mapping[str, str], where: str) -> None:
    if status in (200, 206):
        return
    if status in _PASSING:
        why = "asks to come back later" if status in (429, 503) else "is in trouble"
        raise PassingError(f"{where} {why} (HTTP {status})", retry_after_s=_retry_after(headers))
    if status in (401, 403):
        raise DeniedError(f"{where} does not let us have the file (HTTP {status})")
    if status in (404, 410):
        raise MissingError(f"there is no file at {where} (HTTP {status})")
    if status == 416:
        raise ChangedError(f"{where} has no such bytes: its file is shorter than it was, or empty")
    raise SourceError(f"{where} answers with HTTP {status}, which is no file")


def _described(
    length: int, headers: Mapping[str, str], accepts_ranges: bool, url: str, question: Question
) -> RemoteFile:
    if not 0 < length <= MAX_FILE_BYTES:
        raise SourceError(f"{question.where} says that its file has {length} bytes: that is no model")
    if question.version is not None:
        return RemoteFile(length, question.version, None, accepts_ranges, url)
    etag = headers.get("etag", "").strip()
    is_strong = re.fullmatch(r'"[!#-~\x80-\xff]{1,200}"', etag) is not None
    modified = headers.get("last-modified", "").strip()
    is_date = len(modified) < 64 and email.utils.parsedate(modified) is not None
    return RemoteFile(length, etag if is_strong else None, modified if is_date else None, accepts_ranges, url)


def _content_range(headers: Mapping[str, str], where: str) -> tuple[int, int, int]:
    """(first byte, byte after the last, length of the file)."""
    text = headers.get("content-range", "")
    match = re.fullmatch(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})", text.strip(), re.ASCII)
    if match is None:
        raise SourceError(f"{where} gives a part of the file and does not say which: {text[:60]!r}")
    first, last, length = (int(number) for number in match.groups())
    if not first <= last < length:
        raise SourceError(f"{where} gives an impossible part of the file: {text[:60]!r}")
    return first, last + 1, length


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"\d{1,15}", text.strip(), re.ASCII) else None


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds, where the header gives seconds (a date would need the server's clock)."""
    seconds = _number(headers.get("retry-after"))
    return None if seconds is None else min(float(seconds), MAX_RETRY_AFTER_S)
