"""Tests of gRPC; the product's package is imported first, because it says how gRPC treats fork()."""

import expertd.service.grpc  # noqa: F401
