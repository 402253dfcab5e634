"""Drives the decode step itself: a loop of one's own over `speculative_step`, with tokens in and tokens out.

For programs that schedule their own sequences. One request carries one row for each sequence; the contract is described
in backend/adaptive_verification/contract/messages.py. Any client in any language can do this: the tensors are plain,
and one with several lines has in each of them a field of all rows.

    python client_examples/step_client.py "The capital of France is" "One, two, three, four,"
"""

from __future__ import annotations

import argparse
import secrets
from dataclasses import dataclass

import numpy as np
import torch
import tritonclient.grpc as triton
from transformers import AutoTokenizer

from adaptive_verification.contract import NO_LABEL, REJECTION, STATUS_NOT_CACHED, STATUS_OK, StepRequest, StepResult
from adaptive_verification.contract.hidden_states import NO_STATES, RowStates, for_rows, of_rows
from adaptive_verification.contract.wire import from_numpy, to_numpy
from adaptive_verification.serving.default_pair import resolve_model

NUMPY_TO_TRITON = {
    np.dtype(np.int32): "INT32",
    np.dtype(np.float32): "FP32",
    np.dtype(np.uint64): "UINT64",
    np.dtype(np.uint8): "UINT8",
}


@dataclass
class Sequence:
    """A prompt and what followed it."""

    sequence_id: int
    tokens: list[int]
    end: int
    """The length at which to stop."""
    confirmed: int = 0
    """How many of the tokens the stages were told."""
    model_draft_limit: int = 16
    """How deep the last step advised to draft with the drafting model; what can be looked up costs no drafting."""
    hidden_states: RowStates = NO_STATES
    """What the last step gave for the drafter, to be sent with the next one."""


def run_step(client: triton.InferenceServerClient, request: StepRequest) -> StepResult:
    """One decode step over gRPC."""
    inputs = []
    for name, array in to_numpy(request.validate()).items():
        tensor = triton.InferInput(name, list(array.shape), NUMPY_TO_TRITON[array.dtype])
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return from_numpy(StepResult, client.infer("speculative_step", inputs).as_numpy)


def request_for(sequences: list[Sequence], max_drafts: int, release: list[int]) -> StepRequest:
    """Greedy decoding of every sequence: each sends what the stages have not seen yet."""
    n = len(sequences)
    new_tokens = [sequence.tokens[sequence.confirmed :] for sequence in sequences]
    limits = [min(max_drafts, sequence.end - len(sequence.tokens) - 1) for sequence in sequences]

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return StepRequest(
        sequence_id=torch.tensor([sequence.sequence_id for sequence in sequences], dtype=torch.int64),
        context_length=int32([sequence.confirmed for sequence in sequences]),
        token_count=int32([len(tokens) for tokens in new_tokens]),
        tokens=int32([token for tokens in new_tokens for token in tokens]),
        draft_limit=int32(limits),
        model_draft_limit=int32([sequence.model_draft_limit for sequence in sequences]),
        temperature=torch.zeros(n),
        top_p=torch.ones(n),
        top_k=int32([0] * n),
        seed=torch.zeros(n, dtype=torch.int64),
        acceptance=int32([REJECTION] * n),
        wants_log_probs=int32([0] * n),
        previous_accepted=int32([NO_LABEL] * n),  # only the server's own front may teach the estimator
        previous_cost=torch.empty(0),
        **for_rows([sequence.hidden_states for sequence in sequences]),
        release=torch.tensor(release, dtype=torch.int64),
        evidence_key=torch.empty(0, dtype=torch.int64),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--target", default="default", help="the server's target, for its tokenizer")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--max-drafts", type=int, default=4)
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(arguments.target))
    client = triton.InferenceServerClient(arguments.url)
    sequences = []
    for prompt in arguments.prompts:
        tokens = tokenizer(prompt)["input_ids"]
        # any number that nobody else uses; the stages know a sequence by it
        sequences.append(Sequence(secrets.randbits(62), tokens, end=len(tokens) + arguments.max_tokens))
    live = list(sequences)
    ended: list[int] = []
    while live or ended:
        result = run_step(client, request_for(live, arguments.max_drafts, release=ended))
        ended = []
        outputs = result.output_tokens.split(result.output_count.tolist())
        advice = result.next_draft_limit.tolist()
        for sequence, states in zip(live, of_rows(result), strict=True):
            sequence.hidden_states = states
        for sequence, status, output, limit in zip(list(live), result.status.tolist(), outputs, advice, strict=True):
            if status == STATUS_NOT_CACHED:
                sequence.confirmed = 0  # a stage lost its cache: send everything again
                continue
            if status != STATUS_OK:
                raise SystemExit(f"sequence {sequence.sequence_id} ended with status {status}")
            sequence.confirmed = len(sequence.tokens)
            sequence.model_draft_limit = max(0, limit)  # -1: no model drafts for it now
            sequence.tokens += output.tolist()
            if tokenizer.eos_token_id in output.tolist():
                sequence.end = min(sequence.end, sequence.tokens.index(tokenizer.eos_token_id, sequence.confirmed))
            if len(sequence.tokens) >= sequence.end:
                live.remove(sequence)
                ended.append(sequence.sequence_id)
    for sequence in sequences:
        print(tokenizer.decode(sequence.tokens[: sequence.end], skip_special_tokens=True))


if __name__ == "__main__":
    main()
