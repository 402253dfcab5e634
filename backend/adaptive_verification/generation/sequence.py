"""One sequence that is being decoded: its tokens, and how many of them the stages have seen.

Owned by the engine's loop. Knows one sequence; not the others, nor how text is made of its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from adaptive_verification.contract.hidden_states import NO_STATES, RowStates
from adaptive_verification.contract.messages import NO_LABEL
from adaptive_verification.generation.request import GenerationRequest
from adaptive_verification.generation.response import FinishReason
from adaptive_verification.generation.text_stream import TextStream

MAX_REFILLS_WITHOUT_PROGRESS = 3


@dataclass(eq=False)
class Sequence:
    """A prompt and its output so far."""

    id: int
    request: GenerationRequest
    stream: TextStream
    max_context_tokens: int
    max_draft_tokens: int
    submitted_s: float
    """When, by the scheduler's clock."""
    tokens: list[int] = field(init=False)
    max_length: int = field(init=False)
    """Prompt and output tokens at which it ends."""
    context_length: int = field(init=False, default=0)
    """Tokens that the stages have computed."""
    fill_length: int = field(init=False)
    """Tokens before which the sequence fills the caches under the prompt budget; from there on it decodes."""
    model_draft_limit: int = field(init=False)
    """How deep the stages advised to draft with a model in the next step."""
    previous_accepted: int = field(init=False, default=NO_LABEL)
    hidden_states: RowStates = field(init=False, default=NO_STATES)
    """The target's, as the last step gave them, for the drafter in the next one."""
    has_run: bool = field(init=False, default=False)
    """Whether the stages may hold something of it."""
    refills_without_progress: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        prompt, sampling = self.request.prompt_tokens, self.request.sampling
        self.tokens = list(prompt)
        self.fill_length = len(prompt)
        self.max_length = min(len(prompt) + sampling.max_tokens, self.max_context_tokens)
        self.max_draft_tokens = self.model_draft_limit = min(self.max_draft_tokens, sampling.num_draft_tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - len(self.request.prompt_tokens)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that the stages have not seen."""
        return len(self.tokens) - self.context_length

    @property
    def is_filling(self) -> bool:
        return self.context_length < self.fill_length

    @property
    def draft_limit(self) -> int:
        """Most drafts of the next step: the one token after them must still fit, too."""
        return max(0, min(self.max_draft_tokens, self.max_length - len(self.tokens) - 1))

    def append_output(self, tokens: list[int], end_token_ids: frozenset[int]) -> tuple[list[int], FinishReason | None]:
        """Takes a step's output. Returns the tokens up to the sequence's end, and why it ends there, if it does."""
        self.refills_without_progress = 0
        for i, token in enumerate(tokens):
            if token in end_token_ids:
                tokens = tokens[: i + 1]
                self.tokens += tokens
                return tokens, FinishReason.STOP
        tokens = tokens[: self.max_length - len(self.tokens)]
        self.tokens += tokens
        return tokens, FinishReason.LENGTH if len(self.tokens) == self.max_length else None

    def refill(self) -> bool:
        """The stages lost it: everything is sent again. False where that has been tried too often in vain."""
        self.refills_without_progress += 1
        self.context_length = 0
        self.fill_length = len(self.tokens)
        self.previous_accepted = NO_LABEL
        self.hidden_states = NO_STATES
        return self.refills_without_progress <= MAX_REFILLS_WITHOUT_PROGRESS
