"""A private swarm between real processes: who has the key is in, who has every address and no key is out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.e2e.client import client_of, wait_until_ready
from tests.e2e.conftest import PeerProcess, StartPeer


def meshswarm(home: Path, *arguments: str, expect: int = 0, stdin: str | None = None, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "meshswarm", "--home", str(home), *arguments],
        capture_output=True, text=True, timeout=60, check=False, input=stdin, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == expect, f"{arguments}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def as_json(home: Path, *arguments: str) -> Any:
    return json.loads(meshswarm(home, *arguments, "--json"))


def answer_of(peer: PeerProcess) -> str:
    model = wait_until_ready(peer.api)
    messages: Any = [{"role": "user", "content": "Name a colour."}]
    made = client_of(peer.api).chat.completions.create(model=model, messages=messages, max_tokens=4, temperature=0)
    return made.choices[0].message.content or ""


def until(what: str, holds: Any) -> None:
    for _ in range(150):
        if holds():
            return
        time.sleep(0.1)
    raise AssertionError(f"not within 15 s: {what}")


def test_two_members_answer_together_and_outsiders_stay_out(
    start_peer: StartPeer, tmp_path: Path, smollm2: Path
) -> None:
    office = f"office-{os.urandom(4).hex()}"
    owner, member, outsider = (tmp_path / name for name in ("owner", "member", "outsider"))
    made = as_json(owner, "swarm", "new", office)
    first = start_peer("--model", str(smollm2), "--layers", "0:15", "--private", home="owner", swarm=office)
    invite = as_json(owner, "swarm", "invite")["invite"]  # names where the owner's peer listens now
    meshswarm(member, "swarm", "join", "-", stdin=f"{invite[:40]}\n{invite[40:].upper()}\n")
    second = start_peer("--model", str(smollm2), "--layers", "15:30", "--private", home="member", swarm=office)
    text = answer_of(second)
    assert text and answer_of(first) == text

    listed = {each["peer_id"]: each for each in as_json(owner, "swarm", "members")["members"]}
    assert listed.keys() == {first.peer_id, second.peer_id}
    assert listed[second.peer_id]["admitted"] and listed[second.peer_id]["connected"]

    # somebody who knows the name and the address, without the key
    stranger = start_peer("--join", first.address, home="outsider", swarm=office, wait=False)
    assert stranger.wait_for("started")["private"] is False
    stranger.wait_for("join-failed")
    assert as_json(outsider, "peers") == [] and stranger.stop() == 0

    # a member whose key is gone does not start, and not as a public peer either
    second.stop()
    key = Path(as_json(member, "swarm", "show")["key_file"])
    kept = key.read_bytes()
    key.unlink()
    for arguments in (("serve", "--swarm", office), ("run", "Hello?", "--swarm", office), ("serve", "--private")):
        said = meshswarm(member, *arguments, expect=1)
        assert "its key file" in said and "is gone" in said and "Traceback" not in said
    assert "say `--swarm" in meshswarm(member, "--auto", expect=1)
    assert not (member / "running.json").exists()

    # the owner expels the member: its key and address help it no more, whatever it is called now
    key.write_bytes(kept)
    key.chmod(0o600)
    assert made["swarm"] == office
    assert as_json(owner, "swarm", "revoke", second.peer_id[:12])["revoked"] == [second.peer_id]
    time.sleep(1.5)  # the owner's running peer looks at its folder every second
    back = start_peer("--join", first.address, "--private", home="member", swarm=office, wait=False)
    back.wait_for("join-failed")
    back.stop()
    (member / "peer.key").unlink()
    renamed = start_peer("--join", first.address, "--private", home="member", swarm=office, wait=False)
    renamed.wait_for("join-failed")
    assert as_json(member, "peers") == []
    members = as_json(owner, "swarm", "members")["members"]
    assert [each["peer_id"] for each in members if each["admitted"]] == [first.peer_id]
