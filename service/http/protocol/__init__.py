"""The Open Inference Protocol v2 for MoE layers: parses and validates requests, builds responses."""

from expertd.service.http.protocol.compression import accepts_gzip, compress, decompress, requested_encoding
from expertd.service.http.protocol.errors import OipError, error_body, oip_error
from expertd.service.http.protocol.json_text import json_of
from expertd.service.http.protocol.request import parse_request
from expertd.service.http.protocol.response import InferResponse, build_response

__all__ = [
    "InferResponse",
    "OipError",
    "accepts_gzip",
    "build_response",
    "compress",
    "decompress",
    "error_body",
    "json_of",
    "oip_error",
    "parse_request",
    "requested_encoding",
]
