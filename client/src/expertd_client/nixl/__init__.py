"""Channels to servers on other machines: a process at each end carries requests and answers over NIXL."""
