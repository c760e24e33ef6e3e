"""A soak test of a real server: `python -m tests.soak`, or `make soak`."""
