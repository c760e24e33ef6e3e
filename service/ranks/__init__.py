"""A layer on several devices: one process for each, and the front end that starts them and sends them steps.

`expertd.service.ranks.front.loading.load_ranks` is the entry. docs/ranks.md explains the processes.
"""
