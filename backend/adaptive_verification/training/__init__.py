"""Training a hidden-state drafter for a target.

The data goes: `jobs` (what the target is to continue) -> `collection` (it does, and its hidden states are kept) ->
`shards` (on disk) -> `batches` -> `trainer` (against `objective`) -> `evaluation` -> `drafter_files`. Nothing here runs
in a server.
"""
