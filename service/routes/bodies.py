"""Reads the bodies of the routes that are not hot."""

from fastapi import Request

from service.protocol import OipError


async def read_body(request: Request, limit: int) -> bytes:
    """The request's whole body. Raises OipError (413) as soon as more than `limit` bytes have come."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise OipError(413, f"the body is expected to hold at most {limit} bytes, got more")
        chunks.append(chunk)
    return b"".join(chunks)
