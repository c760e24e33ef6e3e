"""Settings: what can be set, and reading it from file, environment and flags."""
