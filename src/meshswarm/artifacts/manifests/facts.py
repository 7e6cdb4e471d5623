"""What a publisher found out about a model and puts into its manifest: proofs, calibrations, where it can be had.

The rule this file keeps: all of it is one machine's word, shown to people and never a reason to compute otherwise.
Numbers are integers, so that the same facts are the same bytes. Values out of their limits raise ValueError.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from meshswarm.artifacts.gguf.hyperparameters import MAX_CONTEXT
from meshswarm.span import MAX_LAYERS

MAX_SOURCE_CHARS = 1024
PARTS_PER_BILLION = 1_000_000_000
MAX_ERROR_PPB = 1_000 * PARTS_PER_BILLION
_BUILD = r"[0-9A-Za-z][0-9A-Za-z.+_-]{0,31}"
_NUMCLASS = r"[a-z0-9][a-z0-9._-]{0,47}"
_ENCODING = r"[a-z0-9_]{1,16}"
_LICENCE = r"[A-Za-z0-9][A-Za-z0-9 .+()/_-]{0,63}"
_PYPI = r"pypi:[a-z0-9][a-z0-9._-]{0,63}"
_HF = (
    r"hf:[A-Za-z0-9_-][A-Za-z0-9._-]{0,95}/[A-Za-z0-9_-][A-Za-z0-9._-]{0,95}"
    r"(/[A-Za-z0-9_+-][A-Za-z0-9._+-]{0,199}){1,8}(?<=\.gguf)(@[A-Za-z0-9_][A-Za-z0-9._/-]{0,99})?"
)
_HOST = r"([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_PATH = r"(/[A-Za-z0-9._~!$&'()*+,;=:@%-]*)+"
_INNER_NAMES = (".local", ".localhost", ".internal", ".lan", ".home.arpa", ".test", ".invalid")


@dataclass(frozen=True, slots=True)
class ProvedWire:
    """Rows in `dtype` changed no more than allowed over `hops` hops, on this build and class of machines."""

    dtype: str
    hops: int
    build: str
    numclass: str

    def __post_init__(self) -> None:
        _require(re.fullmatch(r"[a-z0-9]{1,8}", self.dtype), "a strange wire dtype")
        _require(0 <= self.hops <= MAX_LAYERS, f"rows go over 0 to {MAX_LAYERS} hops")
        _check_where(self.build, self.numclass)

    def fields(self) -> list[Any]:
        return [self.dtype, self.hops, self.build, self.numclass]

    @classmethod
    def parse(cls, fields: Any) -> ProvedWire:
        return cls(*_typed(fields, str, int, str, str))


@dataclass(frozen=True, slots=True)
class ProvedCuts:
    """Spans between two of `starts` computed the whole model's bits on `build`, in sessions of up to `max_ctx`
    positions (0: of any length). `numclass` empty: on every machine with it, by the tests of this project."""

    build: str
    numclass: str
    starts: tuple[int, ...]
    max_ctx: int = 0

    def __post_init__(self) -> None:
        _require(1 <= len(self.starts) <= MAX_LAYERS and self.starts[0] == 0, "cuts begin with layer 0")
        _require(all(0 <= start < MAX_LAYERS for start in self.starts), "a cut before a layer that cannot be")
        _require(list(self.starts) == sorted(set(self.starts)), "cuts are in order")
        _require(0 <= self.max_ctx <= MAX_CONTEXT, f"a session has up to {MAX_CONTEXT} positions")
        _check_where(self.build, self.numclass or "any")

    def fields(self) -> list[Any]:
        return [self.build, self.numclass, list(self.starts), self.max_ctx]

    @classmethod
    def parse(cls, fields: Any) -> ProvedCuts:
        build, numclass, starts, max_ctx = _typed(fields, str, str, list, int)
        return cls(build, numclass, tuple(_typed(starts, *[int] * len(starts))), max_ctx)


@dataclass(frozen=True, slots=True)
class Calibration:
    """How far honest computations of the same rows through `depth` layers are apart, between two classes of machines.

    The error of a position is |y - y'| / |y'| over its row; `h50_ppb` and `h99_ppb` are its median and the largest but
    one in a hundred, in parts per billion, over `n_positions` positions. `encoding`: how most weights are stored.
    """

    depth: int
    encoding: str
    numclass: str
    other: str
    n_positions: int
    h50_ppb: int
    h99_ppb: int

    def __post_init__(self) -> None:
        _require(1 <= self.depth <= MAX_LAYERS, f"a depth is 1 to {MAX_LAYERS} layers")
        _require(re.fullmatch(_ENCODING, self.encoding), "a strange encoding")
        _require(re.fullmatch(_NUMCLASS, self.numclass) and re.fullmatch(_NUMCLASS, self.other), "a strange numclass")
        _require(1 <= self.n_positions <= 1 << 32, "a calibration is of 1 position or more")
        _require(0 <= self.h50_ppb <= self.h99_ppb <= MAX_ERROR_PPB, "quantiles that cannot be")

    def fields(self) -> list[Any]:
        quantiles = [self.h50_ppb, self.h99_ppb]
        return [self.depth, self.encoding, self.numclass, self.other, self.n_positions, *quantiles]

    @classmethod
    def parse(cls, fields: Any) -> Calibration:
        return cls(*_typed(fields, int, str, str, str, int, int, int))


def check_licence(licence: str) -> str:
    """Raises ValueError for what is no licence's name; empty stands for none said."""
    _require(
        not licence or re.fullmatch(_LICENCE, licence), "a licence is up to 64 plain letters, an SPDX name at best"
    )
    return licence


def clean_licence(said: str | None) -> str:
    """What a header says (`general.license`): a licence's name, `other` where it is none, empty where it is silent."""
    text = (said or "").strip()
    return text if re.fullmatch(_LICENCE, text) else "other" if text else ""


def check_source(text: str) -> str:
    """Where anybody may get the model: `pypi:NAME`, `hf:OWNER/REPO/FILE.gguf[@REVISION]` or an `https:` URL of a public
    host.

    Raises ValueError, with a sentence for a person, for anything else: a URL with a password, a port or a query, which
    may hold a secret; one of an inner network, which a stranger has no business to send this peer to.
    """
    if len(text) > MAX_SOURCE_CHARS:
        raise ValueError(f"a source is at most {MAX_SOURCE_CHARS} characters long")
    if re.fullmatch(_PYPI, text):
        return text
    if re.fullmatch(_HF, text) and ".." not in text:
        return text
    if text.startswith("https:") and _is_public_url(text):
        return text
    raise ValueError(
        f"{text[:80]!r} is no source that others can use: write pypi:NAME, hf:OWNER/REPO/FILE.gguf or "
        "https://HOST/PATH of a public host, without password, port, query or fragment"
    )


def _is_public_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    host = parts.netloc
    if f"https://{host}{parts.path}" != text or not re.fullmatch(_PATH, parts.path):
        return False
    if any(part in (".", "..") for part in parts.path.split("/")):
        return False
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        is_number = re.fullmatch(r"[0-9.]+|0x.*", host.rpartition(".")[2]) is not None
        return re.fullmatch(_HOST, host) is not None and len(host) <= 253 and not is_number and not _is_inner(host)


def _is_inner(host: str) -> bool:
    return any(f".{host}".endswith(name) for name in _INNER_NAMES)


def _check_where(build: str, numclass: str) -> None:
    _require(re.fullmatch(_BUILD, build), "a strange build of llama.cpp")
    _require(re.fullmatch(_NUMCLASS, numclass), "a strange numclass")


def _typed(fields: Any, *types: type) -> Sequence[Any]:
    """The fields, each of exactly its type. Raises ValueError."""
    if not isinstance(fields, list) or len(fields) != len(types):
        raise ValueError(f"{len(types)} fields are needed")
    if not all(type(value) is kind for value, kind in zip(fields, types, strict=True)):
        raise ValueError("a field is of the wrong type")
    return fields


def _require(condition: object, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)
