"""The text side of one request: its tokens, step by step -> its responses.

Owned by the responder's thread. Knows text, stop words and counts; not scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from adaptive_verification.errors import AdaptiveVerificationError
from adaptive_verification.generation.detokenizer import Detokenizer
from adaptive_verification.generation.request import GenerationRequest
from adaptive_verification.generation.response import FinishReason, GenerationResponse, Sink
from adaptive_verification.generation.stop_words import StopWordFilter


@dataclass
class SequenceUpdate:
    """What one step did to one sequence."""

    sequence_id: int
    stream: TextStream
    tokens: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    finish_reason: FinishReason | None = None
    ends_with_end_token: bool = False
    """The last of `tokens` counts but is not text."""
    error: AdaptiveVerificationError | None = None
    first_token_ms: float | None = None
    """From the request to its first token, where this step gave it."""


class TextStream:
    """Collects what is to be sent and sends it; after its final response it ignores everything."""

    def __init__(self, request: GenerationRequest, detokenizer: Detokenizer, sink: Sink) -> None:
        self._request = request
        self._detokenizer = detokenizer
        self._stop_words = StopWordFilter(request.sampling.stop_words)
        self._sink = sink
        self._text = request.echoed_text
        self._num_tokens = 0
        self._total_draft_tokens = 0
        self._total_accepted_tokens = 0
        self._finish_reason: FinishReason | None = None
        self._error: AdaptiveVerificationError | None = None
        self.closed = False

    @property
    def stopped(self) -> bool:
        """Whether a stop word ended the text; tokens after it are ignored, so it does not matter when one notices."""
        return self._stop_words.stopped

    def take(self, update: SequenceUpdate) -> None:
        """Adds a step's tokens to what is to be sent."""
        if self.closed or self._finish_reason is not None or self._error is not None:
            return
        self._total_draft_tokens += update.num_draft_tokens
        self._total_accepted_tokens += update.num_accepted_tokens
        num_text_tokens = len(update.tokens) - update.ends_with_end_token
        for token in update.tokens[:num_text_tokens]:
            self._num_tokens += 1
            self._text += self._stop_words.push(self._detokenizer.push(token))
            if self.stopped:
                self._finish_reason = FinishReason.STOP
                return
        self._num_tokens += update.ends_with_end_token
        self._error = update.error
        if update.finish_reason is not None:
            self._finish(update.finish_reason)

    def _finish(self, reason: FinishReason) -> None:
        self._text += self._stop_words.push(self._detokenizer.finish())
        self._text += self._stop_words.finish()
        self._finish_reason = FinishReason.STOP if self.stopped else reason

    def send(self) -> None:
        """Sends what there is to send: a stream's new text, or the last response."""
        if self.closed:
            return
        if self._error is not None:
            self.fail(self._error)
        elif self._finish_reason is not None:
            self.closed = True
            self._sink.send(self._response(self._finish_reason), final=True)
        elif self._request.stream and self._text:
            self._sink.send(self._response(None), final=False)

    def fail(self, error: AdaptiveVerificationError) -> None:
        """Ends the stream with an error."""
        if not self.closed:
            self.closed = True
            self._sink.fail(error)

    def is_cancelled(self) -> bool:
        """Whether the client has gone."""
        return not self.closed and self._sink.is_cancelled()

    def _response(self, finish_reason: FinishReason | None) -> GenerationResponse:
        response = GenerationResponse(
            text_output=self._text,
            finish_reason="" if finish_reason is None else finish_reason.value,
            num_input_tokens=len(self._request.prompt_tokens),
            num_output_tokens=self._num_tokens,
        )
        self._text, self._num_tokens = "", 0
        if finish_reason is None:
            return response
        drafts, accepted = self._total_draft_tokens, self._total_accepted_tokens
        return response._replace(
            acceptance_rate=accepted / drafts if drafts else 0.0,
            total_draft_tokens=drafts,
            total_accepted_draft_tokens=accepted,
        )
