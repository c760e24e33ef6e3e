"""The life of a server without HTTP: loading, queues, steps, metrics."""
