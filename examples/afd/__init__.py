"""Attention and experts in two processes, with two micro-batches in turn. See ../README.md."""
