"""The packed forward of a causal language model and its bounded KV cache; the drafter and the verifier both use it."""
