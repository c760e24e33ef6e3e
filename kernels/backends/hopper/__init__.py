"""The Hopper backend: kernels compiled just in time, their variants and how they are launched."""
