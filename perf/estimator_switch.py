"""Changes the estimator of a running server: `av_estimator` alone is loaded anew, with other settings.

The target, the drafter and their measured costs stay as they are, so arms that differ in nothing but the estimator are
compared in one process, and a change takes two seconds instead of a server's start.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import tritonclient.grpc as triton

from adaptive_verification.serving.launcher import RunningServer

MODEL = "av_estimator"
_POLL_INTERVAL_S = 0.05


class EstimatorSwitch:
    """The estimators of one server, each with a state of its own, which it goes on with when it is chosen again.

    Args:
        server: running, with no other clients.
        costs: directory where the server's stages have published their cost curves.
        directory: for the states; a folder each.
    """

    def __init__(self, server: RunningServer, costs: Path, directory: Path) -> None:
        self._client = triton.InferenceServerClient(server.grpc_url)
        self._headers = server.grpc_admin_headers
        self._config = self._client.get_model_config(MODEL, headers=self._headers, as_json=True)["config"]
        self._costs = costs
        self._directory = directory
        self._chosen: str | None = None

    def choose(self, name: str, settings: Mapping[str, str], *, fresh: bool = False) -> None:
        """Loads the estimator called `name`, unless it is the present one; `fresh`: with nothing learned.

        Args:
            name: also its state's folder.
            settings: what differs from the settings that the server was started with.
            fresh: forget what it has learned.
        """
        if name == self._chosen and not fresh:
            return
        self._unload()
        state = self._directory / name
        if fresh:
            shutil.rmtree(state, ignore_errors=True)
        state.mkdir(parents=True, exist_ok=True)
        for curves in self._costs.glob("costs-*.json"):
            shutil.copy(curves, state)
        changed = {**settings, "state_directory": str(state)}
        parameters = {key: {"string_value": value} for key, value in changed.items()}
        config = {**self._config, "parameters": {**self._config["parameters"], **parameters}}
        self._client.load_model(MODEL, headers=self._headers, config=json.dumps(config))
        self._chosen = name

    def _unload(self) -> None:
        """Waits until it has ended: only then its state is on the disk."""
        self._client.unload_model(MODEL, headers=self._headers)
        while not self._is_unloaded():
            time.sleep(_POLL_INTERVAL_S)

    def _is_unloaded(self) -> bool:
        index = self._client.get_model_repository_index(headers=self._headers)
        return all(entry.reason == "unloaded" for entry in index.models if entry.name == MODEL)
