"""Adaptive verification for speculative decoding, without a confidence head, on Triton Inference Server.

The folders follow the data of one decode step:

    generation    text in, text out; the loop that packs all live sequences into one step
    contract      the tensors of one step: names, types, lengths, conversions
    drafting      proposes tokens
    estimation    predicts their acceptance and trims them across the batch
    verification  one ragged forward of the target, lossless acceptance
    forward       the packed forward and its KV cache, used by drafting and verification
    serving       starts tritonserver, prepares the default pair, the command line
"""

__version__ = "0.1.0"
