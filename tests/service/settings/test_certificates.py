"""The files of TLS: each mistake is one sentence, which names the file."""

import re
import ssl
from pathlib import Path

import pytest

from expertd.service.settings.certificates import read_tls, validity
from expertd.service.settings.parts import TlsSettings
from expertd.service.settings.values import SettingsError
from tests.service.apps import tiny_settings
from tests.service.certificates import CA, FOLDER, load_tls

SERVER, KEY = FOLDER / "server.pem", FOLDER / "server.key"


def given(certificate: Path = SERVER, key: Path = KEY, client_ca: Path | None = None) -> TlsSettings:
    return TlsSettings(certificate=certificate, key=key, client_ca=client_ca)


def mistake(settings: TlsSettings) -> str:
    with pytest.raises(SettingsError) as caught:
        load_tls(settings)
    (found,) = caught.value.mistakes
    return found


def test_a_context_wants_tls_1_2_or_newer_and_certificates_only_with_a_ca() -> None:
    context = load_tls(given())
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.verify_mode is ssl.CERT_NONE
    assert load_tls(given(client_ca=CA)).verify_mode is ssl.CERT_REQUIRED


def test_files_may_have_comments_that_are_not_ascii(tmp_path: Path) -> None:
    commented = {name: tmp_path / name for name in ("certificate", "key", "client_ca")}
    for path, source in zip(commented.values(), (SERVER, KEY, CA), strict=True):
        path.write_text(f"# Autorité\n{source.read_text()}")
    assert load_tls(given(**commented)).verify_mode is ssl.CERT_REQUIRED
    text = f"the certificate in {commented['certificate']} is valid until 2120-01-01"
    assert validity(given(**commented)) == (text, True)
    expired = FOLDER / "expired.pem"
    text = f"the certificate in {expired} has expired: clients refuse it"
    assert validity(given(certificate=expired)) == (text, False)


MISSING, SECOND = FOLDER / "missing.pem", FOLDER / "second.key"
UNREAD = f"{MISSING}: cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (given(certificate=MISSING), f"tls.certificate: {UNREAD}"),
        (given(key=MISSING), f"tls.key: {UNREAD}"),
        (given(client_ca=MISSING), f"tls.client_ca: {UNREAD}"),
        (given(KEY), f"tls.certificate: {KEY}: expected a certificate in PEM, got something else"),
        (given(key=CA), f"tls.key: {CA}: expected a private key in PEM, got something else"),
        (given(client_ca=KEY), f"tls.client_ca: {KEY}: expected a certificate in PEM, got something else"),
        (given(key=SECOND), f"tls.key: {SECOND}: expected the key of {SERVER}, got another one"),
    ],
)
def test_files_that_cannot_be_used_are_named(settings: TlsSettings, expected: str) -> None:
    assert mistake(settings) == expected


def test_damaged_files_are_named(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.pem"
    damaged.write_text(SERVER.read_text().replace("M", "-", 20))
    assert mistake(given(certificate=damaged)).startswith(
        f"tls: {damaged} and {KEY}: expected a certificate and its key in PEM, got what OpenSSL cannot use ("
    )
    assert mistake(given(client_ca=damaged)).startswith(f"tls.client_ca: {damaged}: expected certificates")


def test_a_key_with_a_password_is_refused(tmp_path: Path) -> None:
    locked = tmp_path / "locked.key"
    locked.write_text(KEY.read_text().replace("PRIVATE KEY", "ENCRYPTED PRIVATE KEY"))
    assert mistake(given(key=locked)) == f"tls.key: {locked}: expected a key without a password, got one with"


def test_no_representation_shows_the_key() -> None:
    secret = KEY.read_text().splitlines()[1]
    files = read_tls(given())
    assert secret in files.model_dump_json()
    assert secret not in f"{files!r} {files}"


@pytest.mark.parametrize(
    ("tls", "expected"),
    [
        ({"certificate": "a"}, "tls.key: expected a path with tls.certificate, got null"),
        ({"key": "a"}, "tls.certificate: expected a path with tls.key, got null"),
        ({"client_ca": "a"}, "tls.key: expected a path with tls.client_ca, got null"),
    ],
)
def test_half_of_the_settings_is_refused(tls: dict[str, str], expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected.removeprefix("tls."))):
        tiny_settings(tls=tls)


def test_a_unix_socket_has_no_tls() -> None:
    with pytest.raises(ValueError, match=r"tls: expected host and port, got uds /run/e\.sock"):
        tiny_settings(tls={"certificate": "a", "key": "b"}, uds="/run/e.sock")
