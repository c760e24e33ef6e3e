"""A rank: it loads its part of every layer, and computes its part of every step."""
