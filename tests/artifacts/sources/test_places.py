"""Names from outside, and where their files lie."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.artifacts.sources.places import part_names, place, safe_name
from meshswarm.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        ("../../etc/passwd", "passwd.gguf"),
        ("..", "model.gguf"),
        ("", "model.gguf"),
        (".gguf", "model.gguf"),
        (".hidden.gguf", "hidden.gguf"),
        ("a\\..\\b.gguf", "b.gguf"),
        ("a b\0c\n.GGUF", "a_b_c_.GGUF"),
        ("con.gguf", "_con.gguf"),
        ("-rf.gguf", "rf.gguf"),
        ("模型.gguf", "model.gguf"),
        ("x" * 300 + "-00001-of-00002.gguf", "x" * 130 + "-00001-of-00002.gguf"),
    ],
)
def test_names_become_plain(name: str, safe: str) -> None:
    assert safe_name(name) == safe


@given(st.text(max_size=300), st.text(max_size=100))
def test_no_name_leads_out_of_its_folder(name: str, readable: str) -> None:
    folder = Path("/cache")
    target = place(folder, "web", readable, name) / safe_name(name)
    assert target == Path(*target.parts) and len(target.relative_to(folder).parts) == 3
    assert ".." not in target.parts and not target.name.startswith((".", "-"))
    assert target.suffix.lower() == ".gguf" and len(target.name) <= 151
    assert safe_name(safe_name(name)) == safe_name(name)


def test_other_sources_have_other_places() -> None:
    folder = Path("/cache")
    assert place(folder, "hf", "a--b", "a", "b/c") != place(folder, "hf", "a--b", "a/b", "c")
    assert place(folder, "hf", "a--b", "ab", "c") != place(folder, "hf", "a--b", "a", "bc")


def test_parts_name_each_other() -> None:
    assert part_names("a.gguf") == ("a.gguf",)
    assert part_names("a-00002-of-00002.gguf") == ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf")
    for wrong in ("a-00000-of-00002.gguf", "a-00003-of-00002.gguf", "a-00001-of-60000.gguf"):
        with pytest.raises(ConfigError, match="that cannot be"):
            part_names(wrong)
