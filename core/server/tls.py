"""The server's certificate, which may be renewed while it serves: connections that there are keep theirs."""
from __future__ import annotations

import asyncio
import logging
import os
import ssl
from pathlib import Path

from ..errors import ConfigError, shown

LOOK_S = 5.0  # between two looks at the files

log = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int, int], ...]  # device, inode and time of change of each file


def _no_password() -> str:
    """Instead of asking on the terminal, for a server that may have none."""
    raise ConfigError("the private key is encrypted; give one without a passphrase, readable by the server alone")


class Certificate:
    """A certificate and its key in PEM files. context: for `asyncio`; new handshakes take what was loaded last."""

    def __init__(self, cert: str, key: str | None = None):
        """Raises `ConfigError`, which names the setting, for files that are none."""
        self.cert, self.key = Path(cert).expanduser(), Path(key).expanduser() if key else None
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self._seen = self._stamp()
        self._load()

    def reload(self) -> bool:
        """Take the files as they are now; what was there before stays, and the log says why, if they are no pair."""
        self._seen = self._stamp()
        try:
            self._load()
        except ConfigError as error:
            log.error("the TLS certificate was not renewed: %s", error)
            return False
        log.info("the TLS certificate was read again from %s", self.cert)
        return True

    def reload_if_changed(self) -> bool:
        """`reload`, if one of the files is another than before."""
        return self._stamp() != self._seen and self.reload()

    async def watch(self, pause: float = LOOK_S) -> None:
        """Look at the files again and again, until cancelled: who renews them need not tell."""
        while True:
            await asyncio.sleep(pause)
            await asyncio.to_thread(self.reload_if_changed)

    def _load(self) -> None:
        # Tried apart first: a context that failed half way would have a certificate without its key.
        for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.context):
            try:
                context.load_cert_chain(self.cert, self.key, _no_password)
            except ssl.SSLError as error:
                pair = f"--tls-cert {self.cert}" + (f" and --tls-key {self.key}" if self.key else "")
                wrong = ("the key is not that of the certificate" if error.reason == "KEY_VALUES_MISMATCH" else
                         "the key is missing; name its file with --tls-key" if self._lacks_key() else
                         f"no certificate and key in PEM ({error.reason or 'nothing is there'})")
                raise ConfigError(f"{pair}: {wrong}") from None
            except OSError as error:
                path = next((p for p in (self.cert, self.key) if p and not os.access(p, os.R_OK)), self.cert)
                raise ConfigError(f"TLS: {shown(str(path))} cannot be read: {error.strerror or error}") from None

    def _lacks_key(self) -> bool:
        return self.key is None and b"PRIVATE KEY" not in self.cert.read_bytes()[:1 << 20]

    def _stamp(self) -> Stamp:
        """Empty for files that are not there, as between the two steps of a renewal."""
        try:
            found = [os.stat(path) for path in (self.cert, self.key) if path is not None]
        except OSError:
            return ()
        return tuple((stat.st_dev, stat.st_ino, stat.st_mtime_ns) for stat in found)


def certificate_of(cert: str | None, key: str | None) -> Certificate | None:
    """The certificate that the settings name; None where they name none."""
    if cert is None and key is not None:
        raise ConfigError("--tls-key is the key of a certificate: add --tls-cert, or leave it out")
    return Certificate(cert, key) if cert is not None else None
