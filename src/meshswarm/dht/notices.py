"""What a person should hear about the swarm, each thing once: in the log, as sentences.

The rule this file keeps: strangers cause most of these sentences, and keys cost them nothing. Each sort of notice has a
share, beyond which it is only said that there are more; none takes the place of another.
"""

from __future__ import annotations

import logging

MAX_OF_A_SORT = 12
_MORE = "more"

logger = logging.getLogger(__name__)


class Notices:
    """`sentences`: everything that was said, for those who look on. Sorts are this program's own words, so few."""

    def __init__(self) -> None:
        self._said: dict[str, dict[object, str]] = {}

    @property
    def sentences(self) -> list[str]:
        return [sentence for said in self._said.values() for sentence in said.values()]

    def say(self, sort: str, sentence: str, about: object = None) -> None:
        """Says `sentence` unless something of this sort was said about the same thing before, or too much of it."""
        said = self._said.setdefault(sort, {})
        if about in said or _MORE in said:
            return
        if len(said) == MAX_OF_A_SORT:
            about, sentence = _MORE, f"more of the same ({sort}) is not told one by one"
        said[about] = sentence
        logger.warning("%s", sentence)
