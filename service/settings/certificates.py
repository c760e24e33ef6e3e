"""The files of TLS: read at once, checked, and made into what the connections of a server use."""

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from time import time

from pydantic import BaseModel, ConfigDict

from expertd.service.settings.parts import TlsSettings
from expertd.service.settings.values import SettingsError
from expertd.service.util.files import read_text

_CERTIFICATE = "-----BEGIN CERTIFICATE-----"
_KEY_END = "PRIVATE KEY-----"
_NOT_YET, _EXPIRED = 9, 10  # OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED
_SOON_SECONDS = 14 * 24 * 3600.0


class TlsFiles(BaseModel):
    """The contents of the files; no representation of it shows the key."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    certificate: str
    key: str
    client_ca: str | None

    def __repr__(self) -> str:
        return "TlsFiles(...)"

    __str__ = __repr__


def read_tls(settings: TlsSettings) -> TlsFiles:
    """Read the files that `settings` name. Raises SettingsError."""
    assert settings.certificate is not None
    assert settings.key is not None
    certificate = _pem("certificate", settings.certificate, _CERTIFICATE, "a certificate")
    key = _pem("key", settings.key, _KEY_END, "a private key")
    if "ENCRYPTED" in key:
        raise SettingsError(f"tls.key: {settings.key}: expected a key without a password, got one with")
    client_ca = None
    if settings.client_ca is not None:
        client_ca = _pem("client_ca", settings.client_ca, _CERTIFICATE, "a certificate")
    return TlsFiles(certificate=certificate, key=key, client_ca=client_ca)


def make_context(settings: TlsSettings, files: TlsFiles) -> ssl.SSLContext:
    """What new connections use. Raises SettingsError, which names the files of `settings`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        with _in_memory(files.certificate) as certificate, _in_memory(files.key) as key:
            context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            text = f"expected the key of {settings.certificate}, got another one"
            raise SettingsError(f"tls.key: {settings.key}: {text}") from error
        text = f"{settings.certificate} and {settings.key}: expected a certificate and its key in PEM"
        raise SettingsError(f"tls: {text}, got what OpenSSL cannot use ({_reason(error)})") from error
    if files.client_ca is not None:
        try:
            _trust(context, files.client_ca)
        except ssl.SSLError as error:
            text = f"expected certificates in PEM, got what OpenSSL cannot use ({_reason(error)})"
            raise SettingsError(f"tls.client_ca: {settings.client_ca}: {text}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def validity(settings: TlsSettings) -> tuple[str, bool]:
    """A phrase for how long the certificate is valid, and whether it is for now. Raises SettingsError."""
    files = read_tls(settings)
    make_context(settings, files)
    path = settings.certificate
    server = make_context(settings, files.model_copy(update={"client_ca": None}))
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it is trusted itself
    _trust(client, files.certificate)
    try:
        ends = _end_of(client, server)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _EXPIRED:
            return f"the certificate in {path} has expired: clients refuse it", False
        if error.verify_code == _NOT_YET:
            return f"the certificate in {path} is not valid yet: clients refuse it", False
        return f"the certificate in {path} may be refused by clients: {error.verify_message}", False
    date = datetime.fromtimestamp(ends, UTC).date()
    return f"the certificate in {path} is valid until {date}", ends - time() > _SOON_SECONDS


def _trust(context: ssl.SSLContext, certificates: str) -> None:
    """Add PEM certificates: as a file, because only there OpenSSL takes comments that are not ASCII."""
    with _in_memory(certificates) as path:
        context.load_verify_locations(path)


def _end_of(client_context: ssl.SSLContext, server_context: ssl.SSLContext) -> float:
    """When the server's certificate ends, by a handshake in memory. Raises SSLCertVerificationError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client):
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    found = client.getpeercert()
    assert found
    return ssl.cert_time_to_seconds(str(found["notAfter"]))


def _pem(name: str, path: Path, marker: str, expected: str) -> str:
    try:
        text = read_text(path)
    except ValueError as error:
        raise SettingsError(f"tls.{name}: {error}") from error
    if marker not in text:
        raise SettingsError(f"tls.{name}: {path}: expected {expected} in PEM, got something else")
    return text


@contextmanager
def _in_memory(text: str) -> Iterator[str]:
    """The path of a file that is never on a disk: OpenSSL takes keys from files only."""
    descriptor = os.memfd_create("expertd-tls", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
