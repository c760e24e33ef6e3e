"""What a client trusts, and shows of itself, over https."""

import os
import ssl
from typing import TypeAlias

from expertd_client.errors import InvalidRequestError

File: TypeAlias = str | os.PathLike[str]
Certificate: TypeAlias = File | tuple[File, File]


def make_context(ca: File | None, certificate: Certificate | None) -> ssl.SSLContext:
    """TLS 1.2 or newer, with hosts' names checked.

    `ca` None: the file in the variable EXPERTD_CA, or else the system's certificates. `certificate`: one
    file in PEM with a certificate and its key, or two. Raises InvalidRequestError.
    """
    ca = os.environ.get("EXPERTD_CA") or None if ca is None else ca
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:  # also of what is no certificate
        raise _invalid("ca", ca, "a file of certificates in PEM", error) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if certificate is None:
        return context
    try:
        file, key = certificate if isinstance(certificate, tuple) else (certificate, None)
        context.load_cert_chain(file, key, _no_password)
    except (OSError, TypeError, ValueError) as error:
        expected = "a file in PEM with a certificate and its key, or a tuple of two, without a password"
        raise _invalid("certificate", certificate, expected, error) from error
    return context


def _no_password() -> str:
    raise ValueError("a password is needed")


def _invalid(name: str, got: object, expected: str, error: Exception) -> InvalidRequestError:
    return InvalidRequestError(f"{name}: expected {expected}, got {got!r:.200}: {error}")
