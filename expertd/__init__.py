"""expertd: a server for the expert layers of Mixture-of-Experts models. `kernels` and `service` are links."""

from importlib.metadata import version

__version__ = version("expertd")
