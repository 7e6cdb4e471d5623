"""The devices that this build of llama.cpp can compute on, and which layers go to a GPU.

The rule this file keeps: a part of a model is computed only by a back-end on which parts were proved equal to the whole
(PROVED_BACKENDS). Any other serves whole models, as llama.cpp itself would, and is named unproved wherever it is named.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from llama_cpp import _ctypes_extensions
from llama_cpp import llama_cpp as llama

from meshswarm.errors import ConfigError
from meshswarm.stage.engine.llama_options import LlamaOptions, SplitMode

PROVED_BACKENDS = frozenset({"CPU"})
"""llama.cpp's names of those on which `tests/stage/test_parity.py` has passed. No GPU was at hand yet."""
COMPUTE_BYTES = 512 << 20
"""Left free on every GPU for what a graph needs beside weights and KV cells."""
_USED_OF_FREE = 0.9  # other programs use the GPU too, and layers are not divided evenly among several


class DeviceKind(Enum):
    """The values are llama.cpp's `ggml_backend_dev_type`."""

    CPU = 0
    GPU = 1
    INTEGRATED_GPU = 2
    ACCELERATOR = 3
    META = 4


@dataclass(frozen=True, slots=True)
class Device:
    """`index` and `backend` ("CPU", "CUDA", "Vulkan") are llama.cpp's own; bytes are 0 where it cannot say."""

    index: int
    name: str
    description: str
    backend: str
    kind: DeviceKind
    free_bytes: int
    total_bytes: int

    @property
    def is_proved(self) -> bool:
        return self.backend in PROVED_BACKENDS


@dataclass(frozen=True, slots=True)
class Offload:
    """The last `n_gpu_layers` layers of a model are computed on `devices`; llama.cpp counts the output head as one."""

    devices: tuple[Device, ...]
    n_gpu_layers: int

    @property
    def is_proved(self) -> bool:
        """Whether such a span may be a part of a model."""
        return all(device.is_proved for device in self.devices)

    def exact_obstacle(self) -> str | None:
        """Why a span on these devices has no `EXACT` profile; None when they leave it alone."""
        return (
            None if self.is_proved else f"this peer computes on {self.backend}, where the exact profile was not proved"
        )

    @property
    def backend(self) -> str:
        return self.devices[0].backend if self.devices else "CPU"


ON_CPU = Offload((), 0)


def gpus(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Those that layers go to: the dedicated ones of the first back-end that has any, or else the integrated ones. Two
    back-ends may show the same card, which must not get layers twice."""
    for kind in (DeviceKind.GPU, DeviceKind.INTEGRATED_GPU):
        found = [device for device in devices if device.kind is kind]
        if found:
            return tuple(device for device in found if device.backend == found[0].backend)
    return ()


def memory_beside(devices: Sequence[Device], options: LlamaOptions) -> int:
    """Bytes that GPUs have free beside the machine's own memory, as far as `options` lets layers go there. Integrated
    GPUs, and all of Apple's, have none."""
    if options.n_gpu_layers == 0 or sys.platform == "darwin":
        return 0
    return sum(device.free_bytes for device in gpus(devices) if device.kind is DeviceKind.GPU)


def plan_offload(
    devices: Sequence[Device],
    options: LlamaOptions,
    *,
    is_whole: bool,
    layer_bytes: Sequence[int],
    output_bytes: int,
) -> Offload:
    """Where the layers of a span are computed; `layer_bytes` with their KV cells, `output_bytes` of the output head.

    `is_whole`: the span is the whole model. Raises ConfigError when somebody asked for what cannot be.
    """
    chosen = gpus(devices)
    wanted = options.n_gpu_layers
    if not chosen or wanted == 0:
        if wanted:
            raise ConfigError(
                "n_gpu_layers was given, but this build of llama.cpp sees no GPU; `meshswarm doctor` says what it sees"
            )
        return ON_CPU
    if options.split_mode is SplitMode.NONE:
        if options.main_gpu >= len(chosen):
            raise ConfigError(f"there is no GPU {options.main_gpu}: llama.cpp sees {len(chosen)}, counted from 0")
        chosen = (chosen[options.main_gpu],)
    if not is_whole and not all(device.is_proved for device in chosen):
        if wanted is None:
            return ON_CPU
        raise ConfigError(
            f"a part of a model is not computed on {chosen[0].backend}: that it gives the same as the whole model was "
            "not proved there. Serve the whole model on the GPU, or these layers on the CPU with --llama n_gpu_layers=0"
        )
    n_all = len(layer_bytes) + 1
    if wanted is None:
        wanted = _fitting(chosen, layer_bytes, output_bytes)
    elif wanted < 0:
        wanted = n_all
    return Offload(chosen, min(wanted, n_all)) if wanted else ON_CPU


def _fitting(devices: Sequence[Device], layer_bytes: Sequence[int], output_bytes: int) -> int:
    """How many layers there is room for, the output head first, then from the last layer down."""
    room = sum(max(0, int(device.free_bytes * _USED_OF_FREE) - COMPUTE_BYTES) for device in devices)
    count = 0
    for n_bytes in (output_bytes, *reversed(layer_bytes)):
        if n_bytes > room:
            break
        room -= n_bytes
        count += 1
    return count


# -- what llama.cpp sees


def list_devices() -> list[Device]:
    """All devices of this build, as llama.cpp finds them now. A back-end that does not start is not among them."""
    registry, base = _libraries()
    return [_device(registry, base, index) for index in range(registry.ggml_backend_dev_count())]


def device_pointers(devices: Sequence[Device]) -> Any:
    """What `llama_model_params.devices` takes: their handles and a NULL."""
    registry, _ = _libraries()
    handles = [registry.ggml_backend_dev_get(device.index) for device in devices]
    return (ctypes.c_void_p * (len(handles) + 1))(*handles, None)


def _device(registry: ctypes.CDLL, base: ctypes.CDLL, index: int) -> Device:
    handle = registry.ggml_backend_dev_get(index)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    base.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
    return Device(
        index=index,
        name=base.ggml_backend_dev_name(handle).decode(errors="replace"),
        description=base.ggml_backend_dev_description(handle).decode(errors="replace"),
        backend=base.ggml_backend_reg_name(base.ggml_backend_dev_backend_reg(handle)).decode(errors="replace"),
        kind=DeviceKind(base.ggml_backend_dev_type(handle)),
        free_bytes=free.value,
        total_bytes=total.value,
    )


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """ggml's list of back-ends, and the library that looks into one. llama-cpp-python declares neither."""
    llama.llama_backend_init()
    registry: ctypes.CDLL = _ctypes_extensions.load_shared_library("ggml", llama._base_path)
    base: ctypes.CDLL = _ctypes_extensions.load_shared_library("ggml-base", llama._base_path)
    registry.ggml_backend_dev_count.restype = ctypes.c_size_t
    registry.ggml_backend_dev_get.argtypes = (ctypes.c_size_t,)
    registry.ggml_backend_dev_get.restype = ctypes.c_void_p
    for name in ("name", "description", "type", "backend_reg"):
        getattr(base, f"ggml_backend_dev_{name}").argtypes = (ctypes.c_void_p,)
    base.ggml_backend_dev_name.restype = base.ggml_backend_dev_description.restype = ctypes.c_char_p
    base.ggml_backend_dev_backend_reg.restype = ctypes.c_void_p
    base.ggml_backend_reg_name.argtypes = (ctypes.c_void_p,)
    base.ggml_backend_reg_name.restype = ctypes.c_char_p
    size = ctypes.POINTER(ctypes.c_size_t)
    base.ggml_backend_dev_memory.argtypes = (ctypes.c_void_p, size, size)
    base.ggml_backend_dev_memory.restype = None
    return registry, base
