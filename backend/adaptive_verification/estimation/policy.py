"""Which drafts of a step are verified, and how deep the next step drafts: adaptive verification and its baselines.

    adaptive      the best slots of the whole batch, as many as pay for themselves. The feature `q_max_unfitted` makes
                  it EAGLE-2's survival, `drafter_score` that of a trained confidence head
    off           everything that is drafted
    fixed_length  the first N drafts of each row
    threshold     a row's drafts until q_max falls below a threshold: the rule of Draft & Verify (looked up, q is 1)

A policy sees one step's `Block`; of earlier ones `Adaptive` keeps its last plan, and what it may explore.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from adaptive_verification.errors import SettingsError
from adaptive_verification.estimation.budget import admit, best_budget
from adaptive_verification.estimation.cost_model import CostModel
from adaptive_verification.estimation.depth import best_depth
from adaptive_verification.estimation.exploration import Exploration, ExplorationCost
from adaptive_verification.settings import EstimatorSettings

COLD_FACTOR = 4
"""Exploration is so many times as frequent while hardly anything is known: the first guess may wrongly say that nothing
pays, and then only exploration can correct it."""
STEPS_BETWEEN_PLANS = 4
"""A depth is planned anew so often, and whenever the kind or number of rows changes: what else it rests on moves by a
few percent a step, and planning would be a tenth of the whole stage's time."""
PROMPTS_LEARNING_RATE = 0.01
"""The mean number of a step's prompt tokens is that of the last hundred steps or so."""
EXPLORED_BEYOND_PLAN = 2
"""Exploring rows draft so much deeper than the plan. Where that turns out to pay the plan follows, and they go on."""


FEWEST_STEPS_PER_CATCH_UP = 32
"""What rows that have not drafted for a while lack must be computed before they draft again. Drafting must pay for it
within as many steps as tokens are lacking (what has lasted so long is expected to last as long again), at least these.
"""


@dataclass(frozen=True)
class Block:
    """One step's drafts, `[rows, K]` padded to the deepest possible row."""

    counts: NDArray[np.int64]
    """`[rows]` int64, drafts of each row, at most K."""
    log_odds: NDArray[np.float32]
    """`[rows, K]`, as the drafter sent them, clean."""
    survival: NDArray[np.float32]
    """`[rows, K]`, of this block; may only rank, unless the block is settled."""
    looked_up: NDArray[np.bool_]
    """`[rows]` bool: rows whose drafts cost no drafting; known before the block was drafted, as all that follows."""
    followed: NDArray[np.bool_]
    """`[rows]` bool: rows that a model could draft for."""

    limits: NDArray[np.int64]
    """`[rows]` int64, drafts that each row could have had."""
    expected_survival: NDArray[np.float32]
    """`[rows, K]`, of this block."""
    exploring: NDArray[np.bool_]
    """`[rows]` bool: rows that keep all their drafts."""
    base_tokens: int
    """Tokens that the target computes in any case."""
    prompt_tokens: int
    """Those of them that no row decodes: all but one of each row that samples."""
    sampling_rows: int
    backlog: NDArray[np.int64]
    """`[rows]` int64, confirmed tokens that the drafting model has not computed; UNKNOWN_BACKLOG of rows that ask
    for no drafts or are not followed."""
    settled: bool
    """Whether every row is coupled: its tokens are a function of seed and target, no choice of drafts can bias them."""

    recent_survival: NDArray[np.float32]
    """`[M, deepest]`, a sample of recent blocks, as deep as callers have ever asked for."""
    step: int
    """Counts the steps."""
    cold: bool
    """Whether the predictions rest on hardly any evidence."""


@dataclass(frozen=True)
class Decision:
    admitted: NDArray[np.int64]
    """`[rows]` int64."""
    next_limit: NDArray[np.int64]
    """`[rows]` int64."""
    explores_next: NDArray[np.bool_]
    """`[rows]` bool: rows whose next block keeps all its drafts."""
    budget: int
    """Drafts that this step would verify at most, beside those of exploring rows."""
    depth: int
    """Planned depth of the rows that do not explore."""
    depth_of_all: int
    """What it would be if a model could draft for every row."""


class Policy(Protocol):
    def decide(self, block: Block) -> Decision: ...


def make_policy(settings: EstimatorSettings, costs: CostModel) -> Policy:
    """The policy that the settings ask for."""
    deepest = settings.max_draft_tokens
    if settings.trim == "adaptive":
        return Adaptive(costs, deepest, settings.exploration_share)
    if settings.trim == "fixed_length":
        if settings.fixed_length > deepest:
            raise SettingsError(f"fixed_length={settings.fixed_length}; it must be at most max_draft_tokens={deepest}")
        return FixedLength(settings.fixed_length)
    if settings.trim == "threshold":
        return Threshold(settings.threshold, deepest)
    return FixedLength(deepest)


class FixedLength:
    """The first `length` drafts of each row."""

    def __init__(self, length: int) -> None:
        self._length = length

    def decide(self, block: Block) -> Decision:
        return _same_for_all(block, np.minimum(block.counts, self._length), self._length)


class Threshold:
    """A row's drafts up to, not including, the first whose q_max is below the threshold."""

    def __init__(self, threshold: float, deepest: int) -> None:
        with np.errstate(divide="ignore"):
            self._least_log_odds = np.log(threshold) - np.log1p(-threshold)
        self._deepest = deepest

    def decide(self, block: Block) -> Decision:
        is_drafted = np.arange(block.log_odds.shape[1]) < block.counts[:, None]
        confident = is_drafted & ((block.log_odds >= self._least_log_odds) | block.looked_up[:, None])
        return _same_for_all(block, confident.cumprod(1).sum(1), self._deepest)


class Adaptive:
    """Expected tokens per measured millisecond. While costs are not known, everything is drafted and verified."""

    def __init__(self, costs: CostModel, deepest: int, exploration_share: float) -> None:
        self._costs = costs
        self._deepest = deepest
        self._exploration_share = exploration_share
        self._exploration = Exploration()
        self._planned_for: tuple[int, ...] = ()
        self._planned_depths = (0, 0)
        self._planned_exploration = ExplorationCost(0.0, lambda lacking_tokens: 0.0)
        self._mean_prompt_tokens = 0.0

    def decide(self, block: Block) -> Decision:
        if not self._costs.ready:
            return _same_for_all(block, block.counts, self._deepest)
        budget = self._budget(block)
        admitted = admit(block.survival, np.where(block.exploring, 0, block.counts), budget)
        admitted = np.where(block.exploring, block.counts, admitted)
        self._mean_prompt_tokens += PROMPTS_LEARNING_RATE * (block.prompt_tokens - self._mean_prompt_tokens)
        depth, depth_of_all = self._plan(block, admitted, budget)
        next_limit = np.full_like(block.counts, self._as_limit(depth, block))
        explores = np.zeros_like(block.exploring)
        share = self._exploration_share * (COLD_FACTOR if block.cold else 1)
        rows = self._exploration.rows(block.step + 1, block.backlog, share, self._planned_exploration)
        next_limit[rows] = self._as_limit(self._explored_depth(depth), block)
        explores[rows] = True
        return Decision(admitted, next_limit, explores, budget, depth, depth_of_all)

    def _plan(self, block: Block, admitted: NDArray[np.int64], budget: int) -> tuple[int, int]:
        """The depth of the next steps' rows, and if all were followed; may have been planned a few steps ago, and with
        it what exploring costs."""
        num_followed = np.count_nonzero(block.followed)
        deepest = block.recent_survival.shape[1]
        rows = (block.sampling_rows, num_followed, np.count_nonzero(block.looked_up), deepest)
        if block.step % STEPS_BETWEEN_PLANS == 0 or rows != self._planned_for:
            depth = self._depth(block, admitted, block.looked_up | ~block.followed)
            all_are = num_followed == len(block.followed)
            self._planned_depths = depth, depth if all_are else self._depth(block, admitted, block.looked_up)
            self._planned_for = rows
            self._planned_exploration = self._exploration_cost(block, budget, depth)
        return self._planned_depths

    def _as_limit(self, depth: int, block: Block) -> int:
        """The full depth is no limit at all, so a caller that would draft deeper still shows it."""
        return depth if depth < block.recent_survival.shape[1] else self._deepest

    def _explored_depth(self, depth: int) -> int:
        return min(depth + EXPLORED_BEYOND_PLAN, self._deepest)

    def _exploration_cost(self, block: Block, budget: int, depth: int) -> ExplorationCost:
        costs, tokens, explored_depth = self._costs, block.base_tokens + budget, self._explored_depth(depth)
        verify_ms = costs.verify_ms(tokens)
        further_ms = costs.verify_ms(tokens + explored_depth) - verify_ms - costs.draft_ms(1, 1, depth)

        def row_ms(lacking_tokens: int) -> float:
            return further_ms + costs.draft_ms(1 + lacking_tokens, 1, explored_depth)

        draft_ms = costs.draft_ms(block.base_tokens, max(1, block.sampling_rows), depth)
        return ExplorationCost(verify_ms + draft_ms, row_ms)

    def _budget(self, block: Block) -> int:
        # the block's own scores say more, but where tokens are drawn they would bias what is drawn
        limits = block.counts if block.settled else block.limits
        survivals = block.survival if block.settled else block.expected_survival
        competing = np.where(block.exploring, 0, limits)
        most, all_limits = int(competing.sum()), int(limits.sum())
        if most == 0:
            return 0
        step_ms = self._verify_ms(block, block.base_tokens + all_limits - most + np.arange(most + 1))
        step_ms += self._drafting_ms(block, limits)
        return best_budget(survivals, competing, block.sampling_rows, step_ms)

    def _verify_ms(self, block: Block, tokens: NDArray[Any]) -> NDArray[np.float64]:
        """Of increasing numbers of tokens, without what the step's prompt tokens take.

        They must be computed whatever is decided, now or in a later step. Were their time counted, tokens would seem
        slow to come by, and drafts cheap beside it; but it is not the drafts that save it.
        """
        prompts_ms = 0.0
        if block.prompt_tokens:
            without_prompts = self._costs.verify_ms(block.base_tokens - block.prompt_tokens)
            prompts_ms = self._costs.verify_ms(block.base_tokens) - without_prompts
        return self._costs.all_verify_ms(tokens) - prompts_ms

    def _drafting_ms(self, block: Block, limits: NDArray[np.int64]) -> float:
        models = limits[~block.looked_up]
        depth = int(models.max(initial=0))
        base_tokens = block.base_tokens - np.count_nonzero(block.looked_up)
        return self._costs.draft_ms(base_tokens, np.count_nonzero(models), depth)

    def _depth(self, block: Block, admitted: NDArray[np.int64], is_other: NDArray[np.bool_]) -> int:
        """Of the rows that a model drafts, of which the next step has as many as this one, or one.

        Prompts are not free for a model that drafts: it must compute them, too. Whenever they come, they are counted by
        what has come on average.
        """
        looked_up = block.looked_up
        others = np.count_nonzero(is_other)
        rows = max(0, (block.sampling_rows or len(block.counts)) - others) or min(others, 1)
        sample, deepest = block.recent_survival.shape
        if rows == 0 or deepest == 0:
            return deepest
        base_tokens = rows + block.prompt_tokens
        others_tokens, others_expected = others, float(others)
        if others:
            others_tokens += int(admitted[looked_up].sum())
            is_admitted = np.arange(block.survival.shape[1]) < admitted[looked_up, None]
            others_expected += float(block.survival[looked_up].sum(where=is_admitted))
        drafts = np.arange(sample * deepest + 1) * (rows / sample)
        verify_ms = self._verify_ms(block, base_tokens + others_tokens + drafts)
        draft_tokens = rows + self._mean_prompt_tokens * rows / (rows + others)
        draft_ms = self._costs.all_draft_ms(draft_tokens, rows, deepest)
        backlog = int(block.backlog[~is_other].clip(0).sum())
        if backlog and deepest:
            catch_up_ms = self._costs.draft_ms(draft_tokens + backlog, rows, 1) - draft_ms[1]
            steps = max(FEWEST_STEPS_PER_CATCH_UP, backlog / rows)
            draft_ms = [draft_ms[0], *(ms + catch_up_ms / steps for ms in draft_ms[1:])]
        return best_depth(block.recent_survival, rows, verify_ms, draft_ms, others_expected)


def _same_for_all(block: Block, admitted: NDArray[np.int64], next_limit: int) -> Decision:
    return Decision(
        admitted=admitted,
        next_limit=np.full_like(block.counts, next_limit),
        explores_next=np.zeros_like(block.exploring),
        budget=int(admitted.sum()),
        depth=next_limit,
        depth_of_all=next_limit,
    )
