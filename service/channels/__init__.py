"""Channels: requests and answers through shared memory, without HTTP; docs/channels.md has the layout."""
