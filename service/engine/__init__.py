"""The server without HTTP: loading, queues, steps, metrics."""
