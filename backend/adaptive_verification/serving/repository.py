"""Renders the model repository for one run: the files as they are, with the user's settings in each `config.pbtxt`.

Everything a user can get wrong in a setting is found here, before any process starts. This module knows settings only
through `settings.SETTINGS_BY_MODEL`; a model that is not listed there (the ensemble) has none.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

import adaptive_verification
from adaptive_verification.errors import SettingsError, SetupError
from adaptive_verification.settings import SETTINGS_BY_MODEL, StageSettings

CONFIG_NAME = "config.pbtxt"


def find_repository(path: Path | None) -> Path:
    """The given directory, or the `model_repository/` of the source checkout this package runs from.

    Raises:
        SetupError: it is not there.
    """
    directory = path or Path(adaptive_verification.__file__).parents[2] / "model_repository"
    if not directory.is_dir():
        raise SetupError(f"No model repository at {directory}. Name its directory with --model-repository.")
    return directory.resolve()


def read(repository: Path) -> dict[str, ModelConfig]:
    """Model name (its directory's) -> configuration, of every model in a repository.

    Raises:
        SetupError: a file that Triton could not read either, or no model at all.
    """
    configs = {}
    for file in sorted(repository.glob(f"*/{CONFIG_NAME}")):
        try:
            configs[file.parent.name] = text_format.Parse(file.read_text(), ModelConfig())
        except text_format.ParseError as error:
            raise SetupError(f"{file}: {error}") from None
    if not configs:
        raise SetupError(f"{repository} holds no models (no */{CONFIG_NAME}).")
    return configs


def settings_of(model: str, config: ModelConfig) -> StageSettings | None:
    """The validated settings of a model; None for a model that has none.

    Raises:
        SettingsError: naming the model, the parameter, its value and what is allowed.
    """
    settings_class = SETTINGS_BY_MODEL.get(model)
    if settings_class is None:
        return None
    try:
        return settings_class.from_strings({name: value.string_value for name, value in config.parameters.items()})
    except SettingsError as error:
        raise SettingsError(f"model {model}: {error}") from None


def apply_settings(
    configs: Mapping[str, ModelConfig],
    shared: Mapping[str, str],
    per_model: Mapping[str, Mapping[str, str]],
) -> None:
    """Sets parameters in place and validates every model's settings.

    Args:
        configs: model name -> configuration.
        shared: parameter -> value, for every model that has such a setting.
        per_model: model -> parameter -> value; goes before `shared`.

    Raises:
        SettingsError: an unknown model or parameter, or a value that is not allowed.
    """
    fields_of = {model: SETTINGS_BY_MODEL[model].model_fields for model in configs if model in SETTINGS_BY_MODEL}
    for name, value in shared.items():
        models = [model for model, fields in fields_of.items() if name in fields]
        if not models:
            raise SettingsError(f"No model of this repository has a setting {name!r} (models: {', '.join(configs)}).")
        for model in models:
            configs[model].parameters[name].string_value = value
    for model, values in per_model.items():
        if model not in fields_of:
            raise SettingsError(f"{model!r} has no settings; models with settings are: {', '.join(fields_of)}.")
        for name, value in values.items():
            if name not in fields_of[model]:
                raise SettingsError(f"{model} has no setting {name!r}; it has: {', '.join(fields_of[model])}.")
            configs[model].parameters[name].string_value = value
    for model, config in configs.items():
        settings_of(model, config)


def resolve_models(
    configs: Mapping[str, ModelConfig],
    resolve_target: Callable[[str], str],
    resolve_drafter: Callable[[str, str], str],
) -> None:
    """Replaces each name of a target or a drafter in the settings, in place, by what it means (a directory, say).

    Args:
        resolve_drafter: takes the drafter's name and the target's.
    """
    for model, config in configs.items():
        settings = settings_of(model, config)
        target, drafter = getattr(settings, "target", None), getattr(settings, "drafter", None)
        if target is not None:
            config.parameters["target"].string_value = resolve_target(target)
        if target is not None and drafter is not None:
            config.parameters["drafter"].string_value = resolve_drafter(drafter, target)


def fill_in(configs: Mapping[str, ModelConfig], name: str, value: str) -> None:
    """Sets a setting, in place, on every model that has it and where it is empty."""
    for model, config in configs.items():
        if getattr(settings_of(model, config), name, None) == "":
            config.parameters[name].string_value = value


def write(configs: Mapping[str, ModelConfig], source: Path, destination: Path) -> None:
    """Copies a repository's models and puts their changed configurations in."""
    for model, config in configs.items():
        directory = destination / model
        shutil.copytree(source / model, directory, ignore=shutil.ignore_patterns("__pycache__"))
        (directory / CONFIG_NAME).write_text(text_format.MessageToString(config))
        # An ensemble needs a version directory too, and git keeps no empty ones.
        if not any(path.name.isdecimal() for path in directory.iterdir()):
            (directory / "1").mkdir()
