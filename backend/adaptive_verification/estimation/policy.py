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
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from adaptive_verification.errors import SettingsError
from adaptive_verification.estimation.budget import admit, best_budget
from adaptive_verification.estimation.cost_model import CostModel
from adaptive_verification.estimation.depth import best_depth
from adaptive_verification.estimation.exploration import Exploration, ExplorationCost
from adaptive_verification.estimation.time_price import TimePrice
from adaptive_verification.estimation.typical_step import TypicalStep
from adaptive_verification.settings import EstimatorSettings

COLD_FACTOR = 4
"""Exploration is so many times as frequent while hardly anything is known: the first guess may wrongly say that nothing
pays, and then only exploration can correct it."""
STEPS_BETWEEN_PLANS = 4
"""A depth is planned anew so often, and whenever the number of rows changes: what else it rests on moves by a few
percent a step, and planning would be a tenth of the whole stage's time."""
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
    context_tokens: int
    """That the target looks back at: the confirmed ones of all its rows."""
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
    """The most expected tokens in measured time: all decisions are made at one price of time, see `time_price`.

    While costs are not known, everything is drafted and verified.
    """

    def __init__(self, costs: CostModel, deepest: int, exploration_share: float) -> None:
        self._costs = costs
        self._deepest = deepest
        self._exploration_share = exploration_share
        self._exploration = Exploration()
        self._price = TimePrice()
        self._typical = TypicalStep()
        self._planned_for: tuple[int, ...] = ()
        self._planned_depths = (0, 0)
        self._planned_exploration = ExplorationCost(0.0, lambda lacking_tokens: 0.0)

    def decide(self, block: Block) -> Decision:
        if not self._costs.ready:
            return _same_for_all(block, block.counts, self._deepest)
        budget = self._budget(block)
        admitted = admit(block.survival, np.where(block.exploring, 0, block.counts), budget)
        admitted = np.where(block.exploring, block.counts, admitted)
        self._remember(block, admitted)
        depth, depth_of_all = self._plan(block, budget)
        next_limit = np.full_like(block.counts, self._as_limit(depth, block))
        explores = np.zeros_like(block.exploring)
        share = self._exploration_share * (COLD_FACTOR if block.cold else 1)
        rows = self._exploration.rows(block.step + 1, block.backlog, share, self._planned_exploration)
        next_limit[rows] = self._as_limit(self._explored_depth(depth), block)
        explores[rows] = True
        return Decision(admitted, next_limit, explores, budget, depth, depth_of_all)

    def _budget(self, block: Block) -> int:
        # the block's own scores say more, but where tokens are drawn they would bias what is drawn
        limits = block.counts if block.settled else block.limits
        survivals = block.survival if block.settled else block.expected_survival
        competing = np.where(block.exploring, 0, limits)
        most = int(competing.sum())
        if most == 0:
            return 0
        in_any_case = block.base_tokens + int(limits.sum()) - most
        verify_ms = self._costs.all_verify_ms(in_any_case + np.arange(most + 1))
        return best_budget(survivals, competing, verify_ms, self._price_per_ms(block, block.sampling_rows))

    def _price_per_ms(self, block: Block, rows: int) -> float:
        return self._price.per_ms(rows, self._costs.verify_ms(rows, block.context_tokens))

    def _remember(self, block: Block, admitted: NDArray[np.int64]) -> None:
        """What later steps are planned with.

        A step's prompt tokens are left out of its time. They must be computed whatever is decided, now or in a later
        step; were they counted, tokens would seem slow to come by, and drafts cheap beside it.
        """
        self._typical.add(block.prompt_tokens, block.sampling_rows, block.looked_up, admitted)
        modelled = np.where(block.looked_up, 0, block.counts)
        is_admitted = np.arange(block.survival.shape[1]) < admitted[:, None]
        tokens = block.sampling_rows + float(block.survival.sum(where=is_admitted))
        plain_ms = self._costs.verify_ms(block.sampling_rows, block.context_tokens)
        verify_ms = self._costs.verify_ms(block.sampling_rows + int(admitted.sum()), block.context_tokens)
        draft_ms = self._draft_ms(np.count_nonzero(modelled), block.sampling_rows, int(modelled.max(initial=0)))
        self._price.add(block.sampling_rows, plain_ms, tokens, verify_ms + draft_ms[-1])

    def _draft_ms(self, drafting_rows: float, rows: int, deepest: int, lacking_tokens: int = 0) -> list[float]:
        """Of drafting 0, 1, ... `deepest` deep for some of a step's rows, which may lack tokens.

        Prompts are not free for a model that drafts: it must compute them, too. Whenever they come, they are counted by
        what has come on average.
        """
        tokens = drafting_rows + lacking_tokens + self._typical.prompt_tokens * drafting_rows / max(rows, 1)
        return self._costs.all_draft_ms(tokens, drafting_rows, deepest)

    def _plan(self, block: Block, budget: int) -> tuple[int, int]:
        """The depth of the next steps' rows, and if all were followed; may have been planned a few steps ago, and with
        it what exploring costs."""
        num_rows = block.sampling_rows or len(block.counts)
        num_followed = min(np.count_nonzero(block.followed), num_rows)
        rows = (num_rows, num_followed, block.recent_survival.shape[1])
        if block.step % STEPS_BETWEEN_PLANS == 0 or rows != self._planned_for:
            depth = self._depth(block, num_rows, num_followed)
            self._planned_depths = depth, depth if num_followed == num_rows else self._depth(block, num_rows, num_rows)
            self._planned_for = rows
            self._planned_exploration = self._exploration_cost(block, budget, depth)
        return self._planned_depths

    def _depth(self, block: Block, num_rows: int, num_followed: int) -> int:
        """Of the rows that a model drafts: of those it could draft for, all that are not looked up; at least one."""
        sample, deepest = block.recent_survival.shape
        if num_rows == 0 or deepest == 0:
            return deepest
        typical = self._typical
        rows = max(1.0, num_followed * (1.0 - typical.looked_up_share))
        looked_up_rows = min(num_rows * typical.looked_up_share, num_rows - rows)
        tokens = num_rows + typical.prompt_tokens + looked_up_rows * typical.drafts_per_looked_up_row
        verify_ms = self._costs.all_verify_ms(tokens + np.arange(sample * deepest + 1) * (rows / sample))
        draft_ms = self._draft_ms(rows, num_rows, deepest)
        may_draft = block.followed if num_followed < num_rows else np.ones_like(block.followed)
        backlog = int(block.backlog[may_draft & ~block.looked_up].clip(0).sum())
        if backlog:
            catch_up_ms = self._draft_ms(rows, num_rows, 1, backlog)[1] - draft_ms[1]
            steps = max(FEWEST_STEPS_PER_CATCH_UP, backlog / rows)
            draft_ms = [draft_ms[0], *(ms + catch_up_ms / steps for ms in draft_ms[1:])]
        return best_depth(block.recent_survival, rows, verify_ms, draft_ms, self._price_per_ms(block, num_rows))

    def _as_limit(self, depth: int, block: Block) -> int:
        """The full depth is no limit at all, so a caller that would draft deeper still shows it."""
        return depth if depth < block.recent_survival.shape[1] else self._deepest

    def _explored_depth(self, depth: int) -> int:
        return min(depth + EXPLORED_BEYOND_PLAN, self._deepest)

    def _exploration_cost(self, block: Block, budget: int, depth: int) -> ExplorationCost:
        costs, tokens, explored_depth = self._costs, block.base_tokens + budget, self._explored_depth(depth)
        verify_ms = costs.verify_ms(tokens, block.context_tokens)
        further_ms = costs.verify_ms(tokens + explored_depth, block.context_tokens) - verify_ms
        further_ms -= costs.draft_ms(1, 1, depth)

        def row_ms(lacking_tokens: int) -> float:
            return further_ms + costs.draft_ms(1 + lacking_tokens, 1, explored_depth)

        draft_ms = costs.draft_ms(block.base_tokens, max(1, block.sampling_rows), depth)
        return ExplorationCost(verify_ms + draft_ms, row_ms)


def _same_for_all(block: Block, admitted: NDArray[np.int64], next_limit: int) -> Decision:
    return Decision(
        admitted=admitted,
        next_limit=np.full_like(block.counts, next_limit),
        explores_next=np.zeros_like(block.exploring),
        budget=int(admitted.sum()),
        depth=next_limit,
        depth_of_all=next_limit,
    )
