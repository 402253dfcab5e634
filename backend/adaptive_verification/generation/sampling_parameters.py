"""How the tokens of one request are chosen, and when they end: ranges and defaults.

Knows names, ranges and defaults; not where the values come from (`request`) nor what is done with them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from adaptive_verification.errors import InvalidRequest

GREEDY_BELOW_TEMPERATURE = 1e-5
"""Lower temperatures mean greedy, as in vLLM: dividing logits by them would only overflow."""
MAX_STOP_WORDS = 16
MAX_STOP_WORD_CHARACTERS = 256
INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1
SHOWN_VALUE_CHARACTERS = 80

StopWord = Annotated[str, Field(min_length=1, max_length=MAX_STOP_WORD_CHARACTERS)]


class SamplingParameters(BaseModel):
    """What the JSON input `sampling_parameters` may hold; each name is also an input of its own.

    Defaults are vLLM's (plain sampling from the target) where they are constant; `request` fills in those that come
    from the server's settings. A field's description is what an error says is allowed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: int = Field(ge=1, le=INT32_MAX, description="an integer from 1 to 2147483647")
    num_draft_tokens: int = Field(ge=0, le=INT32_MAX, description="an integer from 0 (no speculation) to 2147483647")
    seed: int = Field(ge=0, le=UINT64_MAX, description="an integer from 0 to 18446744073709551615")
    acceptance: Literal["rejection", "coupled"] = Field(description="rejection or coupled")
    temperature: float = Field(
        1.0, ge=0.0, le=100.0, allow_inf_nan=False, description="a number from 0 (greedy) to 100"
    )
    top_p: float = Field(1.0, gt=0.0, le=1.0, allow_inf_nan=False, description="a number above 0 and at most 1 (off)")
    top_k: int = Field(0, ge=-1, le=INT32_MAX, description="an integer from 1 to 2147483647, or 0 or -1 (off)")
    stop_words: tuple[StopWord, ...] = Field(
        (),
        max_length=MAX_STOP_WORDS,
        description=f"at most {MAX_STOP_WORDS} strings of 1 to {MAX_STOP_WORD_CHARACTERS} characters each",
    )

    @field_validator("stop_words", mode="before")
    @classmethod
    def _accept_one_word(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("temperature")
    @classmethod
    def _round_to_greedy(cls, value: float) -> float:
        return value if value >= GREEDY_BELOW_TEMPERATURE else 0.0

    @field_validator("top_k")
    @classmethod
    def _accept_minus_one(cls, value: int) -> int:
        return max(value, 0)


def validated(model: type[BaseModel], values: dict[str, Any]) -> Any:
    """An instance of `model`.

    Raises:
        InvalidRequest: naming each wrong field, its value and what is allowed.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise InvalidRequest("; ".join(dict.fromkeys(_problem(model, item) for item in error.errors()))) from None


def _problem(model: type[BaseModel], item: Any) -> str:
    field_name, *inner = item["loc"]
    if item["type"] == "extra_forbidden":
        return f"{field_name} is not a known parameter; known are {', '.join(model.model_fields)}"
    shown = repr(item["input"])
    if len(shown) > SHOWN_VALUE_CHARACTERS:
        shown = shown[:SHOWN_VALUE_CHARACTERS] + "..."
    place = "".join(f"[{part}]" for part in inner if isinstance(part, int))
    return f"{field_name}{place} is {shown}; it must be {model.model_fields[str(field_name)].description}"
