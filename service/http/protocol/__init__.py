"""The Open Inference Protocol v2 for one kind of model: bytes in, a checked request; a result, bytes out."""

from expertd.service.http.protocol.compression import asked_encoding, compress, decompress
from expertd.service.http.protocol.errors import OipError, error_body, shown
from expertd.service.http.protocol.request import (
    INPUT_DATATYPES,
    OUTPUT,
    InferRequest,
    LayerSpec,
    parse_request,
)
from expertd.service.http.protocol.response import MODEL_VERSION, InferResponse, build_response

__all__ = [
    "INPUT_DATATYPES",
    "MODEL_VERSION",
    "OUTPUT",
    "InferRequest",
    "InferResponse",
    "LayerSpec",
    "OipError",
    "asked_encoding",
    "build_response",
    "compress",
    "decompress",
    "error_body",
    "parse_request",
    "shown",
]
