"""The online logistic regression: m shared coefficients and one intercept for each draft position.

`acceptance = sigmoid(features . shared + intercept[position])`. Every step adds its labelled drafts to the sufficient
statistics of one Newton step (IRLS); after `refit_interval` steps that step is taken, damped by how much evidence it
rests on, and the statistics start anew, which is what lets the fit follow drift. With m = 1 this is the estimator of
vLLM's adaptive verification ("K+1 numbers"). Memory and solve are O(K m^2), whatever the number of drafts.

It knows tensors of features and labels, nothing of requests or of what the features mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

INITIAL_SLOPE = 0.5
INITIAL_INTERCEPT = -0.2
RIDGE = 1e-3
MAX_STEP = 3.0
"""No coefficient moves further in one refit. Where the fit is certain and wrong, Newton's step divides by almost no
information and overshoots, for good if it may go further than this. Ordinary data never meets the bound."""
MAX_COEFFICIENT = 80.0
_STEPS_ADDED_TOGETHER = 16
"""A dozen small operations are added up for so many steps at once, not for each."""


class OnlineFit:
    """Coefficients and the statistics of their next refit.

    Args:
        num_positions: K, draft positions.
        num_shared: m, shared coefficients. The first is the slope of the draft's own feature; the others start at 0.
            All stay non-negative: a feature is oriented so that more means likelier accepted.
        refit_interval: steps folded in between two refits.
        damping_labels: a step that rests on so many labels is halved.
        initial_slope, initial_intercept, ridge: a replayed trace may bring its own, a drafter the first two. Of the
            intercept either one number, or one for each position.
        dtype: float32 while serving; float64 for tests.
    """

    def __init__(
        self,
        num_positions: int,
        num_shared: int = 1,
        *,
        refit_interval: int = 100,
        damping_labels: float = 50.0,
        initial_slope: float = INITIAL_SLOPE,
        initial_intercept: float | Sequence[float] = INITIAL_INTERCEPT,
        ridge: float = RIDGE,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_positions = num_positions
        self.num_shared = num_shared
        self._refit_interval = refit_interval
        self._damping_labels = damping_labels
        self._ridge = ridge
        self.shared = torch.zeros(num_shared, dtype=dtype, device=device)
        self.shared[0] = initial_slope
        self.intercepts = torch.zeros(num_positions, dtype=dtype, device=device)
        self.intercepts[:] = torch.as_tensor(initial_intercept, dtype=dtype, device=device)
        self.steps_since_refit = 0
        self.refits = 0
        # [K, m + 1, m + 3], sums over the labels of z (v z, r, 1), with z the features and a 1 for the intercept: the
        # information matrix, the gradient, and in its last row the number of labels.
        self._sums = torch.zeros(num_positions, num_shared + 1, num_shared + 3, dtype=dtype, device=device)
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        """Of the steps that are not in the sums yet."""

    @property
    def is_at_its_start(self) -> bool:
        """Whether it is what the general constants make it: no evidence, and no first guess of the drafter's."""
        general = self.shared[0] == INITIAL_SLOPE and bool((self.intercepts == INITIAL_INTERCEPT).all())
        return bool(general and self.refits == 0 and self.steps_since_refit == 0)

    def predict(self, features: Tensor) -> Tensor:
        """Acceptance probabilities `[..., K]` of features `[..., K, m]`."""
        return (features @ self.shared).add_(self.intercepts).sigmoid_()

    def fold(self, features: Tensor, accepted: Tensor, labelled: Tensor) -> bool:
        """Adds one step's labels, and refits where that is due. The tensors may be kept for some steps.

        Args:
            features: `[rows, K, m]`, finite.
            accepted: `[rows, K]`, 0 or 1; only counts where labelled.
            labelled: `[rows, K]`, 0 or 1: the drafts that the target decided.

        Returns:
            Whether the coefficients were refitted.
        """
        if labelled.numel() > 0:
            self._waiting.append((features, accepted, labelled))
        self.steps_since_refit += 1
        is_due = self.steps_since_refit >= self._refit_interval
        if is_due or len(self._waiting) >= _STEPS_ADDED_TOGETHER:
            self._add_waiting()
        if is_due:
            self._refit()
        return is_due

    def _add_waiting(self) -> None:
        """Brings the sums up to date. The coefficients are those of every waiting step: only a refit changes them."""
        if not self._waiting:
            return
        features, accepted, labelled = (torch.cat(each) for each in zip(*self._waiting, strict=True))
        self._waiting = []
        probability = self.predict(features)
        counted = labelled.to(features.dtype)
        residual = (accepted.to(features.dtype) - probability) * counted
        weight = probability * (1 - probability) * counted
        design = torch.cat([features, torch.ones_like(features[..., :1])], -1)  # [rows, K, m + 1]
        per_label = torch.cat([design * weight.unsqueeze(-1), torch.stack([residual, counted], -1)], -1)
        self._sums.baddbmm_(design.permute(1, 2, 0), per_label.transpose(0, 1))

    def _refit(self) -> None:
        """One damped Newton step through the Schur complement of the intercepts' diagonal block, in O(K m^2 + m^3)."""
        m = self.num_shared
        information, gradient = self._sums[:, :, : m + 1], self._sums[:, :, m + 1]  # [K, m + 1, m + 1], [K, m + 1]
        labels = self._sums[:, m, m + 2]  # [K]
        between = information[:, :m, m]  # [K, m], shared x intercept
        own = information[:, m, m] + self._ridge  # [K]
        own_gradient = gradient[:, m]  # [K]
        eliminated = between / own.unsqueeze(-1)  # [K, m]
        ridge = self._ridge * torch.eye(m, dtype=own.dtype, device=own.device)
        schur = information[:, :m, :m].sum(0) + ridge - between.T @ eliminated
        reduced_gradient = gradient[:, :m].sum(0) - eliminated.T @ own_gradient
        shared_step = torch.linalg.solve_ex(schur, reduced_gradient).result * self._damping(labels.sum())
        shared_step = _safe(shared_step)
        # The intercepts follow the damped shared step, so a damped slope does not leave them in the wrong place.
        intercept_step = (own_gradient - between @ shared_step) / own * self._damping(labels)
        self.shared = (self.shared + shared_step).clamp(0.0, MAX_COEFFICIENT)
        self.intercepts = (self.intercepts + _safe(intercept_step)).clamp(-MAX_COEFFICIENT, MAX_COEFFICIENT)
        self._sums.zero_()
        self.steps_since_refit = 0
        self.refits += 1

    def _damping(self, labels: Tensor) -> Tensor:
        return labels / (labels + self._damping_labels)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a restart must bring back, as plain numbers and lists."""
        self._add_waiting()
        return {
            "shared": self.shared.tolist(),
            "intercepts": self.intercepts.tolist(),
            "steps_since_refit": self.steps_since_refit,
            "refits": self.refits,
            "sums": self._sums.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`.

        Raises:
            ValueError, KeyError, TypeError: the state is not one; the fit is then unchanged.
        """
        tensors = {}
        for name, present in (("shared", self.shared), ("intercepts", self.intercepts), ("sums", self._sums)):
            loaded = torch.tensor(state[name], dtype=present.dtype, device=present.device)
            if loaded.shape != present.shape or not bool(loaded.isfinite().all()):
                raise ValueError(f"{name} must be {list(present.shape)} finite numbers")
            tensors[name] = loaded
        steps_since_refit, refits = int(state["steps_since_refit"]), int(state["refits"])
        self.shared, self.intercepts, self._sums = tensors["shared"], tensors["intercepts"], tensors["sums"]
        self._waiting = []
        self.steps_since_refit, self.refits = steps_since_refit, refits


def _safe(step: Tensor) -> Tensor:
    """A step with its non-finite parts dropped and the rest bounded."""
    return torch.where(step.isfinite(), step, 0.0).clamp(-MAX_STEP, MAX_STEP)
