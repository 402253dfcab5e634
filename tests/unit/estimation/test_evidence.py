from __future__ import annotations

import numpy as np

from adaptive_verification.estimation.evidence import PRIOR_INFORMATION, history_feature, history_increments


def test_a_sequence_without_labels_has_no_history() -> None:
    assert history_feature(np.zeros(2, np.float32), np.zeros(2, np.float32)).tolist() == [0.0, 0.0]


def test_history_is_the_shrunk_mean_residual_of_the_labelled_drafts() -> None:
    probability = np.array([[0.8, 0.5, 0.9], [0.2, 0.6, 0.1]], dtype=np.float32)
    accepted = np.array([[1, 0, 1], [1, 1, 0]], dtype=np.float32)
    labelled = np.array([[1, 1, 0], [1, 1, 1]], dtype=np.float32)
    residual, information = history_increments(probability, accepted, labelled)
    np.testing.assert_allclose(residual, [0.2 - 0.5, 0.8 + 0.4 - 0.1], rtol=1e-6)
    np.testing.assert_allclose(information, [0.16 + 0.25, 0.16 + 0.24 + 0.09], rtol=1e-6)
    np.testing.assert_allclose(history_feature(residual, information)[0], -0.3 / (0.41 + PRIOR_INFORMATION), rtol=1e-6)
