"""What a person should hear about the swarm, each thing once: in the log, as sentences."""

from __future__ import annotations

import logging
from collections import OrderedDict

_MAX_SAID = 256

logger = logging.getLogger(__name__)


class Notices:
    """`sentences`: everything that was said, for those who look on."""

    def __init__(self) -> None:
        self._said: OrderedDict[object, str] = OrderedDict()

    @property
    def sentences(self) -> list[str]:
        return list(self._said.values())

    def say(self, about: object, sentence: str) -> None:
        """Says `sentence` unless something was said about the same thing before."""
        if about in self._said:
            return
        self._said[about] = sentence
        if len(self._said) > _MAX_SAID:
            self._said.popitem(last=False)
        logger.warning("%s", sentence)
