"""The estimator of the chain: folds in labels and costs, scores every draft, trims across the batch, plans the depth.

A step's order matters for losslessness: everything that the budget rests on (fit, expectations, costs, exploration) is
fixed by earlier steps before the block's own scores are looked at, and those only rank. A step of coupled rows alone
needs no such care. Looked-up drafts are judged by `lookup_rates`, all others by the fit; each learns from its own.

It knows the contract's messages and this folder's parts, nothing of models, caches or Triton.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adaptive_verification.contract.costs import DraftCost, StepCost
from adaptive_verification.contract.messages import (
    NO_LABEL,
    NOT_FOLLOWED,
    Draft,
    Estimate,
    StepRequest,
)
from adaptive_verification.errors import ContractError
from adaptive_verification.estimation.budget import survival
from adaptive_verification.estimation.calibration import Calibration
from adaptive_verification.estimation.cost_model import CostCurve, CostModel, read_curves
from adaptive_verification.estimation.draft_counts import ACCEPTED, ADMITTED, DRAFTED, DraftCounts
from adaptive_verification.estimation.evidence import (
    history_feature,
    history_increments,
    with_and_without_history,
)
from adaptive_verification.estimation.expectation import Expectation
from adaptive_verification.estimation.exploration import UNKNOWN_BACKLOG
from adaptive_verification.estimation.features import DRAFT_FEATURES, clean, serving_feature
from adaptive_verification.estimation.first_guess import FirstGuess, by_position
from adaptive_verification.estimation.following import newly_followed
from adaptive_verification.estimation.lookup_rates import LookupRates
from adaptive_verification.estimation.online_fit import OnlineFit
from adaptive_verification.estimation.policy import Block, Decision, make_policy
from adaptive_verification.estimation.recording import Recorder
from adaptive_verification.estimation.sequences import SequenceMemory
from adaptive_verification.estimation.state import StateFile
from adaptive_verification.estimation.step_rows import StepRows, labels
from adaptive_verification.settings import LOOKUP, EstimatorSettings

logger = logging.getLogger(__name__)

STEPS_BETWEEN_DIRECTORY_READS = 64
"""Cost curves and requests for a recording are looked for so rarely."""
COLD_REFITS = 3
"""So many refits make a fit of the first guess: each moves it by one damped Newton step."""


class EstimatorStage:
    """One decode step's estimator.

    Args:
        settings: see `EstimatorSettings`.
        evidence_key: what trusted callers send as `EVIDENCE_KEY`. Labels and costs of others are ignored; None: of all.
        curves: measured cost curves, where they do not come from the state directory.
        first_guess: what the drafter says of itself; used with the feature `logit_q_max`.
        needs_states: the drafter needs the target's hidden states, so it is decided whom it follows.
        clock: seconds, monotonic.

    Raises:
        SettingsError: the settings ask for something that would be wrong.
    """

    def __init__(
        self,
        settings: EstimatorSettings,
        *,
        evidence_key: int | None = None,
        curves: Mapping[str, CostCurve] | None = None,
        first_guess: FirstGuess | None = None,
        needs_states: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.settings = settings
        self._evidence_key = None if evidence_key is None else evidence_key % 2**64
        self._needs_states = needs_states
        self._clock = clock
        self._feature = serving_feature(settings.feature)
        num_positions = settings.max_draft_tokens
        self.is_fitted = self._feature.fitted
        self.uses_history = settings.evidence == "history" and self.is_fitted
        guess = first_guess if settings.feature == "logit_q_max" else None
        self._refits_until_warm = COLD_REFITS if guess is None else 0
        self.fit = OnlineFit(
            num_positions,
            2 if self.uses_history else 1,
            refit_interval=settings.refit_interval,
            damping_labels=settings.damping_labels,
            **({} if guess is None else _initial(guess, num_positions)),
        )
        self.lookup_rates = LookupRates(num_positions, settings.refit_interval)
        self.costs = CostModel(curves, has_drafting_model=settings.drafter != LOOKUP)
        self.calibration = Calibration(num_positions, settings.calibration_half_life_steps)
        self.counts = DraftCounts(num_positions)
        self.steps = 0
        self.last_budget = 0
        self.last_depth = num_positions
        self._policy = make_policy(settings, self.costs)
        self._expectation = Expectation(
            num_positions, None if guess is None else by_position(guess.mean_acceptance, num_positions)
        )
        self._memory = SequenceMemory(settings.max_sequences, num_positions, self.fit.num_shared)
        self._deepest_asked = 0
        self._context_tokens = 0  # of the last step whose costs are learned from
        self._last_start: float | None = None
        self._last_estimate_ms = 0.0
        self._file = StateFile(settings.state_directory, self._fingerprint()) if settings.state_directory else None
        self._recorder = Recorder(settings) if settings.state_directory else None
        if self._file is not None:
            self._file.load(self.load_state_dict)

    def trusts(self, request: StepRequest) -> bool:
        """Whether the request's labels and costs may teach this estimator."""
        key = request.evidence_key
        return self._evidence_key is not None and key.numel() == 1 and int(key) % 2**64 == self._evidence_key

    def without_foreign_evidence(self, request: StepRequest) -> StepRequest:
        """The request as it may be merged with others: an untrusted caller's labels and costs are taken out."""
        if self.trusts(request):
            return request
        return dataclasses.replace(
            request,
            previous_accepted=torch.full_like(request.previous_accepted, NO_LABEL),
            previous_cost=request.previous_cost[:0],
        )

    @torch.inference_mode()
    def step(self, request: StepRequest, draft: Draft) -> Estimate:
        """Decides about one step's drafts. Repeating a step is harmless: no label counts twice.

        Raises:
            ContractError: more rows than `max_sequences`, or drafts without the features that the prediction needs.
        """
        started = self._clock()
        self._check_features(draft)
        self._memory.release(request.release.tolist())
        slots, fresh_slots = self._memory.slots(request.sequence_id.tolist())
        if fresh_slots:
            self._memory.survival[fresh_slots] = self._expectation.mean_survival
        rows = StepRows.of(request, draft, slots, self.settings.max_draft_tokens)
        if self.trusts(request):
            if self.steps % STEPS_BETWEEN_DIRECTORY_READS == 0:
                self._look_at_directory()
            self._fold_labels(request, rows)
            self._observe_costs(request.previous_cost, draft.draft_cost, started)
            self._context_tokens = rows.context_tokens

        block = self._score(draft, rows)
        decision = self._policy.decide(block)

        admitted = decision.admitted
        next_limit = self._for_followed(rows, decision) if self._needs_states else decision.next_limit
        self._memory.has_block[slots] = True
        self._memory.confirmed_tokens[slots] = rows.confirmed_tokens
        self._memory.admitted[slots] = admitted
        self._memory.match_length[slots] = rows.match_length
        self._memory.exploring[slots] = decision.explores_next
        self.counts.add(DRAFTED, rows.counts, rows.looked_up)
        self.counts.add(ADMITTED, admitted, rows.looked_up)
        self.last_budget, self.last_depth = decision.budget, decision.depth
        self.steps += 1
        self._last_start = started
        self._last_estimate_ms = (self._clock() - started) * 1e3
        return Estimate(
            admitted_count=torch.from_numpy(admitted.astype(np.int32)),
            next_draft_limit=torch.from_numpy(next_limit.astype(np.int32)),
            estimate_cost=torch.from_numpy(np.array([self._last_estimate_ms], dtype=np.float32)),
        )

    def _for_followed(self, rows: StepRows, decision: Decision) -> NDArray[np.int64]:
        """The next limits, of the rows that are followed."""
        followed = self._memory.followed[rows.slots] & ~rows.begins
        followed |= newly_followed(~followed & (rows.asked != 0), rows.begins, followed, decision.depth_of_all)
        self._memory.followed[rows.slots] = followed
        return np.where(followed, decision.next_limit, NOT_FOLLOWED)

    def _may_explore(self, rows: StepRows) -> NDArray[np.bool_]:
        """Of a row that begins it is not decided yet whether it is followed."""
        followed = self._memory.followed[rows.slots]
        return followed & ~rows.begins if self._needs_states else followed

    def _check_features(self, draft: Draft) -> None:
        num_values, num_drafts = draft.draft_features.numel(), draft.draft_log_odds.numel()
        width = len(DRAFT_FEATURES)
        if num_values not in (0, width * num_drafts):
            raise ContractError(
                f"DRAFT_FEATURES has {num_values} numbers for {num_drafts} drafts; it must have none, or for each "
                f"draft {', '.join(DRAFT_FEATURES)}"
            )
        if num_values == 0 and num_drafts > 0 and self._feature.source is not None:
            raise ContractError(
                f"feature={self.settings.feature!r} needs DRAFT_FEATURES, and the drafter sends none; set its "
                "draft_features to all"
            )

    def _look_at_directory(self) -> None:
        if self._recorder is not None:
            self.costs.measured(read_curves(self.settings.state_directory))
            self._recorder.look(self.fit)

    def _fold_labels(self, request: StepRequest, step_rows: StepRows) -> None:
        """Grades the drafts that were admitted in the sequences' last steps.

        A label counts only where the sequence has grown by exactly what it claims: its accepted drafts and one token.
        A step that is sent again has not grown since, so its labels, already counted, do not count again.
        """
        memory, slots = self._memory, step_rows.slots
        accepted_count, admitted = request.previous_accepted.numpy(), memory.admitted[slots]
        grown = step_rows.confirmed_tokens - memory.confirmed_tokens[slots]
        (rows,) = (
            (accepted_count >= 0) & (accepted_count <= admitted) & (admitted > 0) & (grown == accepted_count + 1)
        ).nonzero()
        accepted_count, match_length = accepted_count[rows], memory.match_length[slots[rows]]
        looked_up = match_length > 0
        self.counts.add(ACCEPTED, accepted_count, looked_up)
        accepted, labelled = labels(accepted_count, admitted[rows], self.settings.max_draft_tokens)
        self.lookup_rates.fold(match_length[looked_up], accepted[looked_up], labelled[looked_up])
        if np.count_nonzero(looked_up):
            rows, accepted, labelled = rows[~looked_up], accepted[~looked_up], labelled[~looked_up]
        if self._recorder is not None:
            self._record(request, slots, rows)
        self._fold_fitted(slots[rows], accepted, labelled)
        if self._recorder is not None:
            self._recorder.end_if_full()

    def _record(self, request: StepRequest, slots: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        memory, slots = self._memory, slots[rows]
        assert self._recorder is not None
        self._recorder.add_step(
            request.sequence_id.numpy()[rows],
            memory.log_odds[slots],
            memory.draft_features[slots] if memory.has_draft_features[slots].all() else None,
            memory.admitted[slots],
            request.previous_accepted.numpy()[rows],
        )

    def _fold_fitted(
        self, slots: NDArray[np.int64], accepted: NDArray[np.float32], labelled: NDArray[np.float32]
    ) -> None:
        """Labels `[rows, K]`, 0 or 1, of drafts that the fit judges."""
        memory = self._memory
        if self.uses_history:
            unaided = memory.unaided_prediction.take(slots, 0)
            residual, information = history_increments(unaided, accepted, labelled)
            memory.residual_sum[slots] += residual
            memory.information_sum[slots] += information
        self.calibration.update(memory.prediction.take(slots, 0), accepted, labelled)
        if self.is_fitted:
            design = torch.from_numpy(memory.design.take(slots, 0))
            if self.fit.fold(design, torch.from_numpy(accepted), torch.from_numpy(labelled)):
                self._after_refit()

    def _after_refit(self) -> None:
        if self.uses_history:  # what awaits its labels is compared with the fit that they find
            unaided = self._memory.design.copy()
            unaided[..., 1] = 0.0
            self._memory.unaided_prediction[:] = self.fit.predict(torch.from_numpy(unaided)).numpy()
        if self._recorder is not None:
            self._recorder.add_refit(self.fit)
        if self._file is not None:
            self._file.save_soon(self.state_dict())

    def _observe_costs(self, previous_cost: Tensor, draft_cost: Tensor, now: float) -> None:
        previous, drafting = StepCost.from_tensor(previous_cost), DraftCost.from_tensor(draft_cost)
        if previous is None:
            return
        self.costs.observe(previous, self._context_tokens)
        if self._last_start is not None and drafting is not None:
            in_stages = self._last_estimate_ms + previous.verify_ms + drafting.prefill_ms + drafting.extend_ms
            self.costs.observe_other(max(0.0, (now - self._last_start) * 1e3 - in_stages))

    def _score(self, draft: Draft, rows: StepRows) -> Block:
        """This step's predictions, beside all that was known before; remembers them for the next step.

        Whether a row was looked up, with which match and how many drafts, follows from its confirmed tokens. So that
        row's own survival and count were known before its block, and are what it is expected to have.
        """
        memory, slots, looked_up = self._memory, rows.slots, rows.looked_up
        num_positions = self.settings.max_draft_tokens
        deepest_asked = min(int(rows.asked.max(initial=0)), num_positions)
        self._deepest_asked = max(self._deepest_asked, deepest_asked)
        decoding = self._decoding(rows)
        # tokens that the target must compute beside the drafts
        base_tokens = int(np.where(decoding, 1, rows.new_tokens)[rows.served].sum())

        log_odds = clean(rows.padded(draft.draft_log_odds.numpy()[:, None], num_positions)[..., 0])  # [rows, K]
        draft_features = self._draft_features(draft, rows)
        feature = self._feature(torch.from_numpy(log_odds), draft_features).numpy()
        prediction = self._predict(feature, slots)
        any_looked_up = np.count_nonzero(looked_up) > 0
        if any_looked_up:
            prediction[looked_up] = self.lookup_rates.predict(rows.match_length[looked_up])
        whole_survival = survival(self._expectation.whole_block(prediction, rows.counts))
        expected_survival = memory.survival.take(slots, 0)
        modelled_counts = rows.counts
        if any_looked_up:
            expected_survival[looked_up] = whole_survival[looked_up]
            modelled_counts = np.where(looked_up, 0, rows.counts)
        self._expectation.add(prediction, modelled_counts, whole_survival)

        memory.log_odds[slots] = log_odds
        memory.has_draft_features[slots] = draft_features is not None
        if draft_features is not None:
            memory.draft_features[slots] = draft_features.numpy()
        memory.prediction[slots] = prediction
        memory.survival[slots[~looked_up]] = whole_survival[~looked_up]
        modelled = modelled_counts > 0
        memory.modelled_tokens[slots[modelled]] = rows.confirmed_tokens[modelled]
        backlog = rows.confirmed_tokens - memory.modelled_tokens[slots]
        return Block(
            counts=rows.counts,
            log_odds=log_odds,
            survival=whole_survival,
            looked_up=looked_up,
            followed=memory.followed[slots],
            limits=rows.limits if not self._needs_states else np.where(decoding | looked_up, rows.limits, 0),
            expected_survival=expected_survival,
            exploring=memory.exploring[slots],
            base_tokens=base_tokens,
            prompt_tokens=base_tokens - rows.num_sampling,
            sampling_rows=rows.num_sampling,
            context_tokens=rows.context_tokens,
            backlog=np.where((rows.asked > 0) & self._may_explore(rows), backlog, UNKNOWN_BACKLOG),
            settled=rows.settled,
            recent_survival=self._expectation.recent_survival[:, : self._deepest_asked],
            step=self.steps,
            cold=self.is_fitted and self.fit.refits < self._refits_until_warm,
        )

    def _draft_features(self, draft: Draft, rows: StepRows) -> Tensor | None:
        """`[rows, K, 3]`, clean; None where the drafter sends none."""
        if draft.draft_features.numel() == 0 and self._feature.source is None:
            return None
        sent = draft.draft_features.numpy().reshape(-1, len(DRAFT_FEATURES))
        return torch.from_numpy(clean(rows.padded(sent, self.settings.max_draft_tokens)))

    def _decoding(self, rows: StepRows) -> NDArray[np.bool_]:
        """`[rows]`: those that go on with what the last step gave, of which the target has computed all but one."""
        memory, slots = self._memory, rows.slots
        grown = rows.confirmed_tokens - memory.confirmed_tokens[slots]
        return memory.has_block[slots] & (grown >= 0) & (grown <= memory.admitted[slots] + 1)

    def _predict(self, feature: NDArray[np.float32], slots: NDArray[np.int64]) -> NDArray[np.float32]:
        """Acceptance probabilities of drafts with this feature, both `[rows, K]`; remembers what they rest on."""
        memory = self._memory
        if not self.is_fitted:
            return torch.sigmoid(torch.from_numpy(feature)).numpy()
        if not self.uses_history:
            design = feature[..., None]
            memory.design[slots] = design
            return self.fit.predict(torch.from_numpy(design)).numpy()
        history = history_feature(memory.residual_sum[slots], memory.information_sum[slots])
        design = with_and_without_history(feature, history)
        prediction, unaided = self.fit.predict(torch.from_numpy(design)).numpy()
        memory.design[slots] = design[0]
        memory.unaided_prediction[slots] = unaided
        return prediction

    def _fingerprint(self) -> dict[str, Any]:
        settings = self.settings
        names = ("target", "drafter", "max_draft_tokens", "feature", "evidence", "acceptance")
        return {name: getattr(settings, name) for name in names}

    def state_dict(self) -> dict[str, Any]:
        """What a restart brings back. Sequences are not kept: their labels would come from another life."""
        return {
            "fit": self.fit.state_dict(),
            "lookup_rates": self.lookup_rates.state_dict(),
            "costs": self.costs.state_dict(),
            "calibration": self.calibration.state_dict(),
            "expectation": self._expectation.state_dict(),
            "steps": self.steps,
            **self.counts.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`.

        Raises:
            ValueError, KeyError, TypeError: the state is not one; nothing has changed then.
        """
        before = self.state_dict()
        try:
            self._restore(state)
        except (ValueError, KeyError, TypeError, AttributeError):
            self._restore(before)
            raise

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.counts.load_state_dict(state)
        if "lookup_rates" in state:  # not in files from before drafts were looked up
            self.lookup_rates.load_state_dict(state["lookup_rates"])
        self.fit.load_state_dict(state["fit"])
        self.costs.load_state_dict(state["costs"])
        self.calibration.load_state_dict(state["calibration"])
        self._expectation.load_state_dict(state["expectation"])
        self.steps = int(state["steps"])

    def close(self) -> None:
        """Writes the state, where it is kept, and ends a recording. At unload."""
        if self._recorder is not None:
            self._recorder.close()
        if self._file is not None:
            self._file.close(self.state_dict())


def _initial(guess: FirstGuess, num_positions: int) -> dict[str, Any]:
    """`OnlineFit`'s arguments."""
    return {"initial_slope": guess.slope, "initial_intercept": by_position(guess.intercepts, num_positions)}
