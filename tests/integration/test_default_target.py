"""The default target in every number format a processor may choose: its probe must not take rounding for an error."""

from __future__ import annotations

import pytest
import torch
from tests.device import DEVICE

from adaptive_verification.forward.causal_model import CausalModel, ModelOptions
from adaptive_verification.serving.default_pair import resolve_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_loads(dtype: torch.dtype) -> None:
    model = CausalModel.load(resolve_model("default"), ModelOptions(dtype, DEVICE, num_slots=2, max_context_tokens=32))
    assert model.cache.keys[0].dtype == dtype
