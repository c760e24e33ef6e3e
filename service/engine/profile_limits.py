"""The limits of a recording of steps; imports nothing, because a command's help has them."""

MAX_STEPS, MAX_SECONDS, MAX_BYTES = 256, 60.0, 64 * 1024 * 1024
STEPS, SECONDS = 20, 10.0  # by default
