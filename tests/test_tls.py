"""Certificates: named when they are none, renewed without a dropped connection (docs/security.md)."""
from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
from pathlib import Path

import pytest
from isthmus.core.cli.serve import Gate, Signals, _http_server
from isthmus.core.config import Config
from isthmus.core.errors import ConfigError
from isthmus.core.server.tls import Certificate, certificate_of

from .fake_client import make_app

COST = 4  # seconds


def make_pair(folder: Path, name: str) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    cert, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-keyout", key, "-out", cert, "-days", "2", "-subj", f"/CN={name}",
                    "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    return cert, key


def install(pair: tuple[str, str], cert: Path, key: Path) -> None:
    """As certificates are renewed: new files in place of the old ones."""
    for source, target in zip(pair, (cert, key), strict=True):
        shutil.copy(source, f"{target}.new")
        os.replace(f"{target}.new", target)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    return make_pair(folder, "first"), make_pair(folder, "second")


async def serve_tls(certificate: Certificate, made, use) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    gate = Gate(lambda: "")
    gate.app = made.app
    server = _http_server(gate, Config(), certificate)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        await use(listener.getsockname()[1])
    finally:
        server.should_exit = True
        await serving


def test_a_renewed_certificate_is_taken_without_dropping_a_connection(pairs, tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    install(pairs[0], cert, key)
    certificate = Certificate(str(cert), str(key))

    async def connect(port, trusted):
        context = ssl.create_default_context(cafile=trusted)
        return await asyncio.open_connection("127.0.0.1", port, ssl=context)

    async def ask(reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))
        return head.split()[1]

    async def use(port):
        old = await connect(port, pairs[0][0])
        assert await ask(*old) == b"200"
        assert not certificate.reload_if_changed()
        install(pairs[1], cert, key)
        renewing = asyncio.create_task(certificate.watch(0.01))
        while certificate.reload_if_changed() or certificate._seen != certificate._stamp():
            await asyncio.sleep(0.01)
        new = await connect(port, pairs[1][0])
        assert await ask(*new) == b"200" and await ask(*old) == b"200", "the old connection goes on"
        renewing.cancel()
        shutil.copy(pairs[0][1], key)  # half of a renewal: another key than the certificate's
        assert not certificate.reload()
        assert await ask(*await connect(port, pairs[1][0])) == b"200", "what was good stays"
        with pytest.raises(ssl.SSLError):
            await connect(port, pairs[0][0])
        with pytest.raises(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            if not await reader.read(100):
                raise ConnectionResetError
        for _, writer in (old, new):
            writer.close()

    asyncio.run(serve_tls(certificate, make_app(), use))


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no SIGHUP here")
def test_sighup_reads_the_certificate_again(pairs, tmp_path, caplog):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    install(pairs[0], cert, key)
    certificate, loads = Certificate(str(cert), str(key)), []
    certificate._load = lambda: loads.append(1)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}

    async def main():
        renewing = asyncio.create_task(Signals().renew(certificate))
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGHUP)
        while not loads:
            await asyncio.sleep(0.01)
        renewing.cancel()

    try:
        asyncio.run(main())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_files_that_are_no_certificate_are_named(pairs, tmp_path):
    cert, key = pairs[0]
    encrypted = tmp_path / "encrypted.key"
    subprocess.run(["openssl", "pkcs8", "-topk8", "-in", key, "-out", encrypted, "-passout", "pass:x"], check=True,
                   capture_output=True)
    (tmp_path / "empty.pem").touch()
    for pair, words in (((cert, pairs[1][1]), "not that of the certificate"), ((cert, None), "name its file with"),
                        ((str(tmp_path / "empty.pem"), key), "no certificate"), ((cert, str(encrypted)), "passphrase"),
                        ((cert, "/nowhere/key.pem"), "/nowhere/key.pem"), ((None, key), "add --tls-cert")):
        with pytest.raises(ConfigError, match=words):
            certificate_of(*pair)
    context = certificate_of(cert, key).context
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
