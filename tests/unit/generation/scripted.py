"""A step with a scripted target that keeps the contract exactly, and a tokenizer made here: no models needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from adaptive_verification.contract.costs import DraftCost, StepCost
from adaptive_verification.contract.hidden_states import NO_STATES
from adaptive_verification.contract.messages import (
    COUPLED,
    FILL_ONLY,
    NOT_FOLLOWED,
    REJECTION,
    STATUS_NOT_CACHED,
    STATUS_OK,
    StepRequest,
    StepResult,
)
from adaptive_verification.errors import AdaptiveVerificationError
from adaptive_verification.generation.request import GenerationRequest
from adaptive_verification.generation.response import GenerationResponse
from adaptive_verification.generation.sampling_parameters import SamplingParameters

WAIT_SECONDS = 20.0
END_TOKEN = 1
FIRST_BYTE_TOKEN = 2  # token FIRST_BYTE_TOKEN + b is the byte b


def make_byte_tokenizer() -> Tokenizer:
    """Token 0 unused, 1 the end token, then one token for each byte: characters span one to four tokens."""
    alphabet = _byte_alphabet()
    vocabulary = {"<unused>": 0, "<end>": END_TOKEN} | {c: FIRST_BYTE_TOKEN + b for b, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unused>", "<end>"])
    return tokenizer


def _byte_alphabet() -> list[str]:
    """The character that byte-level tokenizers write for each byte (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def byte_tokens(text: str) -> list[int]:
    """The byte tokenizer's tokens of a text."""
    return [FIRST_BYTE_TOKEN + byte for byte in text.encode()]


def scripted_next_token(prefix: list[int]) -> int:
    """A deterministic target: any printable ASCII character, as a function of the whole prefix."""
    state = 17
    for token in prefix:
        state = (state * 31 + token) % 1_000_003
    return FIRST_BYTE_TOKEN + 32 + state % 95


def solo_output(prompt: list[int], num_tokens: int) -> list[int]:
    """What the scripted target says after the prompt."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(scripted_next_token(tokens))
    return tokens[len(prompt) :]


class ScriptedStep:
    """The stages with a scripted target. Checks every rule of the contract that the caller has to keep.

    Some drafts are accepted, depending on the sequence's length. `before` runs first in every step, and may block or
    raise. `loses_cache` says, of a sequence id and the tokens cached for it, whether they are lost now.
    """

    def __init__(
        self,
        max_context_tokens: int,
        next_token: Callable[[list[int]], int] = scripted_next_token,
        acceptance: str = "rejection",
    ) -> None:
        self.next_token = next_token
        self.acceptance = COUPLED if acceptance == "coupled" else REJECTION
        self.max_context_tokens = max_context_tokens
        self.requests: list[StepRequest] = []
        self.caches: dict[int, list[int]] = {}
        self.next_draft_limit = 16
        self.not_followed: set[int] = set()
        self.before: Callable[[StepRequest], None] = lambda request: None
        self.loses_cache: Callable[[int, list[int]], bool] = lambda sequence_id, tokens: False
        self._last_accepted: dict[int, int] = {}

    def __call__(self, request: StepRequest) -> StepResult:
        request.validate()
        self.requests.append(request)
        self.before(request)
        for sequence_id in request.release.tolist():
            self.caches.pop(sequence_id, None)
            self._last_accepted.pop(sequence_id, None)
        outputs: list[list[int]] = []
        statuses, admitted = [], []
        start = 0
        for i, sequence_id in enumerate(request.sequence_id.tolist()):
            count = int(request.token_count[i])
            tokens = request.tokens[start : start + count].tolist()
            start += count
            output, status, num_admitted = self._row(request, i, sequence_id, tokens)
            outputs.append(output)
            statuses.append(status)
            admitted.append(num_admitted)
        return StepResult(
            output_count=_int32([len(output) for output in outputs]),
            status=_int32(statuses),
            drafted_count=request.draft_limit.clamp(min=0),
            admitted_count=_int32(admitted),
            next_draft_limit=_int32([self._next_draft_limit(i) for i in request.sequence_id.tolist()]),
            output_tokens=_int32([token for output in outputs for token in output]),
            log_probs=torch.zeros(sum(map(len, outputs))),
            hidden_start=_int32([0] * len(outputs)),
            hidden_count=_int32([0] * len(outputs)),
            hidden_states=NO_STATES.states,
            step_cost=StepCost(DraftCost(1, 2, 3, 4, 5), 6, 7, len(outputs), len(self.requests), 8).to_tensor(),
        )

    def _next_draft_limit(self, sequence_id: int) -> int:
        return NOT_FOLLOWED if sequence_id in self.not_followed else self.next_draft_limit

    def _row(self, request: StepRequest, i: int, sequence_id: int, tokens: list[int]) -> tuple[list[int], int, int]:
        context_length, draft_limit = int(request.context_length[i]), int(request.draft_limit[i])
        model_draft_limit = int(request.model_draft_limit[i])
        cached = self.caches.get(sequence_id, [])
        if self.loses_cache(sequence_id, cached):
            cached = []
        if len(cached) < context_length:
            self.caches[sequence_id] = []
            self._last_accepted.pop(sequence_id, None)
            return [], STATUS_NOT_CACHED, 0
        prefix = cached[:context_length] + tokens
        assert len(prefix) + max(draft_limit, 0) <= self.max_context_tokens
        self.caches[sequence_id] = prefix
        if draft_limit == FILL_ONLY:
            return [], STATUS_OK, 0
        assert int(request.previous_accepted[i]) == self._last_accepted.get(sequence_id, -1)
        num_admitted = min(draft_limit, model_draft_limit, len(prefix) % 7)
        num_accepted = min(num_admitted, len(prefix) % 4)
        output: list[int] = []
        for _ in range(num_accepted + 1):
            output.append(self.next_token(prefix + output))
        teaches = num_admitted and int(request.acceptance[i]) == self.acceptance
        self._last_accepted[sequence_id] = num_accepted if teaches else -1
        return output, STATUS_OK, num_admitted


class CollectingSink:
    """Keeps what it is sent; `wait` returns when the last response is there."""

    def __init__(self) -> None:
        self.responses: list[GenerationResponse] = []
        self.error: AdaptiveVerificationError | None = None
        self.cancelled = False
        self._done = threading.Event()
        self._first = threading.Event()

    def send(self, response: GenerationResponse, *, final: bool) -> None:
        assert not self._done.is_set(), "a response after the last one"
        self.responses.append(response)
        self._first.set()
        if final:
            self._done.set()

    def fail(self, error: AdaptiveVerificationError) -> None:
        assert not self._done.is_set(), "an error after the last response"
        self.error = error
        self._first.set()
        self._done.set()

    def is_cancelled(self) -> bool:
        return self.cancelled

    def wait(self) -> CollectingSink:
        assert self._done.wait(WAIT_SECONDS), "no last response"
        return self

    def wait_for_first(self) -> CollectingSink:
        assert self._first.wait(WAIT_SECONDS), "no response"
        return self

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def text(self) -> str:
        assert self.error is None, self.error
        return "".join(response.text_output for response in self.responses)

    @property
    def last(self) -> GenerationResponse:
        assert self.error is None, self.error
        return self.responses[-1]

    @property
    def num_output_tokens(self) -> int:
        return sum(response.num_output_tokens for response in self.responses)


def make_request(
    prompt: str | list[int] = "prompt", *, stream: bool = False, echoed_text: str = "", **sampling: Any
) -> GenerationRequest:
    """A request over byte tokens, with 16 output tokens and greedy unless told otherwise."""
    values: dict[str, Any] = {
        "max_tokens": 16,
        "num_draft_tokens": 7,
        "seed": 0,
        "acceptance": "rejection",
        "temperature": 0.0,
    }
    tokens = byte_tokens(prompt) if isinstance(prompt, str) else prompt
    return GenerationRequest(tokens, SamplingParameters(**values | sampling), stream, echoed_text)


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
