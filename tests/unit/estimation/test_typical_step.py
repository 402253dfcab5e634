from __future__ import annotations

import numpy as np
import pytest

from adaptive_verification.estimation.typical_step import TypicalStep


def test_the_means_are_those_of_the_last_steps() -> None:
    typical = TypicalStep()
    looked_up, admitted = np.array([True, False, False, False]), np.array([5, 1, 1, 0])
    for step in range(600):
        typical.add(100 if step % 4 == 0 else 0, 4, looked_up, admitted)
    assert typical.prompt_tokens == pytest.approx(25.0, rel=0.05)
    assert typical.looked_up_share == pytest.approx(0.25, rel=0.01)
    assert typical.drafts_per_looked_up_row == pytest.approx(5.0)
    for _ in range(600):
        typical.add(0, 4, np.zeros(4, bool), admitted)
    assert typical.prompt_tokens < 1e-3
    assert typical.looked_up_share < 1e-3
    assert typical.drafts_per_looked_up_row == pytest.approx(5.0), "of those few there were"


def test_steps_that_only_read_prompts_say_nothing_of_rows() -> None:
    typical = TypicalStep()
    assert typical.drafts_per_looked_up_row == 0.0
    typical.add(100, 0, np.zeros(2, bool), np.zeros(2, np.int64))
    assert typical.looked_up_share == 0.0 < typical.prompt_tokens
