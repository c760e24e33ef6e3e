"""The Open Inference Protocol v2 for one kind of model: bytes in, a checked request; a result, bytes out."""

from expertd.service.http.protocol.compression import accepts_gzip, asked_encoding, compress, decompress
from expertd.service.http.protocol.errors import OipError, error_body
from expertd.service.http.protocol.request import INPUT_DATATYPES, OUTPUT, InferRequest, parse_request
from expertd.service.http.protocol.response import InferResponse, build_response

__all__ = [
    "INPUT_DATATYPES",
    "OUTPUT",
    "InferRequest",
    "InferResponse",
    "OipError",
    "accepts_gzip",
    "asked_encoding",
    "build_response",
    "compress",
    "decompress",
    "error_body",
    "parse_request",
]
