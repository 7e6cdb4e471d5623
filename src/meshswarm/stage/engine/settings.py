"""A model's integer settings, by their names without the architecture's prefix.

The rule this file keeps: what a checked header may still hold of the wrong kind is an error that names the setting.
"""

from __future__ import annotations

from meshswarm.artifacts.gguf.check import GgufHeader, check_hyperparameters


class Settings:
    """Of one model. `n_layers` are those that compute. Methods raise ArtifactError for a setting of another kind."""

    def __init__(self, header: GgufHeader) -> None:
        shape = check_hyperparameters(header)
        self.architecture = shape.architecture
        self.n_layers = shape.n_layers
        self.n_embd = shape.n_embd
        self.n_vocab = shape.n_vocab
        self._header = header

    def has(self, name: str) -> bool:
        return self._key(name) in self._header.metadata

    def number(self, name: str, default: int) -> int:
        value = self._header.scalar(self._key(name))
        if value is None:
            return default
        if not isinstance(value, int):
            raise self._header.fault(self._key(name), "is not an integer")
        return int(value)

    def per_layer(self, name: str, default: int) -> tuple[int, ...]:
        """One value a layer, from an array or from one for all."""
        entry = self._header.metadata.get(self._key(name))
        if entry is None or not entry.is_array:
            return (self.number(name, default),) * self.n_layers
        values = self._header.numbers(entry.key)
        assert values is not None
        if len(values) < self.n_layers:
            raise self._header.fault(entry.key, f"has {len(values)} items for {self.n_layers} layers")
        return tuple(int(value) for value in values[: self.n_layers])

    def highest(self, name: str, default: int) -> int:
        """The highest value of any layer."""
        return max(self.per_layer(name, default))

    def _key(self, name: str) -> str:
        return f"{self.architecture}.{name}"
