"""The certificates of tests/certificates, which its make.sh has made once: tests need no program for it."""

import ssl
from pathlib import Path

from expertd.service.settings.certificates import make_context, read_tls
from expertd.service.settings.parts import TlsSettings
from tests.paths import ROOT

FOLDER = ROOT / "tests/certificates"
CA = FOLDER / "ca.pem"
TLS = {"certificate": str(FOLDER / "server.pem"), "key": str(FOLDER / "server.key")}


def load_tls(settings: TlsSettings) -> ssl.SSLContext:
    """A server's context with the files that `settings` name. Raises SettingsError."""
    return make_context(settings, read_tls(settings))


def client_context(certificate: str | None = None) -> ssl.SSLContext:
    """A client that trusts the tests' CA, and shows the certificate of this name."""
    context = ssl.create_default_context(cafile=CA)
    if certificate is not None:
        context.load_cert_chain(FOLDER / f"{certificate}.pem", FOLDER / f"{certificate}.key")
    return context


def install(name: str, folder: Path) -> None:
    """Replace `tls.pem` and `tls.key` in `folder` by the certificate of this name and its key."""
    for suffix in ("pem", "key"):
        new = folder / f"new.{suffix}"
        new.write_bytes((FOLDER / f"{name}.{suffix}").read_bytes())
        new.replace(folder / f"tls.{suffix}")


def serial_of(sock: ssl.SSLSocket) -> str:
    """The serial number of the certificate that the server has shown."""
    found = sock.getpeercert()
    assert found
    return str(found["serialNumber"])
