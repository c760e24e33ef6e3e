"""How many bytes a body may have. JSON is for people, so it has a small limit of its own."""

from dataclasses import dataclass

from expertd.service.inference.errors import RequestError

_HINT = "send tensors in binary, with Inference-Header-Content-Length"


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """The most bytes of a body, compressed and decompressed; `is_json`: all of it is JSON."""

    num_bytes: int
    is_json: bool = False

    def check(self, num_bytes: int, *, is_whole: bool = False, decompressed: bool = False) -> None:
        """Raise RequestError if a body of `num_bytes`, or more unless it `is_whole`, is too large."""
        if num_bytes <= self.num_bytes:
            return
        what = " when decompressed" if decompressed else ""
        got = f"{num_bytes}" if is_whole else f"at least {num_bytes}"
        if not self.is_json:
            text = f"body: expected at most {self.num_bytes} bytes{what}, got {got}"
            raise RequestError(text, reason="body_too_large")
        text = f"JSON: expected at most {self.num_bytes} bytes{what}, got {got}; {_HINT}"
        raise RequestError(text, reason="json_too_large")


def body_limit(max_body_bytes: int, max_json_bytes: int, header_length: int | None) -> BodyLimit:
    """The limit of an infer body; without a header length, all of it is JSON."""
    if header_length is None and max_json_bytes < max_body_bytes:
        return BodyLimit(max_json_bytes, is_json=True)
    return BodyLimit(max_body_bytes)
