"""Options are checked before llama.cpp sees them, and named in its own words."""

from __future__ import annotations

from dataclasses import fields

import pytest
from llama_cpp import llama_cpp as llama

from meshswarm.stage.engine.llama_options import (
    KvType,
    LlamaOptions,
    LoadMode,
    Numa,
    SplitMode,
    describe_llama_options,
    parse_llama_options,
)


def test_nothing_chosen_is_the_default() -> None:
    assert parse_llama_options([]) == LlamaOptions()
    assert LlamaOptions().numclass_words() == ()


def test_every_option_can_be_written_and_is_described() -> None:
    written = {
        "flash_attn": ("off", False), "type_k": ("Q8_0", KvType.Q8_0), "type_v": ("f16", KvType.F16),
        "n_gpu_layers": ("-1", -1), "main_gpu": ("1", 1), "split_mode": ("none", SplitMode.NONE),
        "op_offload": ("off", False), "offload_kqv": ("on", True), "load_mode": ("mmap+mlock", LoadMode.MMAP_MLOCK),
        "use_extra_bufts": ("0", False), "check_tensors": ("true", True), "numa": ("isolate", Numa.ISOLATE),
        "n_threads_batch": ("4", 4),
    }  # fmt: skip
    options = parse_llama_options(f"{key.replace('_', '-')} = {text}" for key, (text, _) in written.items())
    assert options == LlamaOptions(**{key: value for key, (_, value) in written.items()})
    assert set(written) == {field.name for field in fields(LlamaOptions)}
    assert all(f"  {key}: " in describe_llama_options() for key in written)


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ("flash_attn=auto", "flash_attn is on or off, not 'auto'"),
        ("type_k=q4_0", "type_k is f16 or q8_0, not 'q4_0'"),
        ("n_gpu_layers=-2", "n_gpu_layers is a number, -1 for all, not '-2'"),
        ("n_threads_batch=0", "1 to 512"),
        ("load_mode=fast", "none, mmap, mlock, mmap\\+mlock or dio"),
        ("n_ctx=4096", "choose it with --ctx"),
        ("rope_freq_base=1e6", "another model"),
        ("use_mmap=off", "load_mode"),
        ("swa_full=off", "go back"),
    ],
)
def test_a_wrong_value_is_told_what_is_right(pair: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        parse_llama_options([pair])


@pytest.mark.parametrize("pair", ["flash=on", "flash_attn", "", "=on"])
def test_an_unknown_key_is_told_the_known_ones_with_their_meaning(pair: str) -> None:
    with pytest.raises(ValueError, match="flash_attn: on or off; flash attention") as raised:
        parse_llama_options([pair])
    assert "n_gpu_layers" in str(raised.value)


def test_a_key_stands_once() -> None:
    with pytest.raises(ValueError, match="given twice"):
        parse_llama_options(["numa=isolate", "numa=disabled"])


def test_what_llama_cpp_refuses_together_is_refused_here() -> None:
    with pytest.raises(ValueError, match="needs flash_attn=on"):
        parse_llama_options(["flash_attn=off", "type_v=q8_0"])


def test_what_changes_bits_is_in_the_numclass_and_the_rest_is_not() -> None:
    options = parse_llama_options(["type_k=q8_0", "flash_attn=off", "load_mode=none", "numa=isolate", "main_gpu=1"])
    assert options.numclass_words() == ("flash_attn=off", "type_k=q8_0")


def test_the_numbers_are_llama_cpps() -> None:
    assert (KvType.F16, KvType.Q8_0) == (llama.GGML_TYPE_F16, llama.GGML_TYPE_Q8_0)
    assert [mode.value for mode in SplitMode] == [
        llama.LLAMA_SPLIT_MODE_NONE, llama.LLAMA_SPLIT_MODE_LAYER, llama.LLAMA_SPLIT_MODE_ROW,
    ]  # fmt: skip
    assert {mode.name: mode.value for mode in LoadMode} == {
        "NONE": llama.LLAMA_LOAD_MODE_NONE, "MMAP": llama.LLAMA_LOAD_MODE_MMAP, "MLOCK": llama.LLAMA_LOAD_MODE_MLOCK,
        "MMAP_MLOCK": llama.LLAMA_LOAD_MODE_MMAP_MLOCK, "DIO": llama.LLAMA_LOAD_MODE_DIRECT_IO,
    }  # fmt: skip
    assert {each.name: each.value for each in Numa} == {
        "DISABLED": llama.GGML_NUMA_STRATEGY_DISABLED, "DISTRIBUTE": llama.GGML_NUMA_STRATEGY_DISTRIBUTE,
        "ISOLATE": llama.GGML_NUMA_STRATEGY_ISOLATE, "NUMACTL": llama.GGML_NUMA_STRATEGY_NUMACTL,
    }  # fmt: skip
