"""Which drafters are refused, and why."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tiny_models import VOCABULARY, save

from adaptive_verification.drafting.loading import load_drafter
from adaptive_verification.drafting.lookup_stage import LookupDrafter
from adaptive_verification.drafting.stage import CausalDrafter
from adaptive_verification.errors import SettingsError, UnsupportedModel
from adaptive_verification.serving import environment
from adaptive_verification.settings import DrafterSettings


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(environment.STATE_DIRECTORY, str(tmp_path / "state"))
    return save(tmp_path / "target", VOCABULARY)


def settings(target: str, drafter: str) -> DrafterSettings:
    return DrafterSettings(target=target, drafter=drafter, dtype="float32", cache_slots=4, max_context_tokens=64)


def test_a_drafter_with_another_tokenizer_is_refused_naming_a_token_that_differs(target: str, tmp_path: Path) -> None:
    swapped = {**VOCABULARY, "token1": 2, "token2": 1}
    drafter = save(tmp_path / "drafter", swapped)
    with pytest.raises(UnsupportedModel, match="token 'token1' is 2 to the drafter and 1 to the target"):
        load_drafter(settings(target, drafter))


def test_a_drafter_that_shares_the_tokenizer_is_loaded_and_publishes_its_costs(target: str, tmp_path: Path) -> None:
    load_drafter(settings(target, save(tmp_path / "drafter", VOCABULARY)))
    assert (tmp_path / "state" / "costs-drafter.json").exists()


@pytest.mark.parametrize("layers", ["", "two", "-1"])
def test_a_number_of_layers_that_is_none_is_refused(target: str, layers: str) -> None:
    with pytest.raises(SettingsError, match="after first-layers: comes a number of layers"):
        load_drafter(settings(target, f"first-layers:{layers}"))


def test_a_device_that_is_not_there_is_refused(target: str) -> None:
    with pytest.raises(SettingsError, match="device='cuda:77' cannot be used"):
        load_drafter(settings(target, "first-layers:1").model_copy(update={"device": "cuda:77"}))


def test_looking_up_alone_needs_no_model_and_publishes_no_costs(target: str, tmp_path: Path) -> None:
    assert isinstance(load_drafter(settings(target, "lookup")), LookupDrafter)
    assert not (tmp_path / "state" / "costs-drafter.json").exists()


def test_a_drafter_that_would_draft_nothing_is_refused(target: str) -> None:
    with pytest.raises(SettingsError, match="lookup_min_match=0 drafts nothing"):
        load_drafter(settings(target, "lookup").model_copy(update={"lookup_min_match": 0}))


def test_without_looking_up_the_model_drafts_alone(target: str) -> None:
    alone = load_drafter(settings(target, "first-layers:1").model_copy(update={"lookup_min_match": 0}))
    assert isinstance(alone, CausalDrafter)
