"""Ranks on several nodes: agents that start them, and proxies that stand for them beside the front end."""
