"""HTTP/1.1 to expertd: connections that are kept, one exchange at a time on each, retries.

What a call does is written once, as generators that yield what they wait for (`waits`). `blocking` and
`events` wait for it in a thread and in an asyncio event loop.
"""
