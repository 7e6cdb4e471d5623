"""Layers go where they fit, and a part of a model never to a back-end on which parts were not proved.

The GPUs here are data: no test of this file has computed on one. The CPU is the real one.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshswarm.errors import ConfigError
from meshswarm.stage.engine.devices import (
    COMPUTE_BYTES,
    ON_CPU,
    Device,
    DeviceKind,
    Offload,
    device_pointers,
    gpus,
    list_devices,
    memory_beside,
    plan_offload,
)
from meshswarm.stage.engine.llama import LlamaSpan, numclass
from meshswarm.stage.engine.llama_options import LlamaOptions, SplitMode

GB = 10**9
CPU = Device(0, "CPU", "a processor", "CPU", DeviceKind.CPU, 8 * GB, 16 * GB)


def card(index: int, backend: str = "CUDA", free_gb: float = 24, kind: DeviceKind = DeviceKind.GPU) -> Device:
    return Device(index, f"{backend}{index}", "a card", backend, kind, int(free_gb * GB), 24 * GB)


def plan(devices: list[Device], *, is_whole: bool = True, n_layers: int = 10, **options: Any) -> Offload:
    layers, output = [GB] * n_layers, 2 * GB
    return plan_offload(devices, LlamaOptions(**options), is_whole=is_whole, layer_bytes=layers, output_bytes=output)


def test_the_processor_is_seen_with_its_memory() -> None:
    cpu = next(device for device in list_devices() if device.kind is DeviceKind.CPU)
    assert cpu.backend == "CPU" and cpu.is_proved and cpu.name
    assert 0 < cpu.free_bytes <= cpu.total_bytes
    if hasattr(os, "sysconf"):
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        assert cpu.total_bytes == pytest.approx(physical, rel=0.05)


def test_pointers_end_with_null() -> None:
    pointers = device_pointers(list_devices()[:1])
    assert len(pointers) == 2 and pointers[0] and pointers[1] is None
    assert list(device_pointers(())) == [None]


def test_dedicated_cards_of_one_backend_come_first() -> None:
    integrated = card(3, "Vulkan", kind=DeviceKind.INTEGRATED_GPU)
    assert gpus([CPU, integrated, card(1), card(2, "Vulkan"), card(4)]) == (card(1), card(4))
    assert gpus([CPU, integrated]) == (integrated,)
    assert gpus([CPU]) == ()


@pytest.mark.parametrize(("platform", "expected"), [("linux", 30 * GB), ("darwin", 0)])
def test_memory_that_a_gpu_shares_with_the_machine_is_not_counted_twice(
    platform: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    cards = [CPU, card(1, free_gb=20), card(2, free_gb=10)]
    assert memory_beside(cards, LlamaOptions()) == expected
    assert memory_beside(cards, LlamaOptions(n_gpu_layers=0)) == 0
    assert memory_beside([CPU, card(1, kind=DeviceKind.INTEGRATED_GPU)], LlamaOptions()) == 0
    assert memory_beside([CPU], LlamaOptions()) == 0


def test_without_a_gpu_all_is_on_the_processor() -> None:
    assert plan([CPU]) == ON_CPU
    assert plan([CPU], n_gpu_layers=0) == ON_CPU
    assert ON_CPU.is_proved and ON_CPU.backend == "CPU"
    with pytest.raises(ConfigError, match="sees no GPU"):
        plan([CPU], n_gpu_layers=5)


@pytest.mark.parametrize(
    ("free_gb", "expected"),
    [
        (24, 11),
        (0.4, 0),
        (2.9, 1),
        ((5.5 * GB + COMPUTE_BYTES) / GB / 0.9, 4),
        ((12 * GB + COMPUTE_BYTES) / GB / 0.9, 11),
    ],
)
def test_the_output_head_and_the_last_layers_go_to_the_gpu_as_far_as_they_fit(free_gb: float, expected: int) -> None:
    assert plan([CPU, card(1, free_gb=free_gb + 1e-6)]).n_gpu_layers == expected


def test_several_cards_share() -> None:
    offload = plan([CPU, card(1, free_gb=5), card(2, free_gb=5)])
    assert offload.devices == (card(1, free_gb=5), card(2, free_gb=5))
    assert offload.n_gpu_layers == 1 + (int(10 * 0.9 * GB) - 2 * COMPUTE_BYTES - 2 * GB) // GB


def test_one_card_can_be_chosen() -> None:
    cards = [CPU, card(1), card(2)]
    assert plan(cards, split_mode=SplitMode.NONE, main_gpu=1).devices == (card(2),)
    with pytest.raises(ConfigError, match="no GPU 2"):
        plan(cards, split_mode=SplitMode.NONE, main_gpu=2)


def test_what_a_person_asks_for_is_done() -> None:
    assert plan([CPU, card(1, free_gb=1)], n_gpu_layers=7).n_gpu_layers == 7
    assert plan([CPU, card(1)], n_gpu_layers=-1).n_gpu_layers == 11
    assert plan([CPU, card(1)], n_gpu_layers=99).n_gpu_layers == 11
    assert plan([CPU, card(1)], n_gpu_layers=0) == ON_CPU


@pytest.mark.parametrize("backend", ["CUDA", "Metal", "Vulkan", "ROCm"])
def test_a_part_of_a_model_stays_on_a_proved_backend(backend: str) -> None:
    assert plan([CPU, card(1, backend)], is_whole=False) == ON_CPU
    with pytest.raises(ConfigError, match=f"not computed on {backend}"):
        plan([CPU, card(1, backend)], is_whole=False, n_gpu_layers=4)
    whole = plan([CPU, card(1, backend)])
    assert whole.n_gpu_layers == 11 and not whole.is_proved and whole.backend == backend


def test_a_back_end_on_which_nothing_was_proved_says_so_in_its_name() -> None:
    unproved = numclass(offload=Offload((card(1),), 5))
    assert re.fullmatch(r"cuda-unproved-[0-9a-f]{12}", unproved)
    assert unproved != numclass(offload=Offload((card(1),), 4))
    assert numclass(offload=ON_CPU).startswith("cpu-")
    obstacle = Offload((card(1),), 5).exact_obstacle()
    assert obstacle is not None and "CUDA" in obstacle
    assert ON_CPU.exact_obstacle() is None


def test_layers_are_computed_on_the_device_they_are_given_to(tiny: Path) -> None:
    """The one device that is everywhere: the processor, named as the one to offload to."""
    cpu = next(device for device in list_devices() if device.kind is DeviceKind.CPU)
    found = []
    for offload in (ON_CPU, Offload((cpu,), 5)):
        llama = LlamaSpan(tiny, n_cells=256, n_slots=1, n_threads=1, max_rows=8, offload=offload)
        llama.tokens[:8], llama.positions[:8], llama.slots[:8], llama.wanted[:8] = range(8), range(8), 0, 1
        llama.tap.start(8)
        assert llama.decode(8) == 0
        found.append(llama.logits(8).copy())
        llama.close()
    assert np.array_equal(*found)
