"""The server: settings, checkpoints, the MoE layer, the engine that batches for it, and HTTP."""
