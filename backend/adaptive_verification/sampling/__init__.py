"""Exact sampling: noise that depends on nothing but its key, the distribution a request asks for, drawing from it."""
