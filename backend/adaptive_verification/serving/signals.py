"""How a long-running command of ours is told to end."""

from __future__ import annotations

import signal
import time
from types import FrameType

DUPLICATE_SIGNAL_S = 1.0


def interrupt_on_signals() -> None:
    """Makes SIGINT and SIGTERM raise KeyboardInterrupt: the first stops the server in order, a later one at once.

    `timeout`, `make` and process managers may deliver one signal twice, to the process and to its group. SIGINT is set
    too because a shell starts background jobs with it ignored.
    """
    first: float | None = None

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if first is None or now - first > DUPLICATE_SIGNAL_S:
            first = now
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
