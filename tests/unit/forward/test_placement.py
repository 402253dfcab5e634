"""What is chosen from what a processor says of itself."""

from __future__ import annotations

import pytest
import torch

from adaptive_verification.forward.placement import choose_dtype, multiplies_in_tiles

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("capabilities", "dtype", "in_tiles"),
    [
        ({"avx2": True, "avx512_bf16": False, "amx_bf16": False}, torch.float32, False),
        ({"avx512_bf16": True, "amx_bf16": False}, torch.bfloat16, False),
        ({"avx512_bf16": True, "amx_bf16": True}, torch.bfloat16, True),
        ({"bf16": True}, torch.bfloat16, False),
        ({}, torch.float32, False),
    ],
)
def test_a_processor_multiplies_what_it_has_instructions_for(
    capabilities: dict[str, bool], dtype: torch.dtype, in_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    multiplies_in_tiles.cache_clear()
    try:
        assert choose_dtype("auto", CPU) == dtype
        assert multiplies_in_tiles() is in_tiles
    finally:
        multiplies_in_tiles.cache_clear()
