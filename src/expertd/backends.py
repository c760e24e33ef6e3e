"""The registry of backends. Each names a folder of `kernels/backends`."""

BACKENDS = ("hopper", "reference")
"""The order in which "auto" tries them."""
