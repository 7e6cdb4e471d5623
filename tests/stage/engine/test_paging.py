"""What is said of weights that memory has no room for, and how fast a disk is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from meshswarm.stage.engine import paging
from meshswarm.stage.engine.memory import EngineMemory
from meshswarm.stage.engine.paging import ALL_FITS, paging_of, read_speed

MEMORY = EngineMemory(weights_bytes=800, kv_bytes=100, compute_bytes=100, mapped_bytes=700)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(5 << 20))
    return path


def test_what_fits_is_not_read_again_and_no_disk_is_timed(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "read_speed", lambda path: pytest.fail("the disk was timed"))
    assert paging_of(weights, MEMORY, 1000) == ALL_FITS
    assert paging_of(weights, EngineMemory(800, 100, 100), 500) == ALL_FITS, "nothing of it is mapped"


def test_where_it_does_not_fit_all_that_is_mapped_is_read_in_every_turn(weights: Path) -> None:
    found = paging_of(weights, MEMORY, 999)
    assert found.paged_bytes == 700
    assert found.read_bytes_per_s == 0 or found.read_bytes_per_s > 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is measured")
def test_a_disk_is_read_past_the_cache_and_a_file_that_cannot_be_is_not_guessed(weights: Path) -> None:
    try:
        os.close(os.open(weights, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        assert read_speed(weights) == 0
        return
    assert 1 << 20 < read_speed(weights) < 1 << 40
    assert read_speed(weights.parent / "none") == 0
