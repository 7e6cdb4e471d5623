"""What a span takes: llama.cpp's own figures before and after, and refusals before the system has to refuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.stage.conftest import Cut
from tests.stage.tiny_models import write_tiny

from meshswarm.errors import OutOfMemoryError
from meshswarm.span import Span
from meshswarm.stage.engine.engine import SpanEngine
from meshswarm.stage.engine.llama import LlamaSpan, foreseen_memory
from meshswarm.stage.engine.llama_options import KvType, LlamaOptions
from meshswarm.stage.engine.memory import EngineMemory, Room, check_room, read_memory, room

MIB = 1 << 20
SIZES = {"n_cells": 768, "n_slots": 4, "max_rows": 128}


@pytest.mark.parametrize("model", ["llama", "gpt-oss", "qwen35moe", "deepseek4"])
def test_what_is_foreseen_is_what_is_taken(tmp_path: Path, model: str) -> None:
    path = write_tiny(model, tmp_path / "tiny.gguf")
    foreseen = foreseen_memory(path, **SIZES)
    loaded = LlamaSpan(path, **SIZES, n_threads=1)
    taken = loaded.memory
    loaded.close()
    assert taken.kv_bytes == foreseen.kv_bytes > 0
    assert taken.compute_bytes == foreseen.compute_bytes > 0
    assert abs(taken.weights_bytes - foreseen.weights_bytes) < 0.02 * MIB + foreseen.weights_bytes / 100
    assert taken.mapped_bytes == taken.weights_bytes


def test_k_and_v_of_8_bits_take_about_half(tmp_path: Path) -> None:
    path = write_tiny("llama", tmp_path / "tiny.gguf")
    wide, narrow = (
        foreseen_memory(path, **SIZES, options=LlamaOptions(type_k=kind, type_v=kind)).kv_bytes
        for kind in (KvType.F16, KvType.Q8_0)
    )
    assert narrow / wide == pytest.approx(34 / 64, abs=0.01)


def test_a_loaded_engine_says_what_it_took(tiny: Path, cut: Cut) -> None:
    engine = SpanEngine.load(cut(tiny, Span(1, 3)), Span(1, 3), 4, n_ctx=255, n_slots=2, n_threads=1)
    n_cells, n_layers, n_kv_row = 2 * 256, 2, 2 * 2 * 16
    assert engine.memory.kv_bytes == pytest.approx(2 * n_cells * n_layers * n_kv_row, abs=0.01 * MIB)
    assert engine.memory.total_bytes > engine.memory.compute_bytes > 0
    engine._computer.close()


def test_every_kind_of_buffer_is_counted_once() -> None:
    log = """load_tensors:   CPU_Mapped model buffer size =     3.00 MiB
load_tensors:   CPU_REPACK model buffer size =     2.00 MiB
llama_context:        CPU  output buffer size =     0.50 MiB
llama_kv_cache:        CPU KV buffer size =     1.50 MiB
llama_kv_cache: size =    1.50 MiB (   768 cells,   2 layers,  4/4 seqs), K (f16):    0.75 MiB, V (f16):    0.75 MiB
llama_memory_recurrent:        CPU RS buffer size =     0.25 MiB
llama_memory_recurrent: size =    0.25 MiB (     4 cells,   8 layers,  4 seqs  0 rs_seq), R (f32):    0.07 MiB
llama_dsv4_comp_state:        CPU DSV4 csa state buffer size =     0.25 MiB
llama_dsv4_comp_state: csa ratio = 4, state = 8 x 64, streams = 4, rs_seq = 0, layers = 3, size =    0.25 MiB
sched_reserve:        CPU compute buffer size =     0.75 MiB"""
    assert read_memory(log.splitlines()) == EngineMemory(5 * MIB, 2 * MIB, 5 * MIB // 4, mapped_bytes=3 * MIB)


GB = 10**9


def needs(n_sessions: int, n_ctx: int) -> EngineMemory:
    """8 sessions of 4096 positions: 4 GB of mapped weights, 8 for K and V, 1 of work space."""
    return EngineMemory(4 * GB, 8 * GB * n_sessions * n_ctx // (8 * 4096), GB * n_ctx // 4096, mapped_bytes=4 * GB)


@pytest.mark.parametrize("has", [Room(9 * GB, 13 * GB), Room(20 * GB, 20 * GB)])
def test_what_fits_is_let_through(has: Room) -> None:
    check_room(needs, has, n_sessions=8, n_ctx=4096)


@pytest.mark.parametrize(
    ("has", "advice"),
    [
        (Room(5 * GB, 64 * GB), "4 sessions of 4096 positions or 8 sessions of 2047 positions would fit, or fewer"),
        (Room(20 * GB, 7 * GB), "2 sessions of 4096 positions or 8 sessions of 1279 positions would fit, or fewer"),
        (Room(GB, 64 * GB), ". 8 sessions of 255 positions would fit, or fewer layers"),
        (Room(GB // 10, 64 * GB), "Not even short sessions would fit beside its weights, only fewer layers"),
    ],
)
def test_a_refusal_says_what_was_needed_and_what_would_fit(has: Room, advice: str) -> None:
    with pytest.raises(OutOfMemoryError) as refusal:
        check_room(needs, has, n_sessions=8, n_ctx=4096)
    assert "needs 13.0 GB of memory: 4.0 GB of weights, 8.0 GB for 8 sessions of 4096 positions" in str(refusal.value)
    assert advice in str(refusal.value)


def test_weights_that_are_not_mapped_must_be_free() -> None:
    with pytest.raises(OutOfMemoryError, match="Not even short sessions"):
        check_room(lambda *_: EngineMemory(4 * GB, GB, GB), Room(4 * GB, 64 * GB), n_sessions=1, n_ctx=4096)


def test_this_machine_has_room() -> None:
    assert 0 < room().free <= room().total


LOAD_WITH_LITTLE = """
import resource, sys
from pathlib import Path
import psutil
from meshswarm.errors import LocalError

from meshswarm.span import Span
from meshswarm.stage.engine import engine
from meshswarm.stage.engine.engine import SpanEngine
from meshswarm.stage.engine.llama import start_llama

start_llama()
if sys.argv[2] == "unchecked":
    engine.check_room = lambda *_, **__: None
used = psutil.Process().memory_info().vms
resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20),) * 2)
try:
    SpanEngine.load(Path(sys.argv[1]), Span(0, 4), 4, n_ctx=1_000_000, n_slots=4, n_threads=1)
except LocalError as error:
    print(type(error).__name__, error)
SpanEngine.load(Path(sys.argv[1]), Span(0, 4), 4, n_ctx=200, n_slots=1, n_threads=1)
print("and a small one loads")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps to RLIMIT_AS")
@pytest.mark.parametrize(
    ("how", "refusal"),
    [
        ("checked", "OutOfMemoryError this span needs 3.1 GB"),
        ("unchecked", "LlamaError llama.cpp cannot make a context"),
    ],
)
def test_a_process_that_may_take_no_more_refuses_and_lives_on(tiny: Path, how: str, refusal: str) -> None:
    """Also where the figures promised room and llama.cpp then gets none."""
    ended = subprocess.run(
        [sys.executable, "-c", LOAD_WITH_LITTLE, str(tiny), how], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    first, second = ended.stdout.splitlines()
    assert first.startswith(refusal)
    assert how == "unchecked" or "would fit, or fewer layers" in first
    assert second == "and a small one loads"
