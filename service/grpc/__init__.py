"""The Open Inference Protocol over gRPC: another way into the same queues, beside HTTP."""
