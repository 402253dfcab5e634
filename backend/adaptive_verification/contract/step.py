"""What runs one decode step, seen by the caller of it: Triton's ensemble, or the same stages in this process."""

from __future__ import annotations

from typing import Protocol

from adaptive_verification.contract.messages import Draft, Estimate, StepRequest, StepResult


class Step(Protocol):
    """One decode step of all rows of a request."""

    def __call__(self, request: StepRequest) -> StepResult:
        """Runs the step.

        Raises:
            StepFailed: the step as a whole failed; no row of it has an answer. Trying again is harmless.
        """


class Drafter(Protocol):
    """The first stage."""

    def step(self, request: StepRequest) -> Draft: ...


class Estimator(Protocol):
    """The second stage."""

    def step(self, request: StepRequest, draft: Draft) -> Estimate: ...


class Verifier(Protocol):
    """The third stage."""

    def step(self, request: StepRequest, draft: Draft, estimate: Estimate) -> StepResult: ...


class LocalStep:
    """The three stages chained in this process: for unit tests, studies and offline use."""

    def __init__(self, drafter: Drafter, estimator: Estimator, verifier: Verifier) -> None:
        self._drafter = drafter
        self._estimator = estimator
        self._verifier = verifier

    def __call__(self, request: StepRequest) -> StepResult:
        request.validate()
        draft = self._drafter.step(request)
        estimate = self._estimator.step(request, draft)
        return self._verifier.step(request, draft, estimate)
