"""HTTP/1.1 to expertd: connections that are kept, one exchange at a time on each, retries."""
