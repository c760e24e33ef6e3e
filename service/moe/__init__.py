"""The MoE layer on top of `kernels`: weights, the layer, its CUDA graphs, and the runner that feeds it bytes.

Import its modules: `request` and `shape` load no torch.
"""
