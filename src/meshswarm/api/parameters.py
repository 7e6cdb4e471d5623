"""Which request parameters exist, and what becomes of each: the same for chats and plain completions.

The rule this file keeps: a parameter that would change the answer is either obeyed or refused by name, never ignored.
Every name is in exactly one table: `BUILT` (obeyed), `WITHOUT_EFFECT` (accepted, because no value of it changes the
answer) or `NOT_BUILT` (accepted only with a value that asks for nothing, and null always does). A name in no table is
refused too: nobody can know what it would have changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshswarm.api import fields
from meshswarm.api.failure import shown
from meshswarm.errors import RequestError
from meshswarm.head.request import Speculation
from meshswarm.head.sampling_params import SamplingParams
from meshswarm.stage.engine.profile import Profile

BUILT = frozenset(
    {
        "model",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "n_predict",
        "stop",
        "seed",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repeat_penalty",
        "repetition_penalty",
        "logit_bias",
        "profile",
        "ignore_eos",
        "speculation",
    }
)

# Labels, caching hints and progress reports; settings of samplers whose own switch stands in NOT_BUILT.
WITHOUT_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "cache_prompt",
        "id_slot",
        "timings_per_token",
        "return_progress",
        "mirostat_tau",
        "mirostat_eta",
        "xtc_threshold",
        "dynatemp_exponent",
        "dry_base",
        "dry_allowed_length",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
    }
)

# Name -> the values that ask for nothing.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "json_schema": (),
    "grammar": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "n_probs": (0,),
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "reasoning": (),
    "reasoning_effort": (),
    "reasoning_format": ("auto", "none"),
    "verbosity": ("medium",),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "stop_token_ids": ([],),
    "min_tokens": (0,),
    "min_keep": (0,),
    "length_penalty": (1,),
    "samplers": (),
    "repeat_last_n": (64,),
    "typical_p": (1,),
    "typ_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
}

STREAM_OPTIONS = frozenset({"include_usage", "include_obfuscation"})

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_BIASES = 1024


@dataclass(frozen=True, slots=True)
class Delivery:
    """How the client wants its answer: streamed or whole, with a usage chunk at a stream's end or without."""

    stream: bool
    include_usage: bool


def check_names(body: dict[str, Any], own: frozenset[str]) -> None:
    """Refuse what this API cannot obey; `own` are the names that only this endpoint has. Raises RequestError."""
    unknown = []
    for name, value in body.items():
        if value is None or name in BUILT or name in own or name in WITHOUT_EFFECT:
            continue
        if name not in NOT_BUILT:
            unknown.append(name)
        elif not any(_same(value, neutral) for neutral in NOT_BUILT[name]):
            raise _not_built(name, value)
    if unknown:
        raise RequestError(
            f"unknown parameter{'s' if len(unknown) > 1 else ''}: {', '.join(shown(name) for name in unknown[:20])}; "
            "leave out what this API does not know, as it cannot be obeyed",
            param=unknown[0][:200],
            code="unknown_parameter",
        )


def _same(value: object, neutral: object) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _not_built(name: str, value: object) -> RequestError:
    neutral = NOT_BUILT[name]
    instead = f"leave it out or send {shown(neutral[0])}" if neutral else "leave it out"
    return RequestError(
        f"{name} is not built yet, so {shown(value)} cannot be obeyed; {instead}",
        param=name,
        code="unsupported_parameter",
    )


def delivery(body: dict[str, Any]) -> Delivery:
    value = body.get("stream_options")
    options = {} if value is None else fields.json_object(value, "stream_options")
    for name, value in options.items():
        if name not in STREAM_OPTIONS and value is not None:
            raise RequestError(
                f"unknown parameter: stream_options.{name[:80]}", param="stream_options", code="unknown_parameter"
            )
    return Delivery(
        stream=fields.boolean(body.get("stream"), "stream"),
        include_usage=fields.boolean(options.get("include_usage"), "stream_options.include_usage"),
    )


def model(body: dict[str, Any]) -> str | None:
    """The model asked for; None (any) when the name is absent or empty."""
    value = body.get("model")
    return None if value is None else fields.text(value, "model") or None


def max_tokens(body: dict[str, Any], default: int | None) -> int | None:
    """The limit under any of its three names; -1 means no limit, as local servers' clients write it."""
    limits = {}
    for name in ("max_completion_tokens", "max_tokens", "n_predict"):
        if body.get(name) is None:
            continue
        value = fields.integer(body[name], name, -1)
        if value == 0:
            raise fields.wrong_value(name, "must be at least 1, or -1 for no limit")
        limits[name] = value
    if len(set(limits.values())) > 1:
        raise fields.wrong_value(" and ".join(limits), "disagree; send one of them")
    if not limits:
        return default
    limit = next(iter(limits.values()))
    return None if limit == -1 else limit


def stop_strings(body: dict[str, Any]) -> tuple[str, ...]:
    """One string or up to 16; empty ones, which some clients send for an unset field, stop nothing."""
    value = body.get("stop")
    if value is None:
        return ()
    if isinstance(value, str):
        value = [value]
    stops = [fields.text(item, f"stop[{index}]") for index, item in enumerate(fields.array(value, "stop"))]
    if len(stops) > MAX_STOP_STRINGS:
        raise fields.wrong_value("stop", f"holds {len(stops)} strings; {MAX_STOP_STRINGS} are the most")
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
        raise fields.wrong_value("stop", f"has a string longer than {MAX_STOP_CHARACTERS} characters")
    return tuple(dict.fromkeys(stop for stop in stops if stop))


def sampling(body: dict[str, Any]) -> SamplingParams:
    """Absent values mean OpenAI's defaults: temperature 1, no filter, no penalty, a random seed. `SamplingParams`
    knows the ranges."""
    return SamplingParams(
        temperature=fields.number(body.get("temperature"), "temperature", 1.0),
        top_k=_top_k(body.get("top_k")),
        top_p=fields.number(body.get("top_p"), "top_p", 1.0),
        min_p=fields.number(body.get("min_p"), "min_p", 0.0),
        frequency_penalty=fields.number(body.get("frequency_penalty"), "frequency_penalty", 0.0),
        presence_penalty=fields.number(body.get("presence_penalty"), "presence_penalty", 0.0),
        repeat_penalty=_repeat_penalty(body),
        logit_bias=_logit_bias(body.get("logit_bias")),
        seed=_seed(body.get("seed")),
    )


def _top_k(value: object) -> int:
    """0 and -1 both mean "all", in llama.cpp's and vLLM's way of saying so."""
    return max(0, fields.integer(value, "top_k", -1) or 0)


def _repeat_penalty(body: dict[str, Any]) -> float:
    name = "repetition_penalty" if body.get("repeat_penalty") is None else "repeat_penalty"
    return fields.number(body.get(name), name, 1.0)


def _seed(value: object) -> int | None:
    """A 64-bit number; -1 is how local servers' clients ask for a random one."""
    seed = fields.integer(value, "seed", -(2**63), 2**64 - 1)
    return None if seed == -1 else seed


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    biases = fields.json_object(value, "logit_bias")
    if len(biases) > MAX_BIASES:
        raise fields.wrong_value("logit_bias", f"holds {len(biases)} entries; {MAX_BIASES} are the most")
    found: dict[int, float] = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= fields.MAX_INT):
            raise fields.wrong_value("logit_bias", f"has the key {shown(key)}, which is not a token id")
        if bias is None:
            raise fields.wrong_type(f"logit_bias.{key}", "a number", bias)
        found[int(key)] = fields.number(bias, f"logit_bias.{key}", 0.0)
    return tuple(sorted(found.items()))


def profile(body: dict[str, Any]) -> Profile:
    value = body.get("profile")
    if value is None:
        return Profile.FAST
    try:
        return Profile(fields.text(value, "profile"))
    except ValueError:
        raise fields.wrong_value("profile", f'must be "fast" or "exact", not {shown(value)}') from None


def ignore_eos(body: dict[str, Any]) -> bool:
    return fields.boolean(body.get("ignore_eos"), "ignore_eos")


def speculation(body: dict[str, Any]) -> Speculation | None:
    """None: what this peer does by default."""
    value = body.get("speculation")
    if value is None:
        return None
    try:
        return Speculation(fields.text(value, "speculation"))
    except ValueError:
        raise fields.wrong_value("speculation", f'must be "auto" or "off", not {shown(value)}') from None
