"""What the tests of the endpoint ask with: the real `openai` client, in strict response validation."""

from __future__ import annotations

import time
from typing import Any

import openai
import pytest


def client_of(api: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=api, api_key="none", _strict_response_validation=True, max_retries=0, timeout=60)


def wait_until_ready(api: str) -> str:
    """The id of the model, once this endpoint knows a whole route."""
    client = client_of(api)
    for _ in range(100):
        ready = [model.id for model in client.models.list() if model.model_extra["meta"]["ready"]]
        if ready:
            return ready[0]
        time.sleep(0.1)
    pytest.fail(f"{api} never found a whole route")


def counts(usage: Any) -> tuple[int, int]:
    """What is the same wherever an answer is made; what was cached or guessed ahead is not."""
    return usage.prompt_tokens, usage.completion_tokens
