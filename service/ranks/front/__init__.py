"""The front end: it starts the ranks, shares memory with them and sends them steps."""
