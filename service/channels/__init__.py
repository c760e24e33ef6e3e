"""Channels: requests and answers through shared memory, without HTTP; docs/internals/channels.md has the layout."""
