"""The certificate that new connections are shown, from files that are read again when they change."""

import logging
import ssl
from pathlib import Path
from time import monotonic

from expertd.service.settings.certificates import TlsFiles, make_context, read_tls
from expertd.service.settings.parts import TlsSettings
from expertd.service.settings.values import SettingsError

logger = logging.getLogger(__name__)

_CHECK_EVERY_SECONDS = 1.0
_Version = tuple[tuple[int, int, int] | None, ...]  # of each file; None: there is none


class Certificates:
    """What `settings` name; while the files are missing or wrong, what they had before.

    files  to begin with, of another process; None: those on disk, which then raises SettingsError
    """

    def __init__(self, settings: TlsSettings, files: TlsFiles | None = None) -> None:
        self._settings = settings
        self._paths = [path for path in (settings.certificate, settings.key, settings.client_ca) if path]
        self._version: _Version = () if files else self._versions()
        self._is_wrong = False  # what is on disk since the last look
        self._is_logged = False  # that it is
        self.files = read_tls(settings) if files is None else files
        self.context: ssl.SSLContext = make_context(settings, self.files)
        self._check_at = monotonic()

    def refresh(self) -> None:
        """Read the files again if they have changed, at most once a second."""
        if monotonic() >= self._check_at:
            self._check_at = monotonic() + _CHECK_EVERY_SECONDS
            self._check()

    def _check(self) -> None:
        version = self._versions()  # before they are read: a change meanwhile is another version
        if version == self._version and not self._is_wrong:
            return
        try:
            files = read_tls(self._settings)
            context = make_context(self._settings, files)
        except SettingsError as error:
            # Certificate and key may be replaced one after the other, so it is wrong only if it remains so.
            if version == self._version:
                logger.error("%s; the certificate that was read before remains in use", error)
                self._is_logged = True
            self._is_wrong = version != self._version
            self._version = version
            return
        self._version, self._is_wrong = version, False
        if files != self.files:
            self.files, self.context = files, context
            logger.info("tls: %s is read again: new connections use it", self._settings.certificate)
        elif self._is_logged:
            logger.info("tls: %s can be read again, and has not changed", self._settings.certificate)
        self._is_logged = False

    def _versions(self) -> _Version:
        return tuple(_version(path) for path in self._paths)


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
