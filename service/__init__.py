"""The server: settings, protocol, batching, HTTP routes, metrics, and the MoE layer they serve."""
