"""The registry of backends. Each is a folder of `kernels/backends` with this name."""

BACKENDS = ("hopper", "reference")
"""In the order in which "auto" looks for one that can run."""
