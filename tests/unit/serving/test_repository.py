"""Rendering a model repository: settings end up in the right models, and wrong ones are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptive_verification.errors import SettingsError, SetupError
from adaptive_verification.serving import repository

MODEL = """
name: "{name}"  # a comment
backend: "python"
parameters {{ key: "target" value {{ string_value: "default" }} }}
parameters {{ key: "FORCE_CPU_ONLY_INPUT_TENSORS" value {{ string_value: "no" }} }}
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    for name in ("drafter", "verifier", "generate"):
        (directory / name / "1" / "__pycache__").mkdir(parents=True)
        (directory / name / "1" / "model.py").write_text(f"# {name}")
        (directory / name / "config.pbtxt").write_text(MODEL.format(name=name))
    (directory / "speculative_step").mkdir()
    (directory / "speculative_step" / "config.pbtxt").write_text('name: "speculative_step" platform: "ensemble"')
    return directory


def parameters(rendered: Path, model: str) -> dict[str, str]:
    config = repository.read(rendered)[model]
    return {name: value.string_value for name, value in config.parameters.items()}


def test_a_shared_setting_goes_to_every_model_that_has_it(source: Path, tmp_path: Path) -> None:
    configs = repository.read(source)
    repository.apply_settings(configs, {"dtype": "float32", "target": "some/model"}, {})
    repository.write(configs, source, tmp_path / "rendered")
    for model in ("drafter", "verifier"):
        assert parameters(tmp_path / "rendered", model)["dtype"] == "float32"
        assert parameters(tmp_path / "rendered", model)["target"] == "some/model"
    assert parameters(tmp_path / "rendered", "generate")["target"] == "some/model"
    assert "dtype" not in parameters(tmp_path / "rendered", "generate")
    assert parameters(tmp_path / "rendered", "speculative_step") == {}


def test_a_models_own_setting_goes_before_the_shared_one(source: Path) -> None:
    configs = repository.read(source)
    repository.apply_settings(configs, {"dtype": "float32"}, {"drafter": {"dtype": "bfloat16"}})
    assert configs["drafter"].parameters["dtype"].string_value == "bfloat16"
    assert configs["verifier"].parameters["dtype"].string_value == "float32"


def test_rendering_keeps_the_source_and_the_parameters_of_triton_itself(source: Path, tmp_path: Path) -> None:
    before = (source / "verifier" / "config.pbtxt").read_text()
    configs = repository.read(source)
    repository.apply_settings(configs, {"dtype": "float32"}, {})
    repository.write(configs, source, tmp_path / "rendered")
    assert (source / "verifier" / "config.pbtxt").read_text() == before
    assert parameters(tmp_path / "rendered", "verifier")["FORCE_CPU_ONLY_INPUT_TENSORS"] == "no"
    assert (tmp_path / "rendered" / "verifier" / "1" / "model.py").read_text() == "# verifier"
    assert not (tmp_path / "rendered" / "verifier" / "1" / "__pycache__").exists()


def test_an_ensemble_gets_the_version_directory_that_git_does_not_keep(source: Path, tmp_path: Path) -> None:
    repository.write(repository.read(source), source, tmp_path / "rendered")
    assert [path.name for path in (tmp_path / "rendered" / "speculative_step").iterdir() if path.is_dir()] == ["1"]


@pytest.mark.parametrize(
    ("shared", "per_model", "message"),
    [
        ({"dtypo": "float32"}, {}, r"setting 'dtypo' \(models: drafter, generate, speculative_step, verifier\)"),
        ({}, {"verifer": {"dtype": "float32"}}, r"'verifer' has no settings; .*: drafter, generate, verifier"),
        ({}, {"speculative_step": {"dtype": "float32"}}, "'speculative_step' has no settings"),
        ({}, {"generate": {"cache_slots": "3"}}, "generate has no setting 'cache_slots'; it has: target, "),
        ({}, {"verifier": {"cache_slots": "0"}}, "model verifier: .*cache_slots='0': .* greater than or equal to 1"),
        ({"dtype": "int8"}, {}, "model drafter: .*dtype='int8': .*'float32', 'bfloat16'"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(
    source: Path, shared: dict[str, str], per_model: dict[str, dict[str, str]], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        repository.apply_settings(repository.read(source), shared, per_model)


def test_a_wrong_value_in_the_repository_itself_is_refused(source: Path) -> None:
    (source / "verifier" / "config.pbtxt").write_text(
        'name: "verifier" parameters { key: "cache_slot" value { string_value: "4" } }'
    )
    with pytest.raises(SettingsError, match=r"model verifier: .*cache_slot='4'"):
        repository.apply_settings(repository.read(source), {}, {})


def test_model_names_are_resolved_wherever_they_stand(source: Path) -> None:
    configs = repository.read(source)
    repository.resolve_models(configs, lambda name: f"/models/{name}", lambda name, target: name)
    assert {configs[model].parameters["target"].string_value for model in ("drafter", "verifier", "generate")} == {
        "/models/default"
    }

    repository.apply_settings(configs, {}, {"drafter": {"drafter": "small"}})
    repository.resolve_models(configs, lambda name: name, lambda name, target: f"{name} for {target}")
    assert configs["drafter"].parameters["drafter"].string_value == "small for /models/default"


def test_filling_in_leaves_what_was_chosen(source: Path) -> None:
    for chosen, expected in (("", "/state"), ("/mine", "/mine")):
        (source / "av_estimator").mkdir(exist_ok=True)
        (source / "av_estimator" / "config.pbtxt").write_text(
            f'name: "av_estimator" parameters {{ key: "state_directory" value {{ string_value: "{chosen}" }} }}'
        )
        configs = repository.read(source)
        repository.fill_in(configs, "state_directory", "/state")
        assert configs["av_estimator"].parameters["state_directory"].string_value == expected
        assert "state_directory" not in configs["verifier"].parameters


def test_a_repository_that_triton_could_not_read_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"No model repository at .*missing"):
        repository.find_repository(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SetupError, match="holds no models"):
        repository.read(tmp_path / "empty")
    (source / "verifier" / "config.pbtxt").write_text('name: "verifier" nonsense')
    with pytest.raises(SetupError, match=r"verifier/config\.pbtxt: "):
        repository.read(source)
