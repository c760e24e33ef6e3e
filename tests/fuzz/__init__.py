"""Bytes of every kind for each parser of what callers send; `make fuzz` sends many more than the tests."""
