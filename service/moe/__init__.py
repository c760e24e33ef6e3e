"""The MoE layer on top of `kernels`: weights, the layer, its CUDA graphs, and the runner for requests.

Import its modules directly: `request` and `shape` do not import torch.
"""
