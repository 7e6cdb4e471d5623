"""Models of other families than the embedded one's through real peers: a running state, wide rows beside tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.artifacts.gguf.split_writing import split_model
from tests.e2e.client import client_of, wait_until_ready
from tests.e2e.conftest import PeerStarter
from tests.stage.tiny_models import N_VOCAB, write_tiny

from meshswarm.artifacts.gguf.check import check_hyperparameters, read_header

PROMPT = [(7 * n * n + 13 * n + 11) % N_VOCAB for n in range(40)]


def answer(api: str) -> Any:
    """A greedy answer in the exact profile, of which no bit depends on how rows are grouped on their way."""
    return client_of(api).completions.create(
        model=wait_until_ready(api),
        prompt=PROMPT,
        temperature=0,
        max_tokens=40,
        extra_body={"ignore_eos": True, "profile": "exact"},
    )


@pytest.mark.parametrize(("name", "cut"), [("qwen35moe", 3), ("deepseek4", 4)])
def test_a_split_model_answers_like_the_whole_one(start_peer: PeerStarter, tmp_path: Path, name: str, cut: int) -> None:
    model = write_tiny(name, tmp_path / f"{name}-tiny.gguf")
    n_layers = check_hyperparameters(read_header(model)).n_layers
    options = ("--model", str(model), "--ctx", "512")
    whole = answer(start_peer(*options, swarm=f"{start_peer.swarm}-whole").api)
    first = start_peer(*options, "--layers", f"0:{cut}")
    last = start_peer(*options, "--layers", f"{cut}:{n_layers}", "--join", first.address)
    assert len(set(whole.choices[0].text)) > 10, "it repeats itself, so it proves little"
    for peer in (first, last):
        split = answer(peer.api)
        assert split.choices[0].text == whole.choices[0].text
        assert split.usage.completion_tokens == 40
        hops = [hop["layers"] for hop in split.model_extra["meshswarm"]["route"]]
        assert hops == [f"0:{cut}", f"{cut}:{n_layers}"]


def test_a_model_in_several_files_answers_like_the_one_in_one(start_peer: PeerStarter, tmp_path: Path) -> None:
    model = write_tiny("qwen35moe", tmp_path / "tiny.gguf")
    parts = split_model(model, tmp_path / "parts", 3, is_first_empty=True)
    one = answer(start_peer("--model", str(model), "--ctx", "512", swarm=f"{start_peer.swarm}-one").api)
    several = answer(start_peer("--model", str(parts[1]), "--ctx", "512").api)
    assert several.choices[0].text == one.choices[0].text
    assert len(set(one.choices[0].text)) > 10, "it repeats itself, so it proves little"


@pytest.mark.parametrize(
    ("name", "changes", "layers", "sentence"),
    [
        ("smollm3", {}, "2:8", "cannot be served alone: this model can be cut before 4, 8 of its layers 0:12"),
        ("granite", {"keys": {"deepstack_mapping": [1, 2, 3, 4]}}, "0:2", "granite.deepstack_mapping means to a part"),
    ],
)
def test_layers_that_cannot_be_cut_out_are_refused_with_the_reason(
    start_peer: PeerStarter, tmp_path: Path, name: str, changes: dict[str, Any], layers: str, sentence: str
) -> None:
    model = write_tiny(name, tmp_path / f"{name}-tiny.gguf", **changes)
    peer = start_peer("--model", str(model), "--layers", layers, wait=False)
    assert peer.process.wait(timeout=60) != 0
    said = "".join(line or "" for line in list(peer.lines.queue))
    assert sentence in said and not peer.errors()
