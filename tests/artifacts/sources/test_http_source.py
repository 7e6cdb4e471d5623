"""One file on real servers: redirects, secrets, TLS, exact ranges."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.artifacts.sources.web_server import Quirk, WebServer

from meshswarm.artifacts.sources.faults import ChangedError, NoRangesError, PassingError, SourceError
from meshswarm.artifacts.sources.http_source import HttpSource, Patience
from meshswarm.artifacts.sources.url_rules import UrlRules

DATA = bytes(range(256)) * 4096
PATH = "/a.gguf"
SECRET = {"authorization": "Bearer nobody-may-see-this"}


async def test_ranges_are_exact(web: WebServer) -> None:
    web.put(PATH, DATA)
    async with HttpSource(web.url(PATH)) as source:
        file = await source.probe()
        assert (file.length, file.accepts_ranges) == (len(DATA), True) and file.etag == web.files[PATH].etag
        for start, stop in ((0, 1), (5, 70_000), (len(DATA) - 3, len(DATA))):
            assert await source.read(start, stop, file) == DATA[start:stop]
        with pytest.raises(SourceError, match="gives 5 bytes where 10 were asked for"):
            await source.read(len(DATA) - 5, len(DATA) + 5, file)
        with pytest.raises(ChangedError, match="has no such bytes"):
            await source.read(len(DATA), len(DATA) + 5, file)
        web.put(PATH, DATA[::-1])
        with pytest.raises(ChangedError, match="has changed"):
            await source.read(5, 10, file)
        web.put(PATH, DATA, has_ranges=False)
        assert (await source.probe()).accepts_ranges is False
        for start in (0, 5):
            with pytest.raises(NoRangesError if start else SourceError, match="does not give parts of a file"):
                await source.read(start, 10)


async def test_a_slow_reader_is_not_a_stalling_server(web: WebServer) -> None:
    web.put(PATH, DATA)
    n_read = 0
    async with HttpSource(web.url(PATH), patience=Patience(stall_s=0.4)) as source, source.open(0) as body:
        async for chunk in body.chunks():
            n_read += len(chunk)
            if n_read in (len(chunk), len(DATA)):
                await asyncio.sleep(0.6)
    assert n_read == len(DATA)


async def test_secrets_are_not_sent_on_and_a_signed_address_is_renewed(web: WebServer, cdn: WebServer) -> None:
    cdn.put("/blob", DATA)
    web.put("/step", DATA, always=Quirk(location=cdn.url("/blob?Signature=1")))
    web.put(PATH, DATA, always=Quirk(status=307, location="/step"))
    async with HttpSource(web.url(PATH), SECRET) as source:
        assert await source.read(3, 9) == DATA[3:9]
        assert await source.read(9, 12) == DATA[9:12]
        assert len(web.seen) == 2, "the second read goes straight to where the first ended"
        cdn.files["/blob"].quirks.append(Quirk(status=403))
        assert await source.read(12, 20) == DATA[12:20]
    assert all("authorization" in seen.headers for seen in web.seen) and len(web.seen) == 4
    assert len(cdn.seen) == 4 and not any("authorization" in seen.headers for seen in cdn.seen)


async def test_redirects_that_lead_nowhere_end(web: WebServer) -> None:
    web.put(PATH, DATA, always=Quirk(location=PATH))
    async with HttpSource(web.url(PATH)) as source:
        with pytest.raises(SourceError, match="was reached over 5 redirects and sends on"):
            await source.probe()
        assert len(web.seen) == 6
        web.put(PATH, DATA, always=Quirk(status=302))
        with pytest.raises(SourceError, match="sends on to nowhere"):
            await source.probe()
        web.put(PATH, DATA, always=Quirk(location="file:///etc/passwd"))
        with pytest.raises(SourceError, match="must be https://HOST"):
            await source.probe()


async def test_nobody_there_and_nobody_who_answers(web: WebServer) -> None:
    async with HttpSource("http://127.0.0.1:9/a.gguf") as source:
        with pytest.raises(PassingError, match="cannot be reached"):
            await source.probe()
    listener = await asyncio.start_server(lambda _reader, _writer: asyncio.sleep(30), "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with HttpSource(f"http://127.0.0.1:{port}/a", patience=Patience(connect_s=1, stall_s=0.2)) as source:
        with pytest.raises(PassingError, match="does not answer"):
            await source.probe()
    listener.close()
    async with HttpSource("https://name.invalid/a.gguf", rules=UrlRules(is_strangers=True)) as source:
        with pytest.raises(PassingError, match=r"the name name\.invalid is not found"):
            await source.probe()


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[tuple[WebServer, Path]]:
    """A server with a certificate for `localhost`, and the file of the CA that made it."""
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
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = tmp_path / "ca.pem"
    pem.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    secret = tmp_path / "key.pem"
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    secret.write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, secret)
    server = WebServer(tls=context)
    server.put(PATH, DATA)
    yield server, pem
    server.close()


@pytest.mark.parametrize("rules", [UrlRules(), UrlRules(is_strangers=True, allow_local=True)])
async def test_a_server_must_prove_its_name(
    secure: tuple[WebServer, Path], monkeypatch: pytest.MonkeyPatch, rules: UrlRules
) -> None:
    """Also where the address is dialled that was checked, and not looked up again."""
    server, pem = secure
    url = f"https://localhost:{server.port}{PATH}"
    async with HttpSource(url, rules=rules) as source:
        with pytest.raises(SourceError, match="cannot prove that it is localhost") as caught:
            await source.probe()
        assert not isinstance(caught.value, PassingError)
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    async with HttpSource(url, rules=rules) as source:
        assert await source.read(1, 5) == DATA[1:5]
    assert server.seen[-1].headers["host"] == f"localhost:{server.port}"
    async with HttpSource(f"https://127.0.0.1:{server.port}{PATH}", rules=rules) as source:
        with pytest.raises(SourceError, match=r"cannot prove that it is 127\.0\.0\.1"):
            await source.probe()


async def test_encryption_is_not_given_up(
    secure: tuple[WebServer, Path], web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, pem = secure
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    web.put(PATH, DATA)
    server.put(PATH, DATA, always=Quirk(location=web.url(PATH)))
    async with HttpSource(f"https://localhost:{server.port}{PATH}") as source:
        with pytest.raises(SourceError, match="which is not encrypted: it is not followed"):
            await source.probe()
    assert web.seen == []


async def test_a_stranger_may_not_aim_inwards(web: WebServer) -> None:
    web.put(PATH, DATA)
    for host in ("127.0.0.1", "localhost"):
        async with HttpSource(f"http://{host}:{web.port}{PATH}", rules=UrlRules(is_strangers=True)) as source:
            with pytest.raises(SourceError, match=r"is at the local address .* must be public"):
                await source.probe()
    assert web.seen == []
