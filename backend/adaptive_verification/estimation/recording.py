"""Records the evidence of a running estimator as a trace, when a file in its state directory asks for it.

See `recording_files` for how it is asked for and what is written. The estimator looks for a request now and then (see
`stage`); without one a step pays nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from adaptive_verification.estimation.features import DRAFT_FEATURES, MAX_LOG_ODDS
from adaptive_verification.estimation.online_fit import INITIAL_INTERCEPT, INITIAL_SLOPE, RIDGE, OnlineFit
from adaptive_verification.estimation.recording_files import RecordingRequest, end_request, recording_path
from adaptive_verification.estimation.trace import coefficients
from adaptive_verification.settings import EstimatorSettings

logger = logging.getLogger(__name__)

MAX_BYTES = 1 << 28


class Recorder:
    """Writes a recording while one is asked for. A disk that refuses ends it with a warning; it never fails a step.

    Args:
        settings: of the estimator; requests are looked for in its state directory.
    """

    def __init__(self, settings: EstimatorSettings) -> None:
        self._settings = settings
        self._directory = Path(settings.state_directory)
        self._request: RecordingRequest | None = None
        self._file: IO[str] | None = None
        self._steps = 0
        self._bytes = 0

    def look(self, fit: OnlineFit) -> None:
        """Begins or ends a recording, if that is asked for."""
        request = self._read_request()
        if request == self._request:
            return
        self._end("stopped")
        if request is not None:
            self._begin(request, fit)

    def add_step(
        self,
        sequences: NDArray[np.int64],
        log_odds: NDArray[np.float32],
        draft_features: NDArray[np.float32] | None,
        admitted: NDArray[np.int64],
        accepted: NDArray[np.int32],
    ) -> None:
        """The rows of one fold, before it; of each row the first `admitted` drafts count.

        All `[rows]`, but for `log_odds` `[rows, k]` and `draft_features` `[rows, k, 3]`.
        """
        if self._file is None:
            return
        counts = admitted.tolist()
        line = {
            "features": _cut(log_odds, counts),
            "admitted": counts,
            "accepted": accepted.tolist(),
            "sequences": sequences.tolist(),
        }
        if draft_features is not None:
            line["draft_features"] = _cut(draft_features, counts)
        self._write(line)
        self._steps += 1

    def add_refit(self, fit: OnlineFit) -> None:
        """The coefficients, where the fold of the last step renewed them."""
        if self._file is not None:
            self._write(coefficients(fit, self._steps))

    def end_if_full(self) -> None:
        """Ends the recording when it has all that was asked for. After each fold."""
        if self._request is None:
            return
        if self._steps >= self._request.steps:
            self._end("complete")
        elif self._bytes >= MAX_BYTES:
            self._end(f"larger than {MAX_BYTES >> 20} MB")

    def close(self) -> None:
        """At unload."""
        self._end("the server stopped")

    def _read_request(self) -> RecordingRequest | None:
        try:
            return RecordingRequest.read(self._directory)
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("a request to record cannot be used and is removed: %s", error)
            self._end_request()
            return None

    def _begin(self, request: RecordingRequest, fit: OnlineFit) -> None:
        try:
            self._file = recording_path(self._directory, request.identity).open("w", buffering=1)
        except OSError as error:
            logger.warning("nothing can be recorded: %s", error)
            self._end_request()
            return
        self._request, self._steps, self._bytes = request, 0, 0
        settings = self._settings
        self._write(
            {
                "source": "recorded from a running server",
                "target": settings.target,
                "drafter": settings.drafter,
                "cold_start": fit.is_at_its_start,
                "constants": {
                    "init_slope": INITIAL_SLOPE,
                    "init_intercept": INITIAL_INTERCEPT,
                    "refit_interval": settings.refit_interval,
                    "damping_observations": settings.damping_labels,
                    "l2": RIDGE,
                    "max_log_odds": MAX_LOG_ODDS,
                    "feature": settings.feature,
                    "evidence": settings.evidence,
                },
                "num_speculative_tokens": settings.max_draft_tokens,
                "draft_features": DRAFT_FEATURES,
            }
        )

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._file is not None
        text = json.dumps(line) + "\n"
        self._bytes += len(text)
        try:
            self._file.write(text)
        except OSError as error:
            logger.warning("the recording ends, it cannot be written: %s", error)
            self._close_file()

    def _end(self, reason: str) -> None:
        if self._file is not None:
            self._write({"ended": reason})
        self._close_file()

    def _close_file(self) -> None:
        """Ends what is being recorded; a newer request stays."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                logger.warning("the recording may be incomplete: %s", error)
        request, self._request, self._file = self._request, None, None
        if request is not None and self._read_request() == request:
            self._end_request()

    def _end_request(self) -> None:
        try:
            end_request(self._directory)
        except OSError as error:
            logger.warning("the request to record cannot be removed: %s", error)


def _cut(values: NDArray[np.float32], counts: list[int]) -> list[list[Any]]:
    return [row[:count] for row, count in zip(values.tolist(), counts, strict=True)]
