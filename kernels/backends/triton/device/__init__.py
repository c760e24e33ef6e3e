"""What runs on the GPU, in Triton: imported only where Triton is installed."""
