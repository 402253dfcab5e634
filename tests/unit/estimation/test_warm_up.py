"""In a process of its own, where nothing is compiled yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from numba.core.dispatcher import Dispatcher
from tests.unit.estimation.chain import CURVES, KEY, MadeChain

from adaptive_verification.estimation.stage import EstimatorStage
from adaptive_verification.estimation.warm_up import warm_up
from adaptive_verification.settings import EstimatorSettings


def _compiled() -> dict[str, int]:
    """How many kinds of arguments each function has been compiled for."""
    modules = [module for name, module in sys.modules.items() if name.startswith("adaptive_verification.estimation")]
    functions = [thing for module in modules for thing in vars(module).values() if isinstance(thing, Dispatcher)]
    return {function.py_func.__qualname__: len(function.overloads) for function in functions}


def serve(with_features: bool, evidence: str) -> None:
    """Serves made traffic of every kind, after warming up: prints what that still had to compile."""
    settings = EstimatorSettings.model_validate({"refit_interval": 5, "evidence": evidence})
    warm_up(settings)
    before = _compiled()
    stage = EstimatorStage(settings, evidence_key=KEY, curves=CURVES)
    chains = [
        MadeChain(stage, rows=rows, first_id=100 * rows, lookup_share=share, with_features=with_features)
        for rows, share in ((1, 0.0), (8, 0.5), (3, 1.0))
    ]
    for number in range(300):
        chains[number % 3].step()
    after = _compiled()
    print({name: count for name, count in after.items() if count != before.get(name)})


@pytest.mark.parametrize(("with_features", "evidence"), [(False, "history"), (True, "none")])
def test_once_warm_nothing_is_left_to_compile(with_features: bool, evidence: str) -> None:
    program = f"from tests.unit.estimation.test_warm_up import serve; serve({with_features}, {evidence!r})"
    root = Path(__file__).parents[3]
    ended = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "{}"


def test_it_leaves_no_state_behind(tmp_path: Path) -> None:
    warm_up(EstimatorSettings.model_validate({"state_directory": str(tmp_path)}))
    assert list(tmp_path.iterdir()) == []
