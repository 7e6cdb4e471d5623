"""A back-end is chosen where its tools and a GPU are there, and said no to with what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import backends
import pytest
from backends import Backend, Machine, choose

NVCC = "/usr/local/cuda/bin/nvcc"
VULKAN: dict[str, Any] = {"glslc": "/usr/bin/glslc", "has_vulkan_headers": True}


@pytest.mark.parametrize(
    ("machine", "expected", "arguments"),
    [
        (Machine("Linux"), Backend.CPU, ""),
        (Machine("Linux", nvcc=NVCC, has_nvidia_gpu=True), Backend.CUDA, "-DGGML_CUDA=ON"),
        (Machine("Linux", nvcc=NVCC), Backend.CPU, ""),  # a tool kit without a GPU: a build machine
        (Machine("Linux", has_nvidia_gpu=True), Backend.CPU, ""),
        (Machine("Linux", has_nvidia_gpu=True, has_render_node=True, **VULKAN), Backend.VULKAN, "-DGGML_VULKAN=ON"),
        (
            Machine("Linux", nvcc=NVCC, has_nvidia_gpu=True, has_render_node=True, **VULKAN),
            Backend.CUDA,
            "-DGGML_CUDA=ON",
        ),
        (Machine("Linux", hipcc="/opt/rocm/bin/hipcc", has_amd_gpu=True), Backend.ROCM, "-DGGML_HIP=ON"),
        (Machine("Linux", has_render_node=True, glslc="/usr/bin/glslc"), Backend.CPU, ""),
        (Machine("Linux", **VULKAN), Backend.CPU, ""),
        (Machine("Darwin"), Backend.METAL, ""),
    ],
)
def test_what_the_machine_has_decides(machine: Machine, expected: Backend, arguments: str) -> None:
    choice = choose(machine, "auto")
    assert (choice.backend, choice.cmake_arguments) == (expected, arguments)
    assert choice.why


def test_a_gpu_without_its_tools_is_told_what_to_install() -> None:
    why = choose(Machine("Linux", has_nvidia_gpu=True, has_render_node=True), "auto").why
    assert "cuda needs the CUDA tool kit" in why and "vulkan needs glslc" in why


@pytest.mark.parametrize("backend", Backend)
def test_a_named_back_end_needs_its_tools_but_no_gpu(backend: Backend) -> None:
    tools = Machine("Darwin" if backend is Backend.METAL else "Linux", nvcc=NVCC, hipcc="/opt/rocm/bin/hipcc", **VULKAN)
    assert choose(tools, backend.value).backend is backend
    if backend is not Backend.CPU:
        with pytest.raises(ValueError, match=f"MESHSWARM_BACKEND={backend.value} needs"):
            choose(Machine("Linux"), backend.value)


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(ValueError, match="auto, cpu, cuda, metal, vulkan, rocm, not 'opencl'"):
        choose(Machine("Linux"), "opencl")


def test_compilers_are_named_to_the_build(tmp_path: Path) -> None:
    assert choose(Machine("Linux", nvcc=NVCC), "cuda").environment == {"CUDACXX": NVCC}
    hipcc = str(tmp_path / "rocm/bin/hipcc")
    assert choose(Machine("Linux", hipcc=hipcc), "rocm").environment["HIPCXX"] == str(
        tmp_path / "rocm/llvm/bin/clang++"
    )


def program(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_the_machine_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "kit"))
    for name in ("CUDA_PATH", "ROCM_PATH", "VULKAN_SDK"):
        monkeypatch.delenv(name, raising=False)
    program(tmp_path / "bin", "nvidia-smi", "echo 'GPU 0: a card (UUID: GPU-1)'")
    program(tmp_path / "bin", "glslc", "true")
    (tmp_path / "kit").mkdir()
    program(tmp_path / "kit/bin", "nvcc", "true")
    machine = backends.look()
    assert machine.has_nvidia_gpu and machine.nvcc == str(tmp_path / "kit/bin/nvcc")
    assert machine.glslc == str(tmp_path / "bin/glslc")


@pytest.mark.parametrize("body", ["echo 'No devices were found'", "exit 9", "echo 'GPU 0'; exit 1"])
def test_a_driver_without_a_card_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    program(tmp_path / "bin", "nvidia-smi", body)
    assert not backends.look().has_nvidia_gpu
