"""Every parameter is obeyed or refused by name; none that would change the answer is ignored."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from meshswarm.api import chat, completions, parameters
from meshswarm.api.chat import read_chat
from meshswarm.api.completions import read_completion
from meshswarm.api.failure import failure_of
from meshswarm.errors import RequestError
from meshswarm.head.request import Speculation
from meshswarm.stage.engine.profile import Profile

MESSAGES = [{"role": "user", "content": "hi"}]


def read(**extra):
    return read_chat({"messages": MESSAGES, **extra})


def refused(**extra) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(**extra)
    assert caught.value.param in str(caught.value)
    return caught.value


def openai_names(module, *params) -> set[str]:
    return {name for one in params for name in typing.get_type_hints(getattr(module, one))}


def test_every_parameter_of_openais_client_is_classified():
    """Fails when a new version of the client learns a parameter that nobody has thought about."""
    known = parameters.BUILT | parameters.WITHOUT_EFFECT | parameters.NOT_BUILT.keys()
    streaming = ("CompletionCreateParamsNonStreaming", "CompletionCreateParamsStreaming")
    assert openai_names(chat_create_params, *streaming) <= known | chat.OWN_PARAMETERS
    assert openai_names(completion_create_params, *streaming) <= known | completions.OWN_PARAMETERS


def test_no_parameter_is_classified_twice():
    own = chat.OWN_PARAMETERS | completions.OWN_PARAMETERS
    tables = [parameters.BUILT, parameters.WITHOUT_EFFECT, frozenset(parameters.NOT_BUILT), own]
    assert sum(map(len, tables)) == len(frozenset().union(*tables))


def test_every_parameter_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    own = chat.OWN_PARAMETERS | completions.OWN_PARAMETERS
    names = parameters.BUILT | parameters.WITHOUT_EFFECT | parameters.NOT_BUILT.keys() | own
    assert sorted(name for name in names - {"stream_options"} if f"`{name}`" not in page) == []


def test_defaults_are_openais():
    request = read()
    assert request.model is None
    assert request.max_tokens is None
    assert request.stop == ()
    assert request.profile is Profile.FAST
    assert not request.ignore_eos
    assert request.speculation is None
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repeat_penalty) == (0.0, 0.0, 1.0)
    assert (sampling.logit_bias, sampling.seed) == ((), None)
    delivery = parameters.delivery({})
    assert (delivery.stream, delivery.include_usage) == (False, False)


def test_what_is_built_arrives():
    request = read(
        model="small",
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        frequency_penalty=-1,
        presence_penalty=2,
        repeat_penalty=1.1,
        logit_bias={"42": -100, "7": 1.5},
        seed=11,
        stop=["a", "b", "a", ""],
        max_tokens=99,
        profile="exact",
        ignore_eos=True,
        speculation="off",
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.05)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repeat_penalty) == (-1.0, 2.0, 1.1)
    assert sampling.logit_bias == ((7, 1.5), (42, -100.0))
    assert sampling.seed == 11
    assert (request.model, request.stop, request.max_tokens) == ("small", ("a", "b"), 99)
    assert (request.profile, request.ignore_eos) == (Profile.EXACT, True)
    assert request.speculation is Speculation.OFF


def test_null_means_absent_everywhere():
    names = parameters.BUILT | parameters.WITHOUT_EFFECT | parameters.NOT_BUILT.keys() | {"nobody_knows_this"}
    assert read(**dict.fromkeys(names)) == read()
    assert parameters.delivery(dict.fromkeys(names)) == parameters.delivery({})


@pytest.mark.parametrize("name", sorted(parameters.WITHOUT_EFFECT))
def test_what_has_no_effect_is_accepted(name):
    assert read(**{name: "anything"}) == read()


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in parameters.NOT_BUILT.items() for value in values]
)
def test_a_value_that_asks_for_nothing_is_accepted(name, value):
    assert read(**{name: value}) == read()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("logprobs", True),
        ("logprobs", 0),
        ("top_logprobs", 2),
        ("n", 2),
        ("n", True),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("prediction", {"type": "content", "content": "x"}),
        ("web_search_options", {}),
        ("moderation", {"model": "x"}),
        ("reasoning_effort", "high"),
        ("verbosity", "low"),
        ("store", True),
        ("service_tier", "flex"),
        ("echo", True),
        ("best_of", 3),
        ("suffix", "end"),
        ("mirostat", 2),
        ("dry_multiplier", 0.8),
        ("grammar", "root ::= [a-z]"),
    ],
)
def test_what_is_not_built_is_refused_by_name(name, value):
    error = refused(**{name: value})
    assert (error.param, error.code) == (name, "unsupported_parameter")


def test_unknown_names_are_refused_and_all_named():
    error = refused(frobnicate=1, temperatur=0.2, fine=None)
    assert error.code == "unknown_parameter"
    assert '"frobnicate", "temperatur"' in str(error)
    assert "fine" not in str(error)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 1e999),
        ("temperature", "0.5"),
        ("temperature", True),
        ("top_p", 1.01),
        ("top_k", 1.5),
        ("top_k", -2),
        ("min_p", -1),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("repeat_penalty", 0),
        ("seed", "7"),
        ("seed", 2**64),
        ("seed", 1.5),
        ("max_tokens", 0),
        ("max_tokens", -2),
        ("max_tokens", 2**31),
        ("max_completion_tokens", "5"),
        ("stop", 5),
        ("stop", [1]),
        ("stop", ["x"] * 17),
        ("stop", "x" * 1025),
        ("stop", "\ud800"),
        ("logit_bias", [[1, 2]]),
        ("logit_bias", {"hello": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"²": 1}),
        ("logit_bias", {"9999999999": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": None}),
        ("logit_bias", {str(n): 1 for n in range(1025)}),
        ("profile", "quick"),
        ("profile", 1),
        ("ignore_eos", 1),
        ("speculation", "on"),
        ("speculation", True),
        ("model", 5),
        ("model", "\udc00"),
    ],
)
def test_wrong_values_are_refused_by_name(name, value):
    error = refused(**{name: value})
    assert error.param.startswith(name)
    assert failure_of(error).code in ("invalid_type", "invalid_value")


@pytest.mark.parametrize(
    "value", ["yes", {"stream": 1}, {"stream_options": []}, {"stream_options": {"include_usage": "x"}}]
)
def test_a_wrong_delivery_is_refused(value):
    with pytest.raises(RequestError):
        parameters.delivery({"stream": value} if isinstance(value, str) else value)


def test_an_unknown_stream_option_is_refused():
    with pytest.raises(RequestError, match=r"stream_options\.continuous"):
        parameters.delivery({"stream_options": {"continuous": True}})


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_a_limit_has_three_names(name):
    assert read(**{name: 5}).max_tokens == 5
    assert read(**{name: 5.0}).max_tokens == 5
    assert read(**{name: -1}).max_tokens is None


def test_two_limits_must_agree():
    assert read(max_tokens=5, max_completion_tokens=5).max_tokens == 5
    with pytest.raises(RequestError, match="max_completion_tokens and max_tokens disagree"):
        read(max_tokens=5, max_completion_tokens=6)


def test_what_local_servers_clients_write():
    assert read(top_k=-1).sampling.top_k == 0
    assert read(seed=-1).sampling.seed is None
    assert read(seed=-2).sampling.seed == -2
    assert read(repetition_penalty=1.2).sampling.repeat_penalty == 1.2
    assert read(model="").model is None
    assert read(stop="").stop == ()


def test_a_completion_is_limited_as_openais_is():
    assert read_completion({"prompt": "x"}).max_tokens == 16
    assert read_completion({"prompt": "x", "max_tokens": -1}).max_tokens is None


def test_endpoints_do_not_take_each_others_parameters():
    with pytest.raises(RequestError, match="prompt"):
        read(prompt="x")
    with pytest.raises(RequestError, match="messages"):
        read_completion({"prompt": "x", "messages": MESSAGES})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(), max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(
    sorted(parameters.BUILT | parameters.NOT_BUILT.keys() | {"messages", "prompt", "user", "other"})
)


@given(st.dictionaries(NAMES, JSON, max_size=6), st.booleans())
def test_no_body_does_anything_but_be_read_or_refused(body, with_input):
    for reader, required in ((read_chat, {"messages": MESSAGES}), (read_completion, {"prompt": "x"})):
        try:
            reader({**body, **required} if with_input else body)
            parameters.delivery(body)
        except RequestError as error:
            assert str(error)
            assert failure_of(error).code
