"""The server: settings, protocol, batching, HTTP routes, metrics, and the MoE layer they serve."""

from importlib.metadata import version

__version__ = version("expertd")
