"""Programs that write files for running the server: the dashboard."""
