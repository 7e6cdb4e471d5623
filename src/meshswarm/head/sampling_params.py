"""How a client wants its next token chosen: the parameters, their ranges and what they mean.

The rule this file keeps: a value that exists is a value that works. Everything out of range is refused here, with the
parameter's name, so that nothing behind this file checks again. The order in which the parameters act is the
sampler's (`sampler`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshswarm.errors import RequestError

GREEDY_BELOW = 1e-5
"""At and under this temperature the most likely token is taken, as vLLM does (`_SAMPLING_EPS`)."""
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0
MAX_REPEAT_PENALTY = 100.0
MAX_BIAS = 100.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Raises RequestError, naming the parameter, for a value out of range.

    - `temperature` divides the logits; 0 takes the most likely token.
    - `top_k` keeps the k most likely tokens; 0 keeps all.
    - `top_p` keeps the fewest most likely tokens whose probabilities reach p together.
    - `min_p` drops tokens less likely than `min_p` times the most likely one.
    - `frequency_penalty`, `presence_penalty`: OpenAI's. Subtracted from a token's logit for each time, or once if ever,
      it stands in the answer so far; the prompt does not count.
    - `repeat_penalty`: llama.cpp's. Divides a positive logit, and multiplies a negative one, of every token among the
      last 64 of prompt and answer.
    - `logit_bias`: (token id, what to add to its logit) pairs; -inf forbids a token.
    - `seed`: the same seed, prompt and logits give the same tokens. None: a random one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _in_range("top_k", self.top_k, 0, math.inf)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _in_range("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _in_range("repeat_penalty", self.repeat_penalty, 1 / MAX_REPEAT_PENALTY, MAX_REPEAT_PENALTY)
        for token, bias in self.logit_bias:
            if token < 0:
                raise RequestError(f"logit_bias names token {token}, which is no token id", param="logit_bias")
            if bias != -math.inf:
                _in_range("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        if len({token for token, _ in self.logit_bias}) != len(self.logit_bias):
            raise RequestError("logit_bias names a token twice", param="logit_bias")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken and nothing is drawn."""
        return self.temperature <= GREEDY_BELOW

    @property
    def tail_temperature(self) -> float:
        """The temperature at which the last span has to sum up the tail it does not send."""
        return 1.0 if self.greedy else self.temperature


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        limits = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise RequestError(f"{name} is {value}; it must be {limits}", param=name)
