"""What a client gets: the responses of one request, and the place they are sent to."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol

from adaptive_verification.errors import AdaptiveVerificationError


class FinishReason(str, Enum):
    """Why a text ended. Its value is the output `finish_reason`."""

    STOP = "stop"
    """An end token or a stop word."""
    LENGTH = "length"
    """`max_tokens`, or the context is full."""
    CANCELLED = "cancelled"


class GenerationResponse(NamedTuple):
    """One response; a field's name is the output's. A stream's texts join to the text of the one plain response.

    None: this response does not have that output.
    """

    text_output: str
    finish_reason: str
    """Empty before the last response."""
    num_input_tokens: int
    num_output_tokens: int
    """Tokens of this response alone; a stream's add up. An end token and the tokens of a stop word count."""
    acceptance_rate: float | None = None
    """Accepted per draft token; 0 where there was none. This and the following are in the last response only: at many
    streams, outputs that nobody reads in between cost as much as the text."""
    total_draft_tokens: int | None = None
    """Drafts that the target verified. Trimmed drafts do not count: they cost the target nothing."""
    total_accepted_draft_tokens: int | None = None
    """Of those, the ones that the target accepted."""


class Sink(Protocol):
    """Where the responses of one request go. Called from the responder's thread only; each call may be slow."""

    def send(self, response: GenerationResponse, *, final: bool) -> None: ...

    def fail(self, error: AdaptiveVerificationError) -> None:
        """The last response, in place of a text."""

    def is_cancelled(self) -> bool:
        """Whether the client has gone."""
