"""The target's hidden states as they reach the drafter in a request: checked, and put where its model reads them.

They wait until their sequence is drafted for: the model projects them when it is given them, which for a token or two
of a few rows takes as long as for all that have come in the meantime, and often nobody drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adaptive_verification.contract import StepRequest
from adaptive_verification.drafting.hidden_state_model import HiddenStateModel
from adaptive_verification.errors import ContractError
from adaptive_verification.forward.sequence_table import CachedSequence, Placement


class HandedOnStates:
    """Keeps the states of a step's rows, and gives them to the model."""

    def __init__(self, model: HiddenStateModel) -> None:
        self._model = model
        self._row_bytes = model.states_width * torch.empty((), dtype=model.dtype).element_size()

    def take(self, request: StepRequest, placements: list[Placement]) -> None:
        """Keeps the states of the rows that have a place.

        Raises:
            ContractError: they are not this target's: they have another width.
        """
        self._check(request)
        if not request.previous_hidden_states.numel():
            return
        states = request.previous_hidden_states.view(self._model.dtype).view(-1, self._model.states_width).clone()
        offset = 0
        for placement, start, count in zip(
            placements, request.previous_hidden_start.tolist(), request.previous_hidden_count.tolist(), strict=True
        ):
            sequence = placement.sequence
            if sequence is not None and count:
                end = min(start + count, sequence.confirmed_length - 1)  # the last token's state is not known yet
                if start != _end_of(sequence.waiting_states):
                    self.write([sequence])
                if start > sequence.states_length:
                    self._model.clear_states(sequence.slot, sequence.states_length, start)
                if end > start:
                    sequence.waiting_states.append((start, states[offset : offset + end - start]))
                sequence.states_length = max(end, sequence.states_length)
            offset += count

    def write(self, sequences: Sequence[CachedSequence]) -> None:
        """Gives the model what waits of these sequences, in the order in which it came."""
        slots: list[int] = []
        positions: list[int] = []
        states: list[Tensor] = []
        for sequence in sequences:
            for start, chunk in sequence.waiting_states:
                slots += [sequence.slot] * len(chunk)
                positions += range(start, start + len(chunk))
                states.append(chunk)
            sequence.waiting_states.clear()
        if states:
            self._model.write_states(torch.tensor(slots), torch.tensor(positions), torch.cat(states))

    def _check(self, request: StepRequest) -> None:
        num_states = int(request.previous_hidden_count.sum())
        if request.previous_hidden_states.numel() != num_states * self._row_bytes:
            raise ContractError(
                f"PREVIOUS_HIDDEN_STATES has {request.previous_hidden_states.numel()} bytes for {num_states} states; "
                f"each state must have {self._row_bytes} bytes ({self._model.states_width} numbers of "
                f"{self._model.dtype}), as verifier gives them"
            )


def _end_of(waiting: list[tuple[int, Tensor]]) -> int | None:
    """The position behind states that wait."""
    return waiting[-1][0] + len(waiting[-1][1]) if waiting else None
