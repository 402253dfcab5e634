"""`adaptive-verification state`: what it shows is the state, and what it changes is checked first."""

from __future__ import annotations

import builtins
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.estimation.chain import CURVES, KEY, MadeChain

from adaptive_verification.estimation.stage import EstimatorStage
from adaptive_verification.estimation.state import FILE_NAME
from adaptive_verification.serving import environment
from adaptive_verification.serving.cli import main
from adaptive_verification.settings import EstimatorSettings


def make_stage(directory: Path, steps: int = 30, **settings: Any) -> EstimatorStage:
    """A running estimator that has learned something."""
    validated = EstimatorSettings.model_validate({"state_directory": str(directory), "refit_interval": 10, **settings})
    stage = EstimatorStage(validated, evidence_key=KEY, curves=CURVES)
    chain = MadeChain(stage, rows=4, most_drafts=3)
    for _ in range(steps):
        chain.step()
    if stage._file is not None and stage._file._pending is not None:
        stage._file._pending.result()  # refits are written beside the steps
    return stage


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where a server has stopped."""
    make_stage(tmp_path / "state").close()
    return tmp_path / "state"


def state(*arguments: str | Path, directory: Path) -> int:
    return main(["state", *map(str, arguments), "--state-directory", str(directory)])


def test_show_prints_coefficients_counts_calibration_and_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage(tmp_path)
    stage.close()
    assert state("show", directory=tmp_path) == 0
    table = capsys.readouterr().out
    assert f"steps {stage.steps}, refits 3" in table
    assert f"slope {stage.fit.shared[0].item():.4f}, history coefficient {stage.fit.shared[1].item():.4f}" in table
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines() if re.match(r"(\d+|all) ", line)}
    assert list(rows) == ["1", "2", "3", "all"]
    for position in range(3):
        quality = stage.calibration.report(position)
        assert rows[str(position + 1)][:4] == [
            f"{stage.fit.intercepts[position].item():.4f}",
            *(str(count) for count in stage.counts.by_position[:, position]),
        ]
        assert rows[str(position + 1)][7] == f"{quality.log_loss:.4f}"
    overall = stage.calibration.report()
    assert rows["all"][-3:] == [f"{overall.auc:.4f}", f"{overall.log_loss:.4f}", f"{overall.calibration_error:.4f}"]
    for name, curve in stage.costs.curves.items():
        assert f"{name} " in table
        assert f"{curve.milliseconds[0]:.2f}" in table
    assert "running" not in table


def test_show_reads_a_running_servers_last_refit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage = make_stage(tmp_path)
    assert state("show", directory=tmp_path) == 0
    assert "a server is running on it" in capsys.readouterr().out
    stage.close()


def test_show_draws_a_png(directory: Path, tmp_path: Path) -> None:
    assert state("show", "--png", tmp_path / "state.png", directory=directory) == 0
    assert (tmp_path / "state.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("steps", [0, 1])
def test_a_state_that_has_learned_nothing_yet_can_be_shown_and_drawn(tmp_path: Path, steps: int) -> None:
    make_stage(tmp_path, steps, feature="q_max_unfitted").close()
    assert state("show", "--png", tmp_path / "state.png", directory=tmp_path) == 0


def test_without_matplotlib_drawing_says_how_to_get_it(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert state("show", "--png", tmp_path / "state.png", directory=directory) == 1
    assert "adaptive-verification[plot]" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["show", "reset", "export"])
def test_a_directory_without_a_state_is_said_and_not_made(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {"show": [], "reset": ["--yes"], "export": [str(tmp_path / "file")]}[action]
    assert state(action, *arguments, directory=tmp_path / "nowhere") == 1
    assert f"there is no kept state at {tmp_path / 'nowhere' / FILE_NAME}" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()


def test_the_directory_defaults_to_the_servers_own(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(environment.STATE_DIRECTORY, str(directory))
    assert main(["state", "show"]) == 0
    assert str(directory / FILE_NAME) in capsys.readouterr().out


def test_reset_sets_the_state_aside(directory: Path) -> None:
    content = (directory / FILE_NAME).read_text()
    assert state("reset", "--yes", directory=directory) == 0
    assert not (directory / FILE_NAME).exists()
    assert (directory / "estimator.reset.json").read_text() == content


@pytest.mark.parametrize(
    ("answer", "is_reset"), [("y\n", True), ("yes\n", True), ("n\n", False), ("\n", False), ("", False)]
)
def test_reset_asks_first(directory: Path, answer: str, is_reset: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    assert state("reset", directory=directory) == (0 if is_reset else 1)
    assert (directory / FILE_NAME).exists() is not is_reset


def test_an_exported_state_is_imported_elsewhere_whole(directory: Path, tmp_path: Path) -> None:
    assert state("export", tmp_path / "file.json", directory=directory) == 0
    (tmp_path / "there").mkdir()
    assert state("import", tmp_path / "file.json", directory=tmp_path / "there") == 0
    settings = {"refit_interval": 10}
    ours = EstimatorStage(EstimatorSettings.model_validate({"state_directory": str(directory), **settings}))
    theirs = EstimatorStage(EstimatorSettings.model_validate({"state_directory": str(tmp_path / "there"), **settings}))
    assert theirs.steps == 30
    assert theirs.state_dict() == ours.state_dict()


def test_import_keeps_what_was_there_aside(directory: Path, tmp_path: Path) -> None:
    make_stage(tmp_path / "other", steps=20).close()
    before = (directory / FILE_NAME).read_text()
    assert state("import", tmp_path / "other" / FILE_NAME, directory=directory) == 0
    assert json.loads((directory / FILE_NAME).read_text())["state"]["steps"] == 20
    assert (directory / "estimator.replaced.json").read_text() == before


def test_import_refuses_another_deployments_state_unless_forced(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_stage(tmp_path / "other", drafter="first-layers:8").close()
    before = (directory / FILE_NAME).read_text()
    assert state("import", tmp_path / "other" / FILE_NAME, directory=directory) == 1
    assert "drafter is 'default' there and 'first-layers:8' here" in capsys.readouterr().err
    assert (directory / FILE_NAME).read_text() == before
    assert state("import", tmp_path / "other" / FILE_NAME, "--force", directory=directory) == 0
    assert json.loads((directory / FILE_NAME).read_text())["fingerprint"]["drafter"] == "first-layers:8"


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: "",
        lambda content: "{",
        lambda content: json.dumps({**content, "format": 99}),
        lambda content: json.dumps({**content, "fingerprint": {"colour": "red"}}),
        lambda content: json.dumps({**content, "state": {}}),
        lambda content: json.dumps({**content, "state": {**content["state"], "counts": [[1]]}}),
        lambda content: json.dumps({**content, "state": {**content["state"], "fit": {"shared": ["x"]}}}),
    ],
)
def test_a_damaged_file_is_neither_imported_nor_exported_nor_shown(
    damage: Any, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = (directory / FILE_NAME).read_text()
    damaged = damage(json.loads(content))
    (tmp_path / "damaged.json").write_text(damaged)
    assert state("import", tmp_path / "damaged.json", directory=directory) == 1
    assert (directory / FILE_NAME).read_text() == content
    (directory / FILE_NAME).write_text(damaged)
    assert state("export", tmp_path / "export.json", directory=directory) == 1
    assert not (tmp_path / "export.json").exists()
    assert state("show", directory=directory) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len([line for line in errors if line.startswith("adaptive-verification: ")]) == 3
    assert "Traceback" not in "".join(errors)


@pytest.mark.parametrize("action", ["reset", "import"])
def test_what_a_running_server_would_overwrite_is_refused(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_stage(tmp_path / "other", drafter="first-layers:8").close()
    stage = make_stage(tmp_path / "state")
    imported = tmp_path / "other" / FILE_NAME
    arguments = ("--yes",) if action == "reset" else (imported, "--force")
    before = (tmp_path / "state" / FILE_NAME).read_text()
    assert state(action, *arguments, directory=tmp_path / "state") == 1
    assert f"a server is running on {tmp_path / 'state'}" in capsys.readouterr().err
    assert (tmp_path / "state" / FILE_NAME).read_text() == before
    stage.close()
    assert state(action, *arguments, directory=tmp_path / "state") == 0


def test_the_command_line_starts_without_importing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`adaptive-verification --help` answers at once; torch alone takes seconds."""
    for name in [name for name in sys.modules if name.startswith("adaptive_verification")]:
        monkeypatch.delitem(sys.modules, name)
    imported: list[str] = []
    real_import = builtins.__import__

    def noticing(name: str, *arguments: Any) -> Any:
        imported.append(name)
        return real_import(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", noticing)
    __import__("adaptive_verification.serving.cli")
    assert "adaptive_verification.serving.trace_commands" in imported
    assert "torch" not in imported
