"""Starts a real tritonserver over the model repository, and prepares what it serves.

environment    environment variables: names, reading, thread settings
default_pair   fetches and converts the default target; resolves model names
tritonserver   finds the server and matches its Python backend to this Python
repository     renders the model repository with the user's settings
launcher       starts, watches and stops the server
cli            the command line
"""
