"""Conversations of several turns and full peers, between real processes: what is computed again, who waits where."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

RULES = " ".join(f"Rule {number}: answer question {number} in {number} words." for number in range(1, 13))


def ask(peer: Any, messages: list[dict[str, str]], **options: Any) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0, "max_tokens": 12, "profile": "exact", **options}
    answered = httpx.post(peer.api + "/chat/completions", json=body, timeout=120)
    assert answered.status_code == 200, answered.text
    found: dict[str, Any] = answered.json()
    return found


def said(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def status(peer: Any) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(peer.api.removesuffix("/v1") + "/meshswarm/status").json()
    return found


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def until(condition: Any) -> None:
    for _ in range(400):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("it never came true")


def test_a_second_turn_computes_only_what_is_new_and_says_what_a_fresh_run_says(start_peer: Any, smollm2: Path) -> None:
    first = start_peer("--model", str(smollm2), "--layers", "0:15")
    second = start_peer("--model", str(smollm2), "--layers", "15:30", "--join", first.address)
    chat = [user(RULES + " What is rule 3?")]
    opening = ask(first, chat)
    assert cached(opening) == 0
    chat += [{"role": "assistant", "content": said(opening)}, user("And rule 7?")]
    before = status(second)
    warm = ask(first, chat)
    n_prompt = warm["usage"]["prompt_tokens"]
    assert cached(warm) >= opening["usage"]["prompt_tokens"], "at least the first prompt was there already"
    assert n_prompt - cached(warm) < 40
    assert warm["timings"]["prompt_n"] == n_prompt - cached(warm)
    assert status(second)["sessions_total"] == before["sessions_total"], "the same session goes on"

    # Without the kept session: another peer's head, which has none.
    other = start_peer("--join", first.address)
    cold = ask(other, chat)
    assert cached(cold) == 0
    assert said(cold) == said(warm)

    # Another question behind the same rules.
    shared = ask(first, [user(RULES + " What is rule 9?")])
    assert cached(shared) > 0
    assert said(shared) == said(ask(other, [user(RULES + " What is rule 9?")]))


def test_a_lost_span_takes_kept_sessions_with_it_and_nobody_hears_of_it(start_peer: Any, smollm2: Path) -> None:
    first = start_peer("--model", str(smollm2), "--layers", "0:15")
    second = start_peer("--model", str(smollm2), "--layers", "15:30", "--join", first.address)
    chat = [user(RULES + " What is rule 3?")]
    answer = ask(first, chat)
    second.kill()
    start_peer("--model", str(smollm2), "--layers", "15:30", "--join", first.address)
    chat += [{"role": "assistant", "content": said(answer)}, user("And rule 7?")]
    again = ask(first, chat)
    assert cached(again) == 0
    assert said(again)


def test_kept_sessions_never_keep_another_head_out(start_peer: Any, smollm2: Path) -> None:
    peer = start_peer("--model", str(smollm2), "--sessions", "1")
    other = start_peer("--join", peer.address)
    for asking in (peer, other, peer):
        answer = ask(asking, [user(RULES)], max_tokens=2)
        assert cached(answer) == 0, "its room went to the other head meanwhile"
    assert status(peer)["sessions_parked"] == 1


def test_a_request_waits_in_line_at_a_full_peer_and_is_served(start_peer: Any, smollm2: Path) -> None:
    peer = start_peer("--model", str(smollm2), "--sessions", "1")
    long = {"max_tokens": 120, "ignore_eos": True}
    answers: list[dict[str, Any]] = []
    asking = [
        threading.Thread(target=lambda: answers.append(ask(peer, [user("Count for ever.")], **long))),
        threading.Thread(target=lambda: answers.append(ask(peer, [user("Say hello.")]))),
    ]
    asking[0].start()
    until(lambda: status(peer)["sessions"] == 1)
    asking[1].start()
    until(lambda: status(peer)["sessions_waiting"] == 1)
    for thread in asking:
        thread.join(120)
    assert answers[0]["usage"]["completion_tokens"] == 120
    assert len(answers) == 2
    assert status(peer)["sessions_waiting"] == 0
