"""Guessing ahead in a split model: other steps, the same answers."""

from __future__ import annotations

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
    for seed in range(3):
        plain = complete(api, seed=seed, speculation="off", **options)
        assert complete(api, seed=seed, speculation="auto", **options).choices[0].text == plain.choices[0].text


def test_a_peer_can_be_told_not_to_guess_and_a_request_knows_better(start_peer: Any, smollm2: Any) -> None:
    peer = start_peer("--model", str(smollm2), "--speculation", "off")
    assert complete(peer.api).model_extra["timings"]["draft_n"] == 0
    assert complete(peer.api, speculation="auto").model_extra["timings"]["draft_n"] > 0


@pytest.mark.parametrize("speculation", ["off", "auto"])
def test_a_context_that_is_full_in_mid_answer_ends_it_with_length(
    start_peer: Any, smollm2: Any, speculation: str
) -> None:
    peer = start_peer("--model", str(smollm2), "--ctx", "255", "--speculation", speculation)
    full = complete(peer.api, max_tokens=-1, ignore_eos=True)
    assert full.choices[0].finish_reason == "length"
    assert full.usage.total_tokens == 255
