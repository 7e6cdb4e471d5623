"""The API key's file."""

from __future__ import annotations

import stat
import sys

import pytest

from meshswarm.api.key import load_or_create_api_key
from meshswarm.errors import ConfigError


def test_a_key_is_made_once(tmp_path):
    path = tmp_path / "api.key"
    first = load_or_create_api_key(path)
    assert first.created
    assert len(first.text) >= 40
    again = load_or_create_api_key(path)
    assert (again.text, again.created) == (first.text, False)
    assert load_or_create_api_key(tmp_path / "other.key").text != first.text


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX modes mean nothing there")
def test_the_file_is_for_its_owner_only(tmp_path):
    path = tmp_path / "api.key"
    load_or_create_api_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"api\.key.*0640"):
        load_or_create_api_key(path)


@pytest.mark.parametrize("content", ["", "short", "two words and a good length", "x" * 300, "é" * 20])
def test_a_damaged_file_is_said_to_be(tmp_path, content):
    path = tmp_path / "api.key"
    path.write_text(content, encoding="utf-8")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="damaged"):
        load_or_create_api_key(path)


def test_a_file_that_cannot_be_made_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere"):
        load_or_create_api_key(tmp_path / "nowhere" / "api.key")


def test_a_folder_in_its_place_is_named(tmp_path):
    path = tmp_path / "api.key"
    path.mkdir()
    with pytest.raises(ConfigError, match=r"api\.key"):
        load_or_create_api_key(path)
