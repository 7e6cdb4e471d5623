"""llama.cpp's own options, as `--llama KEY=VALUE` gives them: which there are, what they may be, and what they change.

The rule this file keeps: an option that changes the bits of a result is in `numclass`, and one that would break what a
span promises to others is refused with the reason. Keys and values are llama.cpp's own names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

MAX_THREADS = 512


class KvType(IntEnum):
    """What K and V are kept in. Values are llama.cpp's `ggml_type`."""

    F16 = 1
    Q8_0 = 8


class SplitMode(IntEnum):
    """How layers are spread over several GPUs. Values are llama.cpp's `llama_split_mode`."""

    NONE = 0
    LAYER = 1
    ROW = 2


class LoadMode(IntEnum):
    """How weights come from the disk. Values are llama.cpp's `llama_load_mode`."""

    NONE = 0
    MMAP = 1
    MLOCK = 2
    MMAP_MLOCK = 3
    DIO = 4


class Numa(IntEnum):
    """Values are llama.cpp's `ggml_numa_strategy`."""

    DISABLED = 0
    DISTRIBUTE = 1
    ISOLATE = 2
    NUMACTL = 3


@dataclass(frozen=True, slots=True)
class LlamaOptions:
    """What a person may choose. Raises ValueError for a combination that llama.cpp refuses.

    `flash_attn` None: as `attention` settles it. `n_gpu_layers` None: as many as fit. `n_threads_batch` None: the
    threads of a decode. `op_offload` and `offload_kqv` None: where layers are on a GPU.
    """

    flash_attn: bool | None = None
    type_k: KvType = KvType.F16
    type_v: KvType = KvType.F16
    n_gpu_layers: int | None = None
    main_gpu: int = 0
    split_mode: SplitMode = SplitMode.LAYER
    op_offload: bool | None = None
    offload_kqv: bool | None = None
    load_mode: LoadMode = LoadMode.MMAP
    use_extra_bufts: bool = True
    check_tensors: bool = False
    numa: Numa = Numa.DISABLED
    n_threads_batch: int | None = None

    def __post_init__(self) -> None:
        if self.flash_attn is False and self.type_v is not KvType.F16:
            raise ValueError(f"type_v={_name(self.type_v)} needs flash_attn=on: llama.cpp keeps no such V without it")

    @property
    def has_flash_attention(self) -> bool:
        """Whether it is on; where nobody settled it, only for values that are kept in 8 bits, which need it."""
        return self.type_v is not KvType.F16 if self.flash_attn is None else self.flash_attn

    def numclass_words(self) -> tuple[str, ...]:
        """`key=value` of each option that may change the bits of a result and is not at its default."""
        changed = (field.name for field in fields(self) if getattr(self, field.name) != field.default)
        return tuple(f"{name}={_name(getattr(self, name))}" for name in changed if name in _CHANGES_BITS)


DEFAULT_OPTIONS = LlamaOptions()
_CHANGES_BITS = frozenset(
    {"flash_attn", "type_k", "type_v", "use_extra_bufts", "n_gpu_layers", "split_mode", "op_offload", "offload_kqv"}
)


@dataclass(frozen=True, slots=True)
class _Option:
    """`parse` raises ValueError or KeyError for anything but what `allowed` says."""

    parse: Callable[[str], Any]
    allowed: str
    meaning: str


def _switch(text: str) -> bool:
    return {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}[text]


def _member(kind: type[IntEnum]) -> Callable[[str], IntEnum]:
    return lambda text: {_name(member): member for member in kind}[text]


def _name(value: Any) -> str:
    if isinstance(value, IntEnum):
        return value.name.lower().replace("mmap_mlock", "mmap+mlock")
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def _names(kind: type[IntEnum]) -> str:
    *first, last = map(_name, kind)
    return f"{', '.join(first)} or {last}"


def _within(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(text)
        if not low <= number <= high:
            raise ValueError
        return number

    return parse


_ON_OFF = "on or off"
_OPTIONS: dict[str, _Option] = {
    "flash_attn": _Option(_switch, _ON_OFF, "flash attention; off takes more memory, and is faster on most CPUs"),
    "type_k": _Option(_member(KvType), _names(KvType), "what keys are kept in; q8_0 takes about half the memory"),
    "type_v": _Option(_member(KvType), _names(KvType), "what values are kept in; q8_0 takes about half the memory"),
    "n_gpu_layers": _Option(_within(-1, 10_000), "a number, -1 for all", "how many layers go to the GPU"),
    "main_gpu": _Option(_within(0, 255), "a number from 0", "which GPU, where split_mode is none"),
    "split_mode": _Option(_member(SplitMode), _names(SplitMode), "how layers are spread over several GPUs"),
    "op_offload": _Option(_switch, _ON_OFF, "large batches of layers kept on the CPU are computed on the GPU"),
    "offload_kqv": _Option(_switch, _ON_OFF, "keys and values of layers on the GPU are kept there"),
    "load_mode": _Option(_member(LoadMode), _names(LoadMode), "how weights come from the disk"),
    "use_extra_bufts": _Option(_switch, _ON_OFF, "weights may be repacked for this CPU (never on an AMX build)"),
    "check_tensors": _Option(_switch, _ON_OFF, "look at every weight for invalid numbers when loading"),
    "numa": _Option(_member(Numa), _names(Numa), "how memory and threads are placed on several processors"),
    "n_threads_batch": _Option(_within(1, MAX_THREADS), f"1 to {MAX_THREADS}", "threads for prompts"),
}

_OTHER_OPTION = "choose it with {}"
_ANOTHER_MODEL = "it would make another model of this one, and the spans of other peers would not fit to it"
_OWN_BUSINESS = "sessions that share an engine depend on it"
_REFUSED: dict[str, str] = {
    "n_ctx": _OTHER_OPTION.format("--ctx"),
    "n_seq_max": _OTHER_OPTION.format("--sessions"),
    "n_threads": _OTHER_OPTION.format("--threads"),
    "swa_full": "without it a session could not go back to an earlier position, as rejected drafts need",
    "n_rs_seq": "going back by llama.cpp's own snapshots gives wrong results for some models",
    "kv_unified": "a result would depend on what other sessions left behind",
    **dict.fromkeys(("n_batch", "n_ubatch", "n_outputs_max", "embeddings", "pooling_type"), _OWN_BUSINESS),
    **dict.fromkeys(("attention_type", "causal_attn", "ctx_type", "load_mtp", "kv_overrides"), _ANOTHER_MODEL),
    **dict.fromkeys(("rope_scaling_type", "rope_freq_base", "rope_freq_scale"), _ANOTHER_MODEL),
    **dict.fromkeys(("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"), _ANOTHER_MODEL),
    "yarn_orig_ctx": _ANOTHER_MODEL,
    "use_mmap": "llama.cpp calls it load_mode=mmap or load_mode=none now",
    "use_mlock": "llama.cpp calls it load_mode=mlock or load_mode=mmap+mlock now",
}


def parse_llama_options(pairs: Iterable[str]) -> LlamaOptions:
    """The options that `KEY=VALUE` texts ask for. Raises ValueError with a sentence for a person."""
    chosen: dict[str, Any] = {}
    for pair in pairs:
        written, equals, text = pair.partition("=")
        key, value = written.strip().replace("-", "_"), text.strip().lower()
        if key in _REFUSED:
            raise ValueError(f"llama.cpp's {key} cannot be set here: {_REFUSED[key]}")
        option = _OPTIONS.get(key)
        if option is None or not equals:
            raise ValueError(f"{pair[:80]!r} is not KEY=VALUE with one of these keys:\n{describe_llama_options()}")
        if key in chosen:
            raise ValueError(f"{key} is given twice")
        try:
            chosen[key] = option.parse(value)
        except (ValueError, KeyError):
            raise ValueError(f"{key} is {option.allowed}, not {text[:40]!r}") from None
    return LlamaOptions(**chosen)


def describe_llama_options() -> str:
    """One line an option: its name, what it may be, what it does."""
    return "\n".join(f"  {key}: {option.allowed}; {option.meaning}" for key, option in _OPTIONS.items())
