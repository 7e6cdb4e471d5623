"""What doctor says of devices: which are used, which were never proved, and why a GPU is left idle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshswarm.commands import doctor
from meshswarm.commands.doctor import Finding, Verdict, examine
from meshswarm.config import Home
from meshswarm.stage.engine import devices
from meshswarm.stage.engine.devices import Device, DeviceKind

CPU = Device(0, "CPU", "a processor", "CPU", DeviceKind.CPU, 8 * 10**9, 16 * 10**9)
CARD = Device(1, "CUDA0", "a card", "CUDA", DeviceKind.GPU, 20 * 10**9, 24 * 10**9)
TWIN = Device(2, "Vulkan0", "a card", "Vulkan", DeviceKind.GPU, 20 * 10**9, 24 * 10**9)


def found(folder: Path, what: str) -> Finding:
    return next(finding for finding in examine(Home(folder)) if finding.what == what)


def test_a_gpu_on_which_nothing_was_proved_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "list_devices", lambda: [CPU, CARD, TWIN])
    card = found(tmp_path, "CUDA0")
    assert card.verdict is Verdict.WARNING and "unproved: whole models" in card.found
    assert "20.0 of 24.0 GB free" in card.found
    assert found(tmp_path, "Vulkan0").found.endswith("not used")
    assert all(finding.what != "GPU" for finding in examine(Home(tmp_path)))


def test_a_proved_gpu_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "list_devices", lambda: [CPU, CARD])
    monkeypatch.setattr(devices, "PROVED_BACKENDS", frozenset({"CPU", "CUDA"}))
    assert found(tmp_path, "CUDA0").verdict is Verdict.OK


@pytest.mark.parametrize(
    ("note", "verdict"),
    [
        ('{"backend": "cpu", "why": "no GPU was found"}', Verdict.OK),
        ('{"backend": "cpu", "why": "MESHSWARM_BACKEND asks for cpu"}', Verdict.OK),
        ('{"backend": "cpu", "why": "a GPU is here, but cuda needs the CUDA tool kit"}', Verdict.WARNING),
        ('{"backend": "cpu", "why": "building for cuda failed: see build.log"}', Verdict.WARNING),
        ('{"why": 5}', Verdict.OK),
        ("damaged", Verdict.OK),
        (None, Verdict.OK),
    ],
)
def test_why_a_gpu_is_idle_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: str | None, verdict: Verdict
) -> None:
    monkeypatch.setattr(devices, "list_devices", lambda: [CPU])
    monkeypatch.setattr(doctor.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(doctor, "_shown_gpus", lambda: "")
    if note is not None:
        (tmp_path / doctor.ENGINE_NOTE).write_text(note)
    finding = found(tmp_path / "home", "GPU")
    assert finding.verdict is verdict
    if verdict is Verdict.WARNING:
        assert json.loads(note or "")["why"] in finding.found and "MESHSWARM_BACKEND" in finding.advice


@pytest.mark.parametrize(
    ("note", "verdict"),
    [
        (None, Verdict.WARNING),
        ('{"backend": "cpu", "why": "no GPU was found"}', Verdict.WARNING),
        ('{"backend": "cpu", "why": "MESHSWARM_BACKEND asks for cpu"}', Verdict.OK),
    ],
)
def test_a_gpu_that_the_set_up_never_saw_is_noticed_unless_nobody_wanted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: str | None, verdict: Verdict
) -> None:
    monkeypatch.setattr(devices, "list_devices", lambda: [CPU])
    monkeypatch.setattr(doctor.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(doctor, "_shown_gpus", lambda: "an AMD GPU")
    if note is not None:
        (tmp_path / doctor.ENGINE_NOTE).write_text(note)
    finding = found(tmp_path / "home", "GPU")
    assert finding.verdict is verdict
    assert ("an AMD GPU" in finding.found) is (verdict is Verdict.WARNING)


@pytest.mark.parametrize(
    ("signs", "name"),
    [
        ((), ""),
        (("dev/dri/renderD128",), "a GPU"),
        (("dev/dri/renderD128", "dev/kfd"), "an AMD GPU"),
        (("dev/dri/renderD128", "proc/driver/nvidia/gpus/0000:01:00.0"), "an NVIDIA GPU"),
    ],
)
def test_gpus_show_themselves_to_the_system(tmp_path: Path, signs: tuple[str, ...], name: str) -> None:
    for sign in signs:
        (tmp_path / sign).mkdir(parents=True)
    assert doctor._shown_gpus(tmp_path) == name


def test_this_machine_has_a_processor(tmp_path: Path) -> None:
    assert found(tmp_path, "CPU").verdict is Verdict.OK
    assert "--threads chooses" in found(tmp_path, "processors").found
