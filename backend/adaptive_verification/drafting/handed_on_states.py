"""The target's hidden states as they reach the drafter in a request: checked, and put where its model reads them."""

from __future__ import annotations

import torch

from adaptive_verification.contract import StepRequest
from adaptive_verification.drafting.hidden_state_model import HiddenStateModel
from adaptive_verification.errors import ContractError
from adaptive_verification.forward.sequence_table import Placement


class HandedOnStates:
    """Writes the states of a step's rows to the model."""

    def __init__(self, model: HiddenStateModel) -> None:
        self._model = model
        self._row_bytes = model.states_width * torch.empty((), dtype=model.dtype).element_size()

    def take(self, request: StepRequest, placements: list[Placement]) -> None:
        """Keeps the states of the rows that have a place.

        Raises:
            ContractError: they are not this target's: they have another width.
        """
        self._check(request)
        slots: list[int] = []
        positions: list[int] = []
        kept: list[int] = []
        offset = 0
        for placement, start, count in zip(
            placements, request.previous_hidden_start.tolist(), request.previous_hidden_count.tolist(), strict=True
        ):
            sequence = placement.sequence
            if sequence is not None and count:
                end = min(start + count, sequence.confirmed_length - 1)  # the last token's state is not known yet
                if start > sequence.states_length:
                    self._model.clear_states(sequence.slot, sequence.states_length, start)
                slots += [sequence.slot] * (end - start)
                positions += range(start, end)
                kept += range(offset, offset + end - start)
                sequence.states_length = max(end, sequence.states_length)
            offset += count
        if kept:
            states = request.previous_hidden_states.view(self._model.dtype).view(-1, self._model.states_width)
            if len(kept) < len(states):
                states = states[torch.tensor(kept, dtype=torch.int64, device=states.device)]
            self._model.write_states(torch.tensor(slots), torch.tensor(positions), states)

    def _check(self, request: StepRequest) -> None:
        num_states = int(request.previous_hidden_count.sum())
        if request.previous_hidden_states.numel() != num_states * self._row_bytes:
            raise ContractError(
                f"PREVIOUS_HIDDEN_STATES has {request.previous_hidden_states.numel()} bytes for {num_states} states; "
                f"each state must have {self._row_bytes} bytes ({self._model.states_width} numbers of "
                f"{self._model.dtype}), as verifier gives them"
            )
