"""The reference backend: plain PyTorch, right on any device and quick on a CPU."""
