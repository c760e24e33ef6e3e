"""Programs that use expertd. See README.md."""
