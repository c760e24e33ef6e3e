"""Measures a running server, as `expertd-client bench`.

In a closed loop each connection sends its next request when the last one is answered. In an open loop
(--rate) requests are due at random times whatever the server does, and latency counts from when each was due.
"""
