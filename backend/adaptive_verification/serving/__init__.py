"""Starts a real tritonserver over the model repository, and prepares what it serves.

environment    environment variables: names, reading, thread settings
default_pair   fetches and converts the default target; resolves model names
tritonserver   finds the server and matches its Python backend to this Python
repository     renders the model repository with the user's settings
launcher       starts, watches and stops the server
metrics        metrics of the stages at the server's /metrics
cli            the command line
state_commands, state_table, state_plot     ... about what the estimator has learned
trace_commands                              ... about recorded traces
"""
