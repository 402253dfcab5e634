"""The rows of a step request, placed in a stage's cache."""

from __future__ import annotations

from adaptive_verification.contract import STATUS_BAD_TOKEN, STATUS_OK, StepRequest
from adaptive_verification.contract.message import lists_of_rows
from adaptive_verification.forward.sequence_table import Placement, SequenceTable


def place_rows(
    table: SequenceTable, request: StepRequest, vocab_size: int, statuses: list[int] | None = None
) -> list[Placement]:
    """Releases what the request releases, then places its rows.

    Args:
        vocab_size: rows with a token id beyond it get STATUS_BAD_TOKEN.
        statuses: what an earlier stage says of each row; rows that are not ok there keep that status here.
    """
    table.release(request.release.tolist())
    tokens_of_rows = lists_of_rows(request.tokens, request.token_count)
    statuses = statuses or [STATUS_OK] * request.num_rows
    checked = [
        STATUS_BAD_TOKEN if status == STATUS_OK and max(tokens) >= vocab_size else status
        for tokens, status in zip(tokens_of_rows, statuses, strict=True)
    ]
    return table.place(request.sequence_id.tolist(), request.context_length.tolist(), tokens_of_rows, checked)
