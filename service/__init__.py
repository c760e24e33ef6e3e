"""The server: settings, checkpoints, the MoE layer, the engine that batches its requests, and HTTP."""
