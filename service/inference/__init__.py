"""Infer requests, whichever way they come: what they are, and the checks that they pass; no HTTP, no gRPC."""
