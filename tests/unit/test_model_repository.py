"""The model repository says what the package means: tensors as in the contract, parameters as in the settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from adaptive_verification.contract import Draft, Estimate, StepRequest, StepResult
from adaptive_verification.contract.message import Message
from adaptive_verification.serving.cli import main
from adaptive_verification.settings import SETTINGS_BY_MODEL

REPOSITORY = Path(__file__).parents[2] / "model_repository"
STAGES: dict[str, tuple[list[type[Message]], type[Message]]] = {
    "drafter": ([StepRequest], Draft),
    "av_estimator": ([StepRequest, Draft], Estimate),
    "verifier": ([StepRequest, Draft, Estimate], StepResult),
    "speculative_step": ([StepRequest], StepResult),
}


def config(model: str) -> ModelConfig:
    return text_format.Parse((REPOSITORY / model / "config.pbtxt").read_text(), ModelConfig())


def tensors(*kinds: type[Message], reader: str | None = None) -> list[tuple[str, str, list[int]]]:
    return [
        (tensor.name, f"TYPE_{tensor.wire_type}", [*tensor.shape[1:], -1])
        for kind in kinds
        for tensor in kind.wire_tensors(reader)
    ]


@pytest.mark.parametrize("model", STAGES)
def test_a_stages_tensors_are_the_contracts(model: str) -> None:
    inputs, output = STAGES[model]
    described = config(model)
    reader = None if model == "speculative_step" else model
    described_inputs = [(t.name, DataType.Name(t.data_type), list(t.dims)) for t in described.input]
    assert described_inputs == tensors(*inputs, reader=reader)
    assert [(t.name, DataType.Name(t.data_type), list(t.dims)) for t in described.output] == tensors(output)


@pytest.mark.parametrize("model", ["drafter", "av_estimator", "verifier"])
def test_requests_of_different_lengths_share_a_batch(model: str) -> None:
    described = config(model)
    assert all(tensor.allow_ragged_batch for tensor in described.input)
    assert described.HasField("dynamic_batching")
    assert [(group.count, group.kind) for group in described.instance_group] == [
        (1, described.instance_group[0].KIND_CPU)
    ]


def test_the_ensemble_hands_every_stage_what_it_reads() -> None:
    steps = config("speculative_step").ensemble_scheduling.step
    assert [step.model_name for step in steps] == ["drafter", "av_estimator", "verifier"]
    available = {tensor.name for tensor in StepRequest.wire_tensors()}
    for step in steps:
        inputs, output = STAGES[step.model_name]
        assert set(step.input_map) == {name for name, _, _ in tensors(*inputs, reader=step.model_name)}
        assert set(step.input_map.values()) <= available
        assert all(value in (key, f"{value.partition('.')[0]}.{key}") for key, value in step.input_map.items())
        assert set(step.output_map) == {name for name, _, _ in tensors(output)}
        available |= set(step.output_map.values())


@pytest.mark.parametrize("model", SETTINGS_BY_MODEL)
def test_every_setting_stands_in_the_configuration_with_its_default(model: str) -> None:
    settings = SETTINGS_BY_MODEL[model]
    parameters = {name: value.string_value for name, value in config(model).parameters.items() if not name.isupper()}
    assert set(parameters) == set(settings.model_fields)
    assert settings.from_strings(parameters) == settings()


def test_the_fronts_context_is_the_verifiers() -> None:
    """A prompt that the front admits fits the stages' caches, and every live sequence has a slot."""
    generate, verifier, drafter = (SETTINGS_BY_MODEL[name]() for name in ("generate", "verifier", "drafter"))
    assert generate.max_context_tokens == verifier.max_context_tokens == drafter.max_context_tokens  # type: ignore[attr-defined]
    assert generate.max_live_sequences <= min(verifier.cache_slots, drafter.cache_slots)  # type: ignore[attr-defined]


def test_the_readmes_table_is_the_settings_own(capsys: pytest.CaptureFixture[str]) -> None:
    """To renew it: paste the output of `adaptive-verification settings` between the two comments."""
    assert main(["settings"]) == 0
    printed = capsys.readouterr().out.strip()
    readme = (REPOSITORY.parent / "README.md").read_text()
    begin, end = "<!-- settings: adaptive-verification settings -->", "<!-- end of settings -->"
    assert readme.split(begin)[1].split(end)[0].strip() == printed
