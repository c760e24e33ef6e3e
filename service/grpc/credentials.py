"""TLS for gRPC: the files of HTTPS, also after they have changed."""

from typing import Any

import grpc

from expertd.service.http.certificates import Certificates
from expertd.service.settings.certificates import TlsFiles
from expertd.service.settings.parts import TlsSettings


def credentials(settings: TlsSettings) -> Any:
    """What each new connection uses. Raises SettingsError if the files cannot be used."""
    certificates = Certificates(settings)
    shown = certificates.files

    def changed() -> Any:
        """The configuration of a new connection; None if it is that of the last one."""
        nonlocal shown
        certificates.refresh()
        if certificates.files is shown:
            return None
        shown = certificates.files
        return _configuration(shown)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(shown), changed, require_client_authentication=settings.client_ca is not None
    )


def _configuration(files: TlsFiles) -> Any:
    pair = (files.key.encode(), files.certificate.encode())
    ca = None if files.client_ca is None else files.client_ca.encode()
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=ca)
