"""The drafter study's own arithmetic, and the prompts it trains on."""

from __future__ import annotations

import random
from itertools import islice

from perf.drafter.acceptance import acceptance_by_position
from perf.drafter.make_prompts import code_stubs, instructions, passages, word_problems


def test_each_position_counts_only_blocks_that_came_so_far() -> None:
    spent = {'av_estimator_admitted_tokens_total{position="1"}': 100.0}
    for position, accepted in enumerate([50.0, 20.0, 5.0], start=1):
        spent[f'av_estimator_accepted_tokens_total{{position="{position}"}}'] = accepted
    assert acceptance_by_position(spent, 3) == [0.5, 0.4, 0.25]


def test_prompts_are_made_of_what_is_installed_and_filled_in_completely() -> None:
    stubs = list(islice(code_stubs(), 20))
    assert all(stub.startswith("def ") and stub.count('"""') == 2 for stub in stubs)
    texts = [*islice(passages(), 20), *islice(word_problems(random.Random(0)), 50), *islice(instructions(), 50)]
    assert len(texts) == 120
    assert not [text for text in texts[20:] if "{" in text or "}" in text]
