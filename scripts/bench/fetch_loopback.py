#!/usr/bin/env python3
"""How fast one peer fetches a file from another on loopback, beside curl and nginx with the same bytes.

    fetch_loopback.py [--mb 500] [--rounds 5] [--quick] [--json]

Plain pieces against HTTP, TLS pieces of a private swarm against HTTPS. Seeder and fetcher are processes of their own,
as nginx and curl are; both sides write the file to one disk. Ours hashes every block on the way, curl checks nothing.
What counts is the time from the first connection to the last byte in the file; starting either program does not.
Needs nginx and curl.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from figures import Figure, arguments, chosen, interleaved, run

from meshswarm.artifacts.merkle import piece_layer
from meshswarm.artifacts.torrent.content import Content, piece_length_of
from meshswarm.artifacts.torrent.session import TorrentSession

HOST = "127.0.0.1"
SECRET = bytes(range(32))
TARGET = 0.5
NGINX = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log; worker_processes 1;
events {{ worker_connections 64; }}
http {{
  access_log off; sendfile on; tcp_nopush on;
  client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder};
  server {{
    listen {host}:{plain}; listen {host}:{tls} ssl;
    ssl_certificate {folder}/cert.pem; ssl_certificate_key {folder}/key.pem; ssl_protocols TLSv1.3;
    root {root};
  }}
}}
"""


def write_random(path: Path, n_bytes: int) -> None:
    with path.open("wb") as file:
        for start in range(0, n_bytes, 1 << 20):
            file.write(secrets.token_bytes(min(1 << 20, n_bytes - start)))


def content_of(path: Path) -> tuple[Content, bytes]:
    length = path.stat().st_size
    root, layer = piece_layer(path, piece_length_of(length))
    return Content(length, root), layer


async def seed(path: Path, folder: Path, secret: bytes | None) -> None:
    """As a process: share `path` until the input ends. The port is the first line of the output."""
    content, layer = content_of(path)
    session = await TorrentSession.start(HOST, secret=secret, folder=folder)
    await session.seed(content, path, layer)
    print(session.port, content.root.hex(), layer.hex(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await session.close()


async def fetch(length: int, root: bytes, layer: bytes, port: int, folder: Path, secret: bytes | None) -> None:
    """As a process: get the whole file, and print the seconds that took."""
    content = Content(length, root)
    session = await TorrentSession.start(HOST, secret=secret, folder=folder)
    torrent = await session.open(content, folder / "model.gguf", layer)
    started = time.perf_counter()
    torrent.connect(HOST, port)
    await torrent.fetch(range(content.n_pieces))
    print(time.perf_counter() - started, flush=True)
    await session.close()


class Seeder:
    """The seeding process."""

    def __init__(self, path: Path, folder: Path, secret: bytes | None) -> None:
        self.length = path.stat().st_size
        self.secret = secret
        command = [sys.executable, __file__, "seed", str(path), str(folder), "tls" if secret else "plain"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port, self.root, self.layer = self._process.stdout.readline().split()

    def fetch_s(self) -> float:
        """Seconds a new peer with an empty folder takes."""
        with tempfile.TemporaryDirectory(prefix="meshswarm-bench-") as folder:
            layer = Path(folder) / "layer"
            layer.write_text(self.layer)
            command = [sys.executable, __file__, "fetch", str(self.length), self.root, str(layer), self.port, folder]
            command.append("tls" if self.secret else "plain")
            return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def write_certificate(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


@contextlib.contextmanager
def nginx(root: Path) -> Iterator[tuple[int, int]]:
    """A server of the files in `root`; gives its ports for HTTP and HTTPS."""
    with tempfile.TemporaryDirectory(prefix="meshswarm-nginx-") as text:
        folder = Path(text)
        write_certificate(folder)
        plain, tls = free_port(), free_port()
        config = folder / "nginx.conf"
        config.write_text(NGINX.format(folder=folder, host=HOST, plain=plain, tls=tls, root=root))
        for path in (folder, root):
            path.chmod(0o755)
        server = subprocess.Popen(["nginx", "-p", text, "-c", str(config)], stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 10
            while True:
                with contextlib.suppress(OSError), socket.create_connection((HOST, tls), 1):
                    break
                if time.monotonic() > deadline:
                    sys.exit(f"nginx did not start: {(folder / 'error.log').read_text()}")
                time.sleep(0.05)
            yield plain, tls
        finally:
            server.terminate()
            server.wait(10)


def curl_s(url: str) -> float:
    with tempfile.TemporaryDirectory(prefix="meshswarm-bench-") as folder:
        command = ["curl", "-sSk", "-o", str(Path(folder) / "model.gguf"), "-w", "%{time_total}", url]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--mb", type=int, default=None, help="size of the file (default: 500)")
    options, report = chosen(parser)
    for program in ("nginx", "curl"):
        if shutil.which(program) is None:
            sys.exit(f"this benchmark needs {program}")
    megabytes = options.mb or (20 if options.quick else 500)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshswarm-bench-")))
        root = folder / "root"
        root.mkdir()
        folder.chmod(0o755)
        path = root / "model.gguf"
        write_random(path, megabytes * 1_000_000)
        path.chmod(0o644)
        plain_port, tls_port = stack.enter_context(nginx(root))
        seeders = {}
        for name, secret in (("plain", None), ("TLS", SECRET)):
            (folder / name).mkdir()
            seeders[name] = Seeder(path, folder / name, secret)
            stack.callback(seeders[name].close)
        times = interleaved(
            {
                "plain": seeders["plain"].fetch_s,
                "curl http": lambda: curl_s(f"http://{HOST}:{plain_port}/model.gguf"),
                "TLS": seeders["TLS"].fetch_s,
                "curl https": lambda: curl_s(f"https://{HOST}:{tls_port}/model.gguf"),
            },
            options.rounds,
        )
        rates = {name: tuple(megabytes / second for second in seconds) for name, seconds in times.items()}
        for ours, theirs in (("plain", "curl http"), ("TLS", "curl https")):
            figure = Figure(
                f"{megabytes} MB from one peer, {ours} pieces", "MB/s", rates[ours], theirs, rates[theirs], TARGET
            )
            report.add(figure, mb=megabytes)
    report.close()


def child(arguments: list[str]) -> None:
    """What the processes that this program starts do."""
    secret = SECRET if arguments[-1] == "tls" else None
    if arguments[0] == "seed":
        asyncio.run(seed(Path(arguments[1]), Path(arguments[2]), secret))
        return
    _, length, root, layer, port, folder, _ = arguments
    hashes_of_pieces = bytes.fromhex(Path(layer).read_text())
    asyncio.run(fetch(int(length), bytes.fromhex(root), hashes_of_pieces, int(port), Path(folder), secret))


if __name__ == "__main__":
    if sys.argv[1:2] in (["seed"], ["fetch"]):
        child(sys.argv[1:])
    else:
        run(main)
