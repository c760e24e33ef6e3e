"""Settings: their definitions, and how they are read from a file, the environment and flags."""
