"""How many SM partitions there may be, in a file as in a call, and how long their names."""

MAX_PARTITIONS = 32
MAX_NAME_LENGTH = 64  # characters
