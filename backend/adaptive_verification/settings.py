"""Every setting of every stage: its default, its range, and the one sentence that explains it.

A stage's settings are the `parameters` of its `config.pbtxt` (strings, as Triton has them), validated here. The
README's table is made from this module. Nothing else in the package reads configuration, apart from the environment
variables that `serving.environment` sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from adaptive_verification.errors import SettingsError

S = TypeVar("S", bound="StageSettings")

DEFAULT_PAIR = "default"
"""The name of the pair that needs no choosing: SmolLM2-135M-Instruct, which `serving.default_pair` prepares, and the
drafter in `drafters/`."""

LOOKUP = "lookup"
"""The name of the drafter that is no model."""


class StageSettings(BaseModel):
    """Base of the settings classes: strings in, validated values out, unknown names refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def from_parameters(cls: type[S], parameters: Mapping[str, Mapping[str, str]]) -> S:
        """Reads the `parameters` object of a Triton model configuration.

        Raises:
            SettingsError: naming each wrong parameter, its value and what is allowed.
        """
        return cls.from_strings({name: value["string_value"] for name, value in parameters.items()})

    @classmethod
    def from_strings(cls: type[S], values: Mapping[str, str]) -> S:
        """Like `from_parameters`, from plain strings. Names that belong to Triton itself (capitals) are left out."""
        try:
            return cls.model_validate({name: value for name, value in values.items() if not name.isupper()})
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, item['loc']))}={item['input']!r}: {item['msg']}" for item in error.errors()
            )
            allowed = ", ".join(cls.model_fields)
            raise SettingsError(f"{cls.__name__}: {problems} (parameters are: {allowed})") from None


class ModelSettings(StageSettings):
    """Settings shared by the stages that run a model over a KV cache."""

    target: str = Field(DEFAULT_PAIR, description="Target model: a directory, a hub name, or `default`.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Type of weights and cache. `auto`: bfloat16 where the processor multiplies it natively, "
        "else float32.",
    )
    device: str = Field("auto", description="`auto` (a GPU where there is one), `cpu`, `cuda` or `cuda:N`.")
    cache_slots: int = Field(72, ge=1, le=4096, description="Sequences whose keys and values are kept at once.")
    max_context_tokens: int = Field(
        2048, ge=16, description="Capacity of a cache slot: prompt, output and drafts of one sequence, in tokens."
    )
    idle_seconds: float = Field(
        120.0, gt=0, description="A sequence unused for so long may lose its slot even where others are free."
    )
    prefix_caching: bool = Field(
        True,
        description="Whether a sequence takes over what another one, present or past, has computed of the same "
        "beginning. `false` where response times must not tell whether somebody else sent the same text.",
    )


class VerifierSettings(ModelSettings):
    """Settings of the model `verifier`."""

    drafter: str = Field(DEFAULT_PAIR, description="As the drafter's; tells whether it needs hidden states, and which.")


class DrafterSettings(ModelSettings):
    """Settings of the model `drafter`."""

    drafter: str = Field(
        DEFAULT_PAIR,
        description="What drafts: the directory of a drafter made by `train-drafter`; a directory or hub name of any "
        "causal language model with the target's tokenizer; `first-layers:N` (the target's own first N layers with its "
        "head); `default` (the one that was trained for the default target; for any other target `lookup`); or "
        "`lookup`: no model, only what "
        "`lookup_min_match` finds.",
    )
    lookup_min_match: int = Field(
        3,
        ge=0,
        le=32,
        description="Where at least so many of a sequence's last tokens occurred in it before, what followed them is "
        "drafted, instead of asking the model. 0: never.",
    )
    draft_top_k: int = Field(
        64, ge=1, le=4096, description="Most likely tokens that a sampled draft is drawn from, renormalized."
    )
    draft_features: Literal["none", "all"] = Field(
        "none",
        description="What the estimator is sent of a draft's distribution beside its log-odds. `all`: entropy, margin "
        "of the two most likely tokens, and the drawn token's log-odds, which only recordings keep. Costs two to three "
        "passes over the vocabulary for each draft.",
    )
    max_catch_up_tokens: int = Field(
        256,
        ge=1,
        description="Context tokens the drafter computes in one step for rows that want drafts; rows beyond that "
        "draft later.",
    )


class EstimatorSettings(StageSettings):
    """Settings of the model `av_estimator`."""

    trim: Literal["adaptive", "off", "fixed_length", "threshold"] = Field(
        "adaptive",
        description="Which drafts are verified. `adaptive`: as many of the batch's best as pay for themselves; "
        "`off`: all; `fixed_length`: the first `fixed_length` of each row; `threshold`: until q_max falls below "
        "`threshold`.",
    )
    feature: str = Field(
        "logit_q_max",
        description="What acceptance is predicted from: `logit_q_max`, `gumbel_q_max`, `log_q_max`; with the drafter's "
        "`draft_features` = `all` also `entropy` and `top_two_margin`; or without a fit `q_max_unfitted` and "
        "`drafter_score` (a drafter's own confidence head).",
    )
    evidence: Literal["none", "history"] = Field(
        "history",
        description="What else it is predicted from. `history`: whether the request's earlier drafts were accepted "
        "more often than predicted.",
    )
    fixed_length: int = Field(3, ge=0, le=16, description="Drafts verified per row with `trim` = `fixed_length`.")
    threshold: float = Field(0.3, ge=0, le=1, description="Smallest q_max verified with `trim` = `threshold`.")
    max_draft_tokens: int = Field(
        16, ge=1, le=16, description="Draft positions that the estimator knows; deeper drafts are never verified."
    )
    refit_interval: int = Field(100, ge=1, description="Steps between two refits.")
    damping_labels: float = Field(50.0, ge=0, description="A refit that rests on so many labels moves half as far.")
    exploration_share: float = Field(
        0.005,
        ge=0,
        le=0.5,
        description="Share of the time that may go into drafts beyond the plan, a little deeper, so that what they are "
        "worth stays known; four times as much until the fit has learned. 0: none.",
    )
    max_sequences: int = Field(
        4096, ge=1, description="Sequences remembered between steps; the least recently used is forgotten."
    )
    calibration_half_life_steps: float = Field(
        2000.0,
        ge=0,
        description="Labelled steps after which the reported AUC, log-loss and calibration error count a label half. "
        "0: never.",
    )
    state_directory: str = Field(
        "", description="Where fit, cost curves and calibration are kept across restarts. Empty: nowhere."
    )
    target: str = Field(DEFAULT_PAIR, description="As the verifier's; tells whose kept state it is.")
    drafter: str = Field(
        DEFAULT_PAIR,
        description="As the drafter's; tells whose kept state it is, and whether drafting takes a model's time.",
    )
    acceptance: Literal["rejection", "coupled"] = Field(
        "rejection", description="As generate's; tells whose kept state it is."
    )


class GenerateSettings(StageSettings):
    """Settings of the model `generate`."""

    target: str = Field(DEFAULT_PAIR, description="Target model whose tokenizer and chat template are used.")
    num_draft_tokens: int = Field(7, ge=0, le=16, description="Drafts per step and sequence, at most (K).")
    max_live_sequences: int = Field(64, ge=1, le=4096, description="Sequences decoded at once; further requests queue.")
    max_queued_requests: int = Field(
        512, ge=0, description="Requests that may wait; beyond that: UNAVAILABLE, at once."
    )
    max_context_tokens: int = Field(2048, ge=16, description="As the verifier's. Longer prompts are refused.")
    max_prompt_tokens_per_step: int = Field(
        256, ge=1, description="Prompt tokens computed in one step; longer prompts are cut into chunks of this size."
    )
    default_max_tokens: int = Field(128, ge=1, description="Output tokens of a request that does not say.")
    acceptance: Literal["rejection", "coupled"] = Field(
        "rejection",
        description="How drafts are accepted for a request that does not say. `rejection`: most often; `coupled`: a "
        "seeded text depends on seed and target alone. Requests with the other teach the estimator nothing.",
    )


SETTINGS_BY_MODEL: dict[str, type[StageSettings]] = {
    "generate": GenerateSettings,
    "drafter": DrafterSettings,
    "av_estimator": EstimatorSettings,
    "verifier": VerifierSettings,
}


def table_rows() -> list[tuple[str, str, Any, str]]:
    """(model, setting, default, description) of every setting, in the order of the README's table."""
    return [
        (model, name, field.default, field.description or "")
        for model, settings in SETTINGS_BY_MODEL.items()
        for name, field in settings.model_fields.items()
    ]
