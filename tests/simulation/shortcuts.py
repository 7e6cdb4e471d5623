"""What a simulation of thousands does not compute twice, stated openly.

Pure functions are remembered: the check of one signature over certain bytes, the reading of one record's bytes and of
one address, and the reading of an answer that an honest core has just written (the object it was written from is handed
over). The
rule this file keeps: what comes out is what would have come out; every `CHECK_EVERY`th answer is read in full as well
and compared, and bytes that no core here wrote are always read in full.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from unittest import mock

from meshswarm import config
from meshswarm.dht import messages, signed, wire
from meshswarm.identity import PeerId
from meshswarm.net import admission

CHECK_EVERY = 200
_MAX_WRITTEN = 200_000


@contextlib.contextmanager
def shortcuts() -> Iterator[None]:
    """In force within the block."""
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        replace(PeerId, "verify", _remembered_verify())
        replace(signed.SignedRecord, "decode", classmethod(_remembered_decode()))
        written = _Written()
        replace(messages, "encode_found", written.encode)
        replace(messages, "decode_found", written.decode)
        for module, name in ((config, "packed_host"), (wire, "packed_host"), (wire, "_host"), (admission, "_groups")):
            function = getattr(module, name)
            replace(module, name, lru_cache(maxsize=None)(getattr(function, "__wrapped__", function)))
        yield


def _remembered_verify() -> Any:
    verify = PeerId.verify

    @lru_cache(maxsize=500_000)
    def is_signed(peer: PeerId, what: str, payload: bytes, signature: bytes) -> bool:
        return verify(peer, what, payload, signature)

    return lambda self, what, payload, signature: is_signed(self, what, payload, signature)


def _remembered_decode() -> Any:
    decode = signed.SignedRecord.decode.__func__  # type: ignore[attr-defined]

    @lru_cache(maxsize=200_000)
    def read(data: bytes) -> signed.SignedRecord:
        record: signed.SignedRecord = decode(signed.SignedRecord, data)
        return record

    return lambda _cls, data: read(data)


class _Written:
    """Answers on their way, by the bytes they were written as."""

    def __init__(self) -> None:
        self._encode = messages.encode_found
        self._decode = messages.decode_found
        self._on_the_way: OrderedDict[bytes, messages.FindAnswer] = OrderedDict()
        self._reads = 0

    def encode(self, answer: messages.FindAnswer) -> bytes:
        data = self._encode(answer)
        self._on_the_way[data] = answer
        if len(self._on_the_way) > _MAX_WRITTEN:
            self._on_the_way.popitem(last=False)
        return data

    def decode(self, data: bytes) -> messages.FindAnswer:
        answer = self._on_the_way.pop(data, None)
        self._reads += 1
        if answer is None:
            return self._decode(data)
        if self._reads % CHECK_EVERY == 0:
            assert self._decode(data) == answer, "an answer is read differently from how it was written"
        return answer
