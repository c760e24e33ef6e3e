"""Channels: requests and answers through shared memory, laid out as docs/internals/channels.md says."""
