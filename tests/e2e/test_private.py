"""A private swarm between real processes: who has the key is in, who has every address and no key is out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.client import client_of, wait_until_ready
from tests.e2e.conftest import PeerProcess, StartPeer
from typer.testing import CliRunner

from meshswarm.cli import app


def swarm(home: Path, *arguments: str, stdin: str | None = None) -> Any:
    """`meshswarm swarm ... --json`, in this process: the peers are the ones that have to be real here."""
    done = CliRunner().invoke(app, ["--home", str(home), "swarm", *arguments, "--json"], input=stdin)
    assert done.exit_code == 0, f"{arguments}: {done.output} {done.exception}"
    return json.loads(done.stdout)


def answer_of(peer: PeerProcess) -> str:
    model = wait_until_ready(peer.api)
    messages: Any = [{"role": "user", "content": "Name a colour."}]
    made = client_of(peer.api).chat.completions.create(model=model, messages=messages, max_tokens=4, temperature=0)
    return made.choices[0].message.content or ""


def test_members_answer_together_and_nobody_else_gets_in(start_peer: StartPeer, tmp_path: Path, smollm2: Path) -> None:
    office = f"office-{os.urandom(4).hex()}"
    owner, member = tmp_path / "owner", tmp_path / "member"
    swarm(owner, "new", office)
    served = ("--private", "--model", str(smollm2), "--layers")
    first = start_peer(*served, "0:15", home="owner", swarm=office, wait=False)
    address = first.wait_for("started")["address"]
    invite = swarm(owner, "invite")["invite"]  # names where the owner's peer listens now
    swarm(member, "join", "-", stdin=f"{invite[:40]}\n{invite[40:].upper()}\n")
    second = start_peer(*served, "15:30", home="member", swarm=office, wait=False)
    stranger = start_peer("--join", address, home="outsider", swarm=office, wait=False)  # all but the key
    first.ready, second.ready = first.wait_for("ready"), second.wait_for("ready")
    text = answer_of(second)
    assert text and answer_of(first) == text
    assert stranger.wait_for("started")["private"] is False and stranger.wait_for("join-failed")
    guest = tmp_path / "guest"
    swarm(guest, "join", "--as", "work", invite)
    asked = [sys.executable, "-m", "meshswarm", "--home", str(guest), "run", "Name a colour.", "--private", "--json"]
    done = subprocess.run(
        [*asked, "--max-tokens", "4", "--temperature", "0"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and json.loads(done.stdout)["text"] == text, done.stdout + done.stderr
    listed = {each["peer_id"]: each for each in swarm(owner, "members")["members"]}
    assert listed.keys() >= {first.peer_id, second.peer_id} and len(listed) == 3
    assert listed[second.peer_id]["admitted"] and listed[second.peer_id]["connected"]

    # the owner expels the member while both run: it is closed out at once
    assert swarm(owner, "revoke", second.peer_id[:12])["revoked"] == [second.peer_id]
    notices = [first.wait_for("notice")["message"] for _ in range(2)]
    assert any("has changed its key" in notice for notice in notices)
    assert any(f"expelled peer {second.peer_id[:8]}" in notice for notice in notices)
    expelled = next(each for each in swarm(owner, "members")["members"] if each["peer_id"] == second.peer_id)
    assert not expelled["admitted"] and not expelled["connected"]

    # a member whose key is gone does not start, and not as a public peer either
    second.stop()
    Path(swarm(member, "show")["key_file"]).unlink()
    lost = start_peer("--join", address, home="member", swarm=office, wait=False)
    assert lost.process.wait(timeout=30) == 1
    said = json.loads(lost.lines.get(timeout=5) or "")
    assert said.keys() == {"error"} and "is private and its key file" in said["error"]
