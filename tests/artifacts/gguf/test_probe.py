"""The first load: good files pass; a file that crashes, fails or hangs llama.cpp takes only a child with it."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshswarm.artifacts.gguf import probe as probe_module
from meshswarm.artifacts.gguf.probe import engine_build, probe
from meshswarm.errors import ArtifactError, OutOfMemoryError


def test_a_tiny_model_passes(tmp_path: Path, gguf_recipe: Any) -> None:
    probe(gguf_recipe().write(tmp_path / "tiny.gguf"))


def test_a_vocabulary_alone_passes(tmp_path: Path, smollm2: Path) -> None:
    probe(smollm2, vocab_only=True)


def test_a_vocabulary_that_aborts_on_some_texts_is_refused(tmp_path: Path, gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    recipe.entries["tokenizer.ggml.model"] = (8, "llama")
    recipe.entries["tokenizer.ggml.scores"] = (9, 6, [0.0] * 32)
    with pytest.raises(ArtifactError, match="was killed by signal 6"):
        probe(recipe.write(tmp_path / "bad.gguf"), vocab_only=True)


def test_a_file_that_aborts_llama_cpp_is_refused_with_its_last_words(tmp_path: Path, gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    recipe.entries["llama.block_count"] = (4, 10**6)
    with pytest.raises(ArtifactError, match=r"bad\.gguf is refused: llama\.cpp was killed by signal 6 .*GGML_ASSERT"):
        probe(recipe.write(tmp_path / "bad.gguf"))


def test_a_file_that_does_not_load_is_refused_with_the_reason(tmp_path: Path, gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    recipe.tensors = [tensor for tensor in recipe.tensors if tensor[0] != "blk.1.attn_q.weight"]
    with pytest.raises(ArtifactError, match=r"could not load it: .*blk\.1\.attn_q\.weight"):
        probe(recipe.write(tmp_path / "bad.gguf"))


def test_weights_that_are_not_numbers_are_refused(tmp_path: Path, gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    path = tmp_path / "nan.gguf"
    data = bytearray(recipe.file())
    data[-4:] = b"\0\0\xc0\x7f"
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match="could not load it"):
        probe(path)


def test_a_child_that_takes_too_long_is_ended(tmp_path: Path, gguf_recipe: Any) -> None:
    with pytest.raises(ArtifactError, match=r"did not load it within 0\.0 s"):
        probe(gguf_recipe().write(tmp_path / "slow.gguf"), wall_limit_s=0.01)


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, *script: str) -> None:
    """Let a shell script run in the child's place."""
    path = folder / "python"
    path.write_text("\n".join(["#!/bin/sh", *script, ""]))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(path))


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals there")
def test_a_child_that_the_system_ends_for_want_of_memory_says_nothing_about_its_file(
    tmp_path: Path, gguf_recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gguf_recipe().write(tmp_path / "tiny.gguf")
    stand_in(monkeypatch, tmp_path, "kill -KILL $$")
    with pytest.raises(OutOfMemoryError, match=r"tiny\.gguf could not be tried .*want of memory.*fewer layers"):
        probe(path)
    stand_in(monkeypatch, tmp_path, "kill -XCPU $$")
    with pytest.raises(ArtifactError, match="was killed by signal 24"):
        probe(path)


PROBE_WITH_LITTLE = """
import resource, sys
from pathlib import Path
from meshswarm.artifacts.gguf.probe import probe
from meshswarm.errors import MeshswarmError

resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
try:
    probe(Path(sys.argv[1]))
except MeshswarmError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps to RLIMIT_AS")
def test_a_limit_on_this_process_is_told_from_a_bad_file(tmp_path: Path, gguf_recipe: Any) -> None:
    large = gguf_recipe().write(tmp_path / "large.gguf")
    os.truncate(large, 2 << 30)  # of nothing: llama.cpp maps all of it
    broken = gguf_recipe()
    broken.tensors = [tensor for tensor in broken.tensors if tensor[0] != "blk.1.attn_q.weight"]
    bad = broken.write(tmp_path / "bad.gguf")
    for path, expected in ((large, "OutOfMemoryError"), (bad, "ArtifactError")):
        said = subprocess.run(
            [sys.executable, "-c", PROBE_WITH_LITTLE, str(path), str(1 << 30)],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert said.stdout.startswith(expected), said.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits there")
def test_the_child_has_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter in the child's place tells the limits that were asked for."""
    stand_in(monkeypatch, tmp_path, f'echo "$@" >{tmp_path}/asked', "exit 3")
    model = tmp_path / "m.gguf"
    model.write_bytes(bytes(1000))
    with pytest.raises(ArtifactError, match="it said nothing"):
        probe(model)
    asked = (tmp_path / "asked").read_text().split()
    assert asked[asked.index("--memory") + 1] == str((8 << 30) + 3000)
    assert int(asked[asked.index("--seconds") + 1]) == 61


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_child_lowers_its_limits() -> None:
    script = (
        "import meshswarm.artifacts.gguf.probe_child as child\n"
        "child._limit_resources(5 << 30, 77)\n"
        "print(open('/proc/self/limits').read())\n"
    )
    with os.popen(f'{sys.executable} -c "{script}"') as limits:
        rows = {line[:26].strip(): line[26:].split() for line in limits}
    assert rows["Max address space"][:2] == [str(5 << 30)] * 2
    assert rows["Max cpu time"][:2] == ["77", "82"], "first a signal of its own, then the one that means no memory"
    assert rows["Max core file size"][:2] == ["0", "0"]
    assert rows["Max file size"][:2] == ["0", "0"]


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_the_child_reaches_nobody() -> None:
    script = (
        "import os, socket, sys\n"
        "import meshswarm.artifacts.gguf.probe_child as child\n"
        "before = os.readlink('/proc/self/ns/net')\n"
        "child._leave_network()\n"
        "print('left' if os.readlink('/proc/self/ns/net') != before else 'stayed', flush=True)\n"
        "socket.create_connection(('127.0.0.1', int(sys.argv[1])), timeout=5)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        command = [sys.executable, "-c", script, port]
        child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if child.stdout.strip() == "stayed":
        pytest.skip("this system lets no process of ours leave its network")
    assert child.stdout.strip() == "left" and child.returncode != 0
    assert "unreachable" in child.stderr


def test_the_build_names_the_installed_library() -> None:
    assert engine_build().startswith("0.3.")
    assert engine_build().count("-") == 1


def test_what_the_child_says_is_made_printable() -> None:
    assert probe_module._last_line(b"first\n\x1b[2Jlast\xff\n\n") == "?[2Jlast\N{REPLACEMENT CHARACTER}"
    assert len(probe_module._last_line(b"x" * 100_000)) == 300
