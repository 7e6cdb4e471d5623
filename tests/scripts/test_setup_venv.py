"""The set-up never takes a wheel that would die here, and redoes its work exactly when something changed."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import setup_venv
from backends import Backend, Choice, Machine

CPU = Choice(Backend.CPU, "")
CUDA = Choice(Backend.CUDA, "", "-DGGML_CUDA=ON")

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
    def key(flags: str, cmake_arguments: str, choice: Choice = CPU) -> str:
        monkeypatch.setenv("CMAKE_ARGS", cmake_arguments)
        monkeypatch.setattr(setup_venv, "cpu_name", lambda: flags)
        return setup_venv.build_key(choice)

    assert key("avx", "") == key("avx", "")
    assert key("avx", "", CUDA) == key("avx", "-DGGML_CUDA=ON")
    assert key("avx", "", CUDA) != key("avx", "-DGGML_CUDA_FA=OFF", CUDA)
    assert key("avx", "") != key("avx avx2", "")
    assert key("avx", "") != key("avx", "-DGGML_CUDA=ON")
    assert key("avx", "-DGGML_NATIVE=OFF") == key("avx avx2", "-DGGML_NATIVE=OFF")


def test_a_wheel_of_before_there_was_a_choice_is_still_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in setup_venv.BUILD_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    settings = {"CMAKE_ARGS": "", "FORCE_CMAKE": "", "CC": "", "CXX": "", "CFLAGS": "", "CXXFLAGS": "", "LDFLAGS": ""}
    what = json.dumps([settings, platform.libc_ver(), setup_venv.cpu_name()])
    expected = f"{sysconfig.get_platform()}-{hashlib.sha256(what.encode()).hexdigest()[:12]}"
    assert setup_venv.build_key(CPU) == expected


@pytest.mark.parametrize(
    ("extras", "named", "arguments", "expected"),
    [
        ("run", "", "", Backend.CUDA),
        ("dev", "", "", Backend.CPU),
        ("dev", "cuda", "", Backend.CUDA),
        ("run", "cpu", "", Backend.CPU),
        ("run", "", "-DGGML_BLAS=ON", Backend.CPU),
        ("run", "cuda", "-DGGML_CUDA_FA=OFF", Backend.CUDA),
    ],
)
def test_the_checks_are_for_the_cpu_and_a_peer_for_what_the_machine_has(
    monkeypatch: pytest.MonkeyPatch, extras: str, named: str, arguments: str, expected: Backend
) -> None:
    monkeypatch.setattr(setup_venv, "look", lambda: Machine("Linux", nvcc="/cuda/bin/nvcc", has_nvidia_gpu=True))
    monkeypatch.setenv("MESHSWARM_BACKEND", named)
    monkeypatch.setenv("CMAKE_ARGS", arguments)
    assert setup_venv.chosen_backend(extras).backend is expected


def test_a_back_end_that_cannot_be_ends_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup_venv, "look", lambda: Machine("Linux"))
    monkeypatch.setenv("MESHSWARM_BACKEND", "cuda")
    with pytest.raises(SystemExit):
        setup_venv.chosen_backend("run")
    assert "needs the CUDA tool kit" in capsys.readouterr().err


class Builds:
    """The set-up with builds that only pretend: `failing` back-ends make no wheel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, failing: set[Backend]) -> None:
        self.failing = failing
        self.tried: list[Backend] = []
        self.installed = ""
        self.loads = True
        monkeypatch.setenv("MESHSWARM_CACHE", str(folder))
        monkeypatch.delenv("CMAKE_ARGS", raising=False)
        monkeypatch.setattr(setup_venv, "ENGINE_NOTE", folder / "engine.json")
        monkeypatch.setattr(setup_venv, "build_wheel", self._build)
        monkeypatch.setattr(setup_venv, "install_from", self._install)
        monkeypatch.setattr(setup_venv, "check_that_it_loads", self._check)

    def _build(self, building: Path, choice: Choice, requirement: str) -> Path:
        self.tried.append(choice.backend)
        if choice.backend in self.failing:
            raise setup_venv.BuildError("the compiler gave up")
        wheel = building / f"llama_cpp_python-{choice.backend.value}.whl"
        wheel.write_text(requirement)
        return wheel

    def _check(self, choice: Choice) -> None:
        if choice.backend is Backend.CUDA and not self.loads:
            raise setup_venv.BuildError("it does not load here: libcuda.so.1 is gone")

    def _install(self, kept: Path, requirement: str) -> bool:
        for wheel in kept.glob("*.whl"):
            self.installed = wheel.name
            return True
        return False


def test_a_gpu_build_that_fails_gives_way_to_the_cpus_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    builds = Builds(monkeypatch, tmp_path, {Backend.CUDA})
    setup_venv.install_engine(CUDA)
    assert builds.tried == [Backend.CUDA, Backend.CPU] and builds.installed == "llama_cpp_python-cpu.whl"
    assert "building for cuda failed: the compiler gave up" in capsys.readouterr().out
    assert json.loads((tmp_path / "engine.json").read_text())["backend"] == "cpu"

    setup_venv.install_engine(CUDA)  # not for another quarter of an hour at every start
    assert builds.tried == [Backend.CUDA, Backend.CPU]
    failure = next(tmp_path.rglob("failed.txt"))
    assert str(failure) in setup_venv.failed_build(CUDA) and setup_venv.failed_build(CPU) == ""

    builds.failing.clear()
    failure.unlink()
    setup_venv.install_engine(CUDA)
    assert builds.installed == "llama_cpp_python-cuda.whl"


def test_a_gpu_build_whose_driver_has_gone_gives_way_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = Builds(monkeypatch, tmp_path, set())
    setup_venv.install_engine(CUDA)
    builds.loads = False
    setup_venv.install_engine(CUDA)
    assert builds.installed == "llama_cpp_python-cpu.whl"
    assert "libcuda.so.1 is gone" in json.loads((tmp_path / "engine.json").read_text())["why"]
    builds.loads = True
    setup_venv.install_engine(CUDA)
    assert builds.installed == "llama_cpp_python-cuda.whl" and builds.tried == [Backend.CUDA, Backend.CPU]


def test_a_library_that_does_not_load_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup_venv.check_that_it_loads(CPU)
    setup_venv.check_that_it_loads(CUDA)
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'OSError: libcuda.so.1: cannot open shared object file' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(setup_venv.sys, "executable", str(broken))
    with pytest.raises(setup_venv.BuildError, match=r"does not load here: OSError: libcuda.so.1"):
        setup_venv.check_that_it_loads(CUDA)
    setup_venv.check_that_it_loads(CPU)


def test_a_cpu_build_that_fails_ends_the_set_up_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = Builds(monkeypatch, tmp_path, {Backend.CPU})
    for _ in range(2):
        with pytest.raises(SystemExit):
            setup_venv.install_engine(CPU)
    assert builds.tried == [Backend.CPU, Backend.CPU]


def test_only_what_is_installed_from_makes_the_set_up_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_venv, "ROOT", tmp_path)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "src/meshswarm").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("[project]")
    before = setup_venv.state_of_the_checkout(CPU)
    (tmp_path / "src/meshswarm/cli.py").write_text("print('editable: nothing to do')")
    assert setup_venv.state_of_the_checkout(CPU) == before
    assert setup_venv.state_of_the_checkout(CUDA) != before
    for name in ("pyproject.toml", "setup.py", "src/meshswarm/tap.c", "scripts/backends.py"):
        (tmp_path / name).write_text("changed")
        after = setup_venv.state_of_the_checkout(CPU)
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


def test_a_long_line_of_pips_ends_at_a_word_and_says_that_it_goes_on() -> None:
    names = "Installing collected packages: " + ", ".join(f"package-{number}" for number in range(40))
    shown = setup_venv.shortened(names)
    assert len(shown) <= 160
    assert names.startswith(shown.removesuffix(" ...") + ", package-")
    assert setup_venv.shortened("Collecting numpy") == "Collecting numpy"
