"""Lets a study that runs stages by itself run them as the server does: threads, spinning, and how memory is kept."""

from __future__ import annotations

import os
import sys

from adaptive_verification.serving import environment

_DONE = "ADAPTIVE_VERIFICATION_AS_SERVED"


def restart_as_served() -> None:
    """Starts this program anew with the server's process variables, which take effect at a process's start only."""
    if _DONE not in os.environ:
        variables = environment.process_variables(environment.available_cpus())
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **variables, _DONE: "1"})
