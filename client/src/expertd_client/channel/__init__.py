"""Channels: requests through memory that is shared with a server on the same machine, without HTTP."""
