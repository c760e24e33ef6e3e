"""Reads the bodies of the routes that FastAPI serves."""

from fastapi import Request

from expertd.service.http.bodies import BodyReader, number_of_bytes


async def body_of(request: Request, bodies: BodyReader) -> bytes:
    """The request's whole body. Raises as `BodyReader.read` does, and OipError (400)."""
    length = request.headers.get("content-length")
    told = None if length is None else number_of_bytes(length.encode("latin-1"), "Content-Length")
    return await bodies.read(request.receive, told)
