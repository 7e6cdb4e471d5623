"""The set-up never takes a wheel that would die here, and redoes its work exactly when something changed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import setup_venv

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler to make a library to ask")


def wheel_of(folder: Path, body: str) -> Path:
    """A wheel whose libllama answers with what `body`, in C, says about it."""
    source = folder / "llama.c"
    source.write_text(f"const char *llama_print_system_info(void) {{ {body} }}")
    library = folder / ("libllama.dylib" if sys.platform == "darwin" else "libllama.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    wheel = folder / "llama_cpp_python-0.0.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(library, f"llama_cpp/lib/{library.name}")
    return wheel


@needs_compiler
@pytest.mark.parametrize(
    ("features", "flags", "fits"),
    [
        ("CPU : AVX = 1 | AVX2 = 1 | OPENMP = 1 |", {"avx", "avx2", "fma"}, True),
        ("CPU : AVX = 1 | AVX512 = 1 |", {"avx", "avx2"}, False),
        ("CPU : AVX = 1 | AVX512 = 0 |", {"avx"}, True),
        ("CPU : NEON = 1 | DOTPROD = 1 |", {"asimd"}, False),
        ("CPU : AVX512 = 1 |", set(), True),  # a system that does not say what its CPU can: it ran, that must do
    ],
)
def test_a_wheel_fits_when_the_cpu_has_all_it_was_built_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, features: str, flags: set[str], fits: bool
) -> None:
    monkeypatch.setattr(setup_venv, "cpu_flags", lambda: flags)
    assert setup_venv.runs_here(wheel_of(tmp_path, f'return "{features}";')) is fits


@needs_compiler
def test_a_wheel_that_dies_when_asked_does_not_fit(tmp_path: Path) -> None:
    assert not setup_venv.runs_here(wheel_of(tmp_path, "__builtin_trap();"))


def test_half_a_wheel_does_not_fit(tmp_path: Path) -> None:
    wheel = tmp_path / "llama_cpp_python-0.3.36-py3-none-any.whl"
    wheel.write_bytes(b"PK\x03\x04 the rest never came")
    assert not setup_venv.runs_here(wheel)


def test_wheels_are_kept_apart_by_cpu_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(flags: str, cmake_arguments: str) -> str:
        monkeypatch.setenv("CMAKE_ARGS", cmake_arguments)
        monkeypatch.setattr(setup_venv, "cpu_name", lambda: flags)
        return setup_venv.build_key()

    assert key("avx", "") == key("avx", "")
    assert key("avx", "") != key("avx avx2", "")
    assert key("avx", "") != key("avx", "-DGGML_CUDA=ON")
    assert key("avx", "-DGGML_NATIVE=OFF") == key("avx avx2", "-DGGML_NATIVE=OFF")


def test_only_what_is_installed_from_makes_the_set_up_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(setup_venv.__file__, tmp_path / "scripts/setup_venv.py")
    monkeypatch.setattr(setup_venv, "ROOT", tmp_path)
    monkeypatch.setattr(setup_venv, "__file__", str(tmp_path / "scripts/setup_venv.py"))
    (tmp_path / "src/meshswarm").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("[project]")
    before = setup_venv.state_of_the_checkout()
    (tmp_path / "src/meshswarm/cli.py").write_text("print('editable: nothing to do')")
    assert setup_venv.state_of_the_checkout() == before
    for name in ("pyproject.toml", "setup.py", "src/meshswarm/tap.c"):
        (tmp_path / name).write_text("changed")
        after = setup_venv.state_of_the_checkout()
        assert after != before
        before = after


def test_what_an_interrupted_build_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "building-x/pip-wheel").mkdir(parents=True)
    (tmp_path / "linux-x86_64-abc").mkdir()
    with setup_venv.locked(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["linux-x86_64-abc", "lock"]


def test_the_builds_own_words_become_progress(capsys: pytest.CaptureFixture[str]) -> None:
    progress = setup_venv.Progress()
    progress.see("  Building wheel for llama-cpp-python (pyproject.toml): started\n")
    assert "6 to 9 minutes" in capsys.readouterr().out
    progress.see("  [37/193] /usr/bin/g++ -O3 ggml.c\n")
    assert progress.step == "compiling llama-cpp-python: 37 of 193 (19 %)"
    progress.see("[ 42%] Building CXX object\n")
    assert progress.step == "compiling llama-cpp-python: 42 %"
    progress.said -= 100  # as if nothing had been said for long
    progress.see("")
    assert "42 %, 0:00 so far" in capsys.readouterr().out
