"""Programs that write files for running the server and reading about it: the dashboard, the documentation."""
