"""The kinds of error a user can meet. Each message names the field, its value and what is allowed."""

from __future__ import annotations


class AdaptiveVerificationError(Exception):
    """Base of everything this package raises on purpose."""


class InvalidRequest(AdaptiveVerificationError, ValueError):
    """A client's request cannot be served as it is; nobody else is affected."""


class ServerBusy(AdaptiveVerificationError):
    """The queue is full; the client may retry."""


class ContractError(AdaptiveVerificationError, ValueError):
    """A tensor of the step contract has the wrong name, type, shape or range."""


class UnsupportedModel(AdaptiveVerificationError, ValueError):
    """A model, or a pair of models, that this package would compute wrongly; refused at load."""


class SettingsError(AdaptiveVerificationError, ValueError):
    """A stage's settings are wrong; refused at load."""


class StepFailed(AdaptiveVerificationError, RuntimeError):
    """One decode step failed as a whole; the sequences in it end, the loop goes on."""


class StateError(AdaptiveVerificationError, ValueError):
    """The kept state is missing, damaged, another deployment's, or in use."""


class TraceError(AdaptiveVerificationError, ValueError):
    """A recorded stream of the estimator's evidence is missing or damaged, or cannot answer what is asked of it."""


class SetupError(AdaptiveVerificationError, RuntimeError):
    """Something the server needs is missing on this machine; the message says how to get it."""
