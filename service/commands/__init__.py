"""What `expertd` does, a file for each of its commands; `expertd.service.cli` strings them together."""
