"""What every unit test leaves as it was, and that no single one is timed."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import hypothesis
import pytest

hypothesis.settings.register_profile("any-machine", deadline=None)
hypothesis.settings.load_profile("any-machine")


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """A command that runs long says how it is interrupted; that is for its own process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
