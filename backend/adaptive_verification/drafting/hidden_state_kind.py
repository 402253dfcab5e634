"""Whether a drafter's directory holds a hidden-state drafter. By itself, for those who need to know only that: reading
the rest of it takes transformers."""

from __future__ import annotations

import json
from pathlib import Path

MODEL_TYPE = "hidden_state_drafter"
CONFIG_FILE = "config.json"


def is_hidden_state_drafter(path: str) -> bool:
    """Whether the directory holds one (a hub name is no directory)."""
    file = Path(path) / CONFIG_FILE
    return file.is_file() and json.loads(file.read_text()).get("model_type") == MODEL_TYPE
