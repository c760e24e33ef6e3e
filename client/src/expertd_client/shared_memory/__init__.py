"""Triton's shared memory extensions: requests stay on HTTP, their tensors are in memory of both sides."""
