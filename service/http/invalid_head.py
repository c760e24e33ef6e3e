"""What is wrong with a request's line and headers, for those whom the parser or a check refuses."""

import re

from expertd.service.http.refused import RefusedError
from expertd.service.sentences import shortened, shown

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]*")
_VISIBLE = re.compile(rb"[!-~]*")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_LINE_END = re.compile(rb"[\r\n]")
_VERSION = re.compile(rb"(HTTP|RTSP|ICE)/([0-9.]+)")  # of the protocols that the parser takes for HTTP
_METHODS = {b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"CONNECT", b"OPTIONS", b"TRACE", b"PATCH"}
# A name or an IPv4 address, or an IPv6 address in brackets, and a port (RFC 9110, 7.2; RFC 3986, 3.2.2).
_HOST = re.compile(
    rb"(?:[\w.~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*(?::[0-9]*)?|\[[0-9A-Fa-f:.]+(?:%[\w.~-]+)?\](?::[0-9]*)?"
)


def check_version(head: bytes) -> None:
    """Raise RefusedError for a request line of another protocol or version, as far as it is there."""
    parts = _LINE_END.split(head, 1)[0].split(b" ")
    found = _VERSION.fullmatch(parts[2]) if len(parts) == 3 else None
    if found is None or any(each.startswith(found[0]) for each in (b"HTTP/1.1", b"HTTP/1.0")):
        return
    got = found[2].decode() if found[1] == b"HTTP" and len(found[2]) == 3 else _shown(found[0])
    raise RefusedError(505, f"HTTP version: expected 1.1 or 1.0, got {got}")


def check_host(values: list[bytes], version: str) -> None:
    """Raise RefusedError unless there is one Host, with a valid value (RFC 9112, 3.2); 1.0 needs none."""
    if len(values) != 1 and (values or version == "1.1"):
        raise RefusedError(400, f"Host: expected one header, got {len(values) or 'none'}")
    if values and _HOST.fullmatch(values[0]) is None:
        expected = "a name or an address, with or without a port"
        raise RefusedError(400, f"Host: expected {expected}, got {_shown(values[0])}")


def what_is_wrong(head: bytes, has_target: bool) -> str:
    """What the parser rejects in a head, of which the end may be missing; no values, which may be secret.

    has_target  whether the parser has found the request's target
    """
    line, *fields = head.removesuffix(b"\r").split(b"\r\n")
    parts = line.split(b" ")
    if not all(map(_VISIBLE.fullmatch, parts[1:2])):
        return "a target with a byte that is not allowed"
    if not has_target and (len(parts) > 1 or not fields):
        is_known = parts[0] in _METHODS and len(parts) > 1
        return "a target that is neither a path nor a URL" if is_known else f"the method {_shown(parts[0])}"
    if _LINE_END.search(line) or len(parts) != 3 or not parts[2].startswith(b"HTTP/"):
        return "a request line other than METHOD TARGET VERSION, with CR and LF behind it"
    return _wrong_field(fields) or "a head that is not valid"


def _wrong_field(fields: list[bytes]) -> str | None:
    lengths, codings = [], []
    for number, field in enumerate(fields, 1):
        name, colon, value = field.partition(b":")
        token = _TOKEN.match(name)
        assert token is not None
        if token[0] != name or (colon and not name):
            return f"the header name {_shown(name[: token.end() + 1])}"  # no more: it may be a secret
        if name and not colon and number < len(fields):
            return f"the header {_shown(name)} without a colon"
        if not _VALUE.fullmatch(value):
            return f"a control character in the value of {shortened(name.decode())}"
        if name.lower() == b"content-length":
            lengths.append(value.strip())
        elif name.lower() == b"transfer-encoding":
            codings.append(value.strip())
    if lengths and codings:
        return "Content-Length beside Transfer-Encoding"
    if len(lengths) > 1:
        return f"Content-Length {len(lengths)} times"
    if codings:
        return f"Transfer-Encoding {_shown(b', '.join(codings))}"
    return f"Content-Length {_shown(lengths[0])}" if lengths else None


def _shown(part: bytes) -> str:
    return shown(part.decode("latin-1"))
