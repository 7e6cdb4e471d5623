"""Addresses, sizes and the lock on a peer's folder."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.config import Address, Home, HomeLock, parse_size
from meshswarm.errors import ConfigError


@given(st.ip_addresses().map(str), st.integers(0, 65535))
def test_addresses_survive_the_trip(host: str, port: int) -> None:
    address = Address(host, port)
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", ":80", "::1:80", "host:65536", "host:-1", "a b:80", "[::1]", "a..b:80", "x" * 64 + ":80"],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        Address.parse(text)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("1000B", 1000), ("6GB", 6 * 10**9), ("512MiB", 512 << 20), ("1.5 GiB", 3 << 29), ("2t", 2 * 10**12)],
)
def test_sizes(text: str, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1XB", "1e9", "200"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_a_second_process_cannot_hold_the_same_folder(tmp_path: Path) -> None:
    home = Home(tmp_path / "home").create()
    lock = HomeLock(home)
    imports = "from pathlib import Path; from meshswarm.config import Home, HomeLock"
    program = f"{imports}; HomeLock(Home(Path({str(home.root)!r})))"
    second = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "already running" in second.stderr
    lock.release()
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        Home(tmp_path / "file" / "home").create()


def test_a_folder_whose_lock_cannot_be_opened_is_a_clear_error(tmp_path: Path) -> None:
    home = Home(tmp_path / "home").create()
    (home.root / "lock").mkdir()
    with pytest.raises(ConfigError, match="cannot be used"):
        HomeLock(home)


def test_only_one_hosts_ip_address_with_a_port_can_be_dialled_by_strangers() -> None:
    assert all(Address(host, 80).is_dialable for host in ("10.0.0.1", "127.0.0.1", "2001:db8::1"))
    assert not any(Address(host, 80).is_dialable for host in ("a.example", "0.0.0.0", "::", "224.0.0.1", "fe80::1%2"))
    assert not Address("10.0.0.1", 0).is_dialable
