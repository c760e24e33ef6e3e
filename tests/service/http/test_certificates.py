"""Files of TLS that change while a server runs."""

import logging
from pathlib import Path

import pytest

from expertd.service.http import certificates
from expertd.service.http.certificates import Certificates
from expertd.service.settings.certificates import TlsFiles
from expertd.service.settings.parts import TlsSettings
from tests.service.certificates import FOLDER, install


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which only a test moves on."""
    time = [100.0]
    monkeypatch.setattr(certificates, "monotonic", lambda: time[0])
    return time


@pytest.fixture
def settings(tmp_path: Path) -> TlsSettings:
    install("server", tmp_path)
    return TlsSettings(certificate=tmp_path / "tls.pem", key=tmp_path / "tls.key")


def looked(found: Certificates, clock: list[float]) -> TlsFiles:
    """The files after a second."""
    clock[0] += 1
    found.refresh()
    return found.files


def test_changed_files_are_read_again(
    tmp_path: Path, settings: TlsSettings, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    found = Certificates(settings)
    first, context = found.files, found.context
    assert looked(found, clock) is first
    assert found.context is context
    (tmp_path / "tls.pem").write_bytes((FOLDER / "second.pem").read_bytes())
    assert looked(found, clock) is first, "files may be replaced one after the other"
    install("second", tmp_path)
    found.refresh()
    assert found.files is first, "looked at within the last second"
    assert looked(found, clock).certificate == (FOLDER / "second.pem").read_text()
    second = found.context
    assert second is not context
    (tmp_path / "tls.pem").touch()
    looked(found, clock)
    assert found.context is second, "the same files"
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_wrong_files_are_reported_once_and_not_used(
    tmp_path: Path, settings: TlsSettings, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    found = Certificates(settings)
    before, context = found.files, found.context
    (tmp_path / "tls.key").write_text("nothing")
    for _ in range(4):
        assert looked(found, clock) is before
    (tmp_path / "tls.pem").unlink()
    for _ in range(4):
        assert looked(found, clock) is before
    assert found.context is context
    remains = "; the certificate that was read before remains in use"
    assert [record.getMessage() for record in caplog.records] == [
        f"tls.key: {tmp_path}/tls.key: expected a private key in PEM, got something else{remains}",
        f"tls.certificate: {tmp_path}/tls.pem: cannot be read: No such file or directory{remains}",
    ]
    install("second", tmp_path)
    assert looked(found, clock) is not before


def test_a_process_begins_with_what_another_one_has(
    tmp_path: Path, settings: TlsSettings, clock: list[float]
) -> None:
    known = Certificates(settings).files
    (tmp_path / "tls.key").unlink()
    found = Certificates(settings, known)
    assert looked(found, clock) == known
    install("second", tmp_path)
    assert looked(found, clock) != known
