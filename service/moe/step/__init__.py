"""A step of one layer on its device: its batch, its memory, its launches and graphs, its stages."""
