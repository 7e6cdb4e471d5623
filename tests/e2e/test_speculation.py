"""Guessing ahead in a split model: other steps, the same answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.e2e.client import client_of, counts, wait_until_ready

LIST = (
    "apples 12, pears 7, plums 31, cherries 5, figs 18, quinces 2, melons 9, grapes 44, dates 27, limes 13, "
    "lemons 8, oranges 21, kiwis 16, mangos 3"
)
EDIT = f"The list of the fruit:\n{LIST}\n\nThe same list of the fruit once more:\n{LIST}\n\nAnd once more:\napples 12,"


def complete(api: str, **options: Any) -> Any:
    body = {name: options.pop(name) for name in ("speculation", "profile", "ignore_eos") if name in options}
    defaults: dict[str, Any] = {"model": wait_until_ready(api), "prompt": EDIT, "temperature": 0, "max_tokens": 64}
    return client_of(api).completions.create(**{**defaults, **options}, extra_body=body)


@pytest.mark.parametrize("index", [0, 3])
def test_an_edit_is_guessed_ahead_and_says_exactly_the_same(three_peers: Any, index: int) -> None:
    api = three_peers.all[index].api
    plain = complete(api, profile="exact", speculation="off")
    guessed = complete(api, profile="exact", speculation="auto")
    assert guessed.choices[0].text == plain.choices[0].text
    assert counts(guessed.usage) == counts(plain.usage)
    assert guessed.usage.completion_tokens_details.accepted_prediction_tokens > 0
    timings = guessed.model_extra["timings"]
    assert timings["draft_n"] >= timings["draft_n_accepted"] > 0
    assert timings["flights"] < plain.model_extra["timings"]["flights"]
    assert plain.model_extra["timings"]["flights"] == plain.usage.completion_tokens
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
    assert plain.usage.completion_tokens_details.rejected_prediction_tokens == 0


def test_a_seed_gives_the_same_sampled_answer_whether_guessed_ahead_or_not(three_peers: Any) -> None:
    api = three_peers.client.api
    options: dict[str, Any] = {"profile": "exact", "temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.1}
    for seed in range(2):
        plain = complete(api, seed=seed, speculation="off", max_tokens=40, **options)
        guessed = complete(api, seed=seed, speculation="auto", max_tokens=40, **options)
        assert guessed.choices[0].text == plain.choices[0].text


def test_a_peer_can_be_told_not_to_guess_a_request_knows_better_and_a_full_context_ends_both_with_length(
    start_peer: Any, smollm2: Any
) -> None:
    peer = start_peer("--model", str(smollm2), "--ctx", "207", "--speculation", "off")
    for asked, is_guessed in (({}, False), ({"speculation": "auto"}, True)):
        full = complete(peer.api, max_tokens=-1, ignore_eos=True, **asked)
        assert (full.model_extra["timings"]["draft_n"] > 0) is is_guessed
        assert full.choices[0].finish_reason == "length"
        assert full.usage.total_tokens == 207


def test_a_draft_model_changes_no_answer(start_peer: Any, smollm2: Any) -> None:
    peer = start_peer("--model", str(smollm2), "--draft-model", str(smollm2))
    prose = {"prompt": "Once upon a time there was a fox who", "profile": "exact", "max_tokens": 24}
    plain = complete(peer.api, speculation="off", **prose)
    for _ in range(2):
        assert complete(peer.api, speculation="auto", **prose).choices[0].text == plain.choices[0].text
    assert peer.stop() == 0


def test_a_draft_model_with_another_vocabulary_is_refused_by_name(
    start_peer: Any, smollm2: Any, gguf_recipe: Any, tmp_path: Any
) -> None:
    other = gguf_recipe(n_layers=2).write(tmp_path / "other.gguf")
    peer = start_peer("--model", str(smollm2), "--draft-model", str(other), wait=False)
    assert peer.process.wait(timeout=90) == 1
    *said, last = iter(peer.lines.get, None)
    assert not any('"loading"' in line for line in said), "it is refused before anything large is loaded"
    assert "other cannot guess for smollm2-135m-instruct" in json.loads(last)["error"]
    assert "vocabularies differ" in json.loads(last)["error"]
