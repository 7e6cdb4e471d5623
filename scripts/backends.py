"""Which back-end llama.cpp is compiled for: found out from the machine, or named with MESHSWARM_BACKEND.

The rule this file keeps: a GPU back-end is chosen by itself only where its tools and a GPU are both there, since the
build takes long and its wheel serves nothing else. Only the standard library is used, as in all of the set-up.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

VARIABLE = "MESHSWARM_BACKEND"


class Backend(Enum):
    CPU = "cpu"
    CUDA = "cuda"
    METAL = "metal"
    VULKAN = "vulkan"
    ROCM = "rocm"


@dataclass(frozen=True)
class Machine:
    """What was found: paths of compilers, None where they are not, and whether a GPU of that kind shows itself."""

    system: str
    nvcc: str | None = None
    has_nvidia_gpu: bool = False
    hipcc: str | None = None
    has_amd_gpu: bool = False
    glslc: str | None = None
    has_vulkan_headers: bool = False
    has_render_node: bool = False


@dataclass(frozen=True)
class Choice:
    """`why` is a sentence for a person. `environment` is added to what the build is given."""

    backend: Backend
    why: str
    cmake_arguments: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def choose(machine: Machine, wanted: str) -> Choice:
    """The back-end for `wanted`: the name of one, or "auto". Raises ValueError with a sentence for a person."""
    if wanted == "auto":
        return _automatic(machine)
    try:
        backend = Backend(wanted)
    except ValueError:
        names = ", ".join(each.value for each in Backend)
        raise ValueError(f"{VARIABLE} is auto, {names}, not {wanted!r}") from None
    missing = _missing_tools(machine, backend)
    if missing:
        raise ValueError(f"{VARIABLE}={wanted} needs {missing}")
    return _choice(machine, backend, f"{VARIABLE} asks for {backend.value}")


def _automatic(machine: Machine) -> Choice:
    shown = {
        Backend.METAL: machine.system == "Darwin",
        Backend.CUDA: machine.has_nvidia_gpu,
        Backend.ROCM: machine.has_amd_gpu,
        Backend.VULKAN: machine.has_render_node,
    }
    lacking = []
    for backend, is_shown in shown.items():
        if is_shown:
            missing = _missing_tools(machine, backend)
            if not missing:
                return _choice(machine, backend, f"a GPU and the tools for {backend.value} are here")
            lacking.append(f"{backend.value} needs {missing}")
    why = "no GPU was found" if not lacking else f"a GPU is here, but {'; '.join(lacking)}"
    return _choice(machine, Backend.CPU, why)


def _missing_tools(machine: Machine, backend: Backend) -> str | None:
    """What would have to be installed to compile for `backend`; None when all is there."""
    if backend is Backend.CUDA and machine.nvcc is None:
        return "the CUDA tool kit: its compiler nvcc was not found (Ubuntu: sudo apt install nvidia-cuda-toolkit)"
    if backend is Backend.METAL and machine.system != "Darwin":
        return "macOS"
    if backend is Backend.ROCM and machine.hipcc is None:
        return "ROCm: its compiler hipcc was not found, nor in /opt/rocm/bin"
    if backend is Backend.VULKAN and not (machine.glslc and machine.has_vulkan_headers):
        return "glslc and the headers of Vulkan and SPIR-V (Debian: sudo apt install glslc libvulkan-dev spirv-headers)"
    return None


def _choice(machine: Machine, backend: Backend, why: str) -> Choice:
    """CPU takes no arguments, so that its wheel stays the one of builds that knew no choice. So does Metal: on macOS
    llama-cpp-python's own build always has it."""
    match backend:
        case Backend.CUDA:
            assert machine.nvcc is not None
            return Choice(backend, why, "-DGGML_CUDA=ON", {"CUDACXX": machine.nvcc})
        case Backend.ROCM:
            assert machine.hipcc is not None
            return Choice(backend, why, "-DGGML_HIP=ON", _rocm_environment(machine.hipcc))
        case Backend.VULKAN:
            return Choice(backend, why, "-DGGML_VULKAN=ON")
        case _:
            return Choice(backend, why)


def _rocm_environment(hipcc: str) -> dict[str, str]:
    """CMake's HIP language wants ROCm's clang, which lies beside hipcc in every release since 6.1."""
    root = Path(hipcc).resolve().parent.parent
    return {"ROCM_PATH": str(root), "HIP_PATH": str(root), "HIPCXX": str(root / "llvm/bin/clang++")}


# -- looking


def look() -> Machine:
    """This machine."""
    return Machine(
        system=platform.system(),
        nvcc=_find("nvcc", os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"),
        has_nvidia_gpu=_lists_a_gpu(),
        hipcc=_find("hipcc", os.environ.get("ROCM_PATH"), "/opt/rocm"),
        has_amd_gpu=Path("/dev/kfd").exists(),
        glslc=_find("glslc", os.environ.get("VULKAN_SDK")),
        has_vulkan_headers=_has_header("vulkan/vulkan.h") and _has_header("spirv/unified1/spirv.hpp"),
        has_render_node=any(Path("/dev/dri").glob("renderD*")),
    )


def _find(tool: str, *roots: str | None) -> str | None:
    """The path of a program: on the search path, or in the `bin` of one of `roots`."""
    folders = [str(Path(root) / "bin") for root in roots if root]
    return shutil.which(tool) or shutil.which(tool, path=os.pathsep.join(folders))


def _lists_a_gpu() -> bool:
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU" in listed.stdout


def _has_header(name: str) -> bool:
    roots = [Path("/usr/include"), Path("/usr/local/include"), Path("/opt/homebrew/include")]
    if sdk := os.environ.get("VULKAN_SDK"):
        roots.append(Path(sdk) / "include")
    return any((root / name).exists() for root in roots)
