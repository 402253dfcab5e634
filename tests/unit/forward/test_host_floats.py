"""Float32 and bfloat16 in compiled loops against torch's own conversions and exponential."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from adaptive_verification.compiled import compiled
from adaptive_verification.forward.host_floats import as_array, exponential, is_on_host, narrowed, widened


@compiled
def _copy(source: Any, target: Any) -> None:
    for i in range(len(source)):
        target[i] = narrowed(widened(source[i]), target)


@compiled
def _exponentials(source: Any, target: Any) -> None:
    for i in range(len(source)):
        target[i] = exponential(source[i])


def _every_bfloat16() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)


def test_every_bfloat16_is_widened_and_narrowed_again_as_it_is() -> None:
    bits = _every_bfloat16()
    widened_bits, back = torch.empty(len(bits)), torch.empty_like(bits)
    _copy(as_array(bits), as_array(widened_bits))
    _copy(as_array(widened_bits), as_array(back))
    torch.testing.assert_close(widened_bits, bits.float(), equal_nan=True, atol=0, rtol=0)
    torch.testing.assert_close(back, bits, equal_nan=True, atol=0, rtol=0)


def test_narrowing_rounds_to_the_nearest_and_halves_to_even() -> None:
    """Every float32 whose upper half is any, and whose lower half is at, just below or just above the middle."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    for lower in (0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = torch.from_numpy((upper | np.uint32(lower)).view(np.float32))
        rounded = torch.empty(len(values), dtype=torch.bfloat16)
        _copy(as_array(values), as_array(rounded))
        torch.testing.assert_close(rounded, values.bfloat16(), equal_nan=True, atol=0, rtol=0)


def test_the_exponential_is_exact_to_two_units_in_the_last_place() -> None:
    x = np.linspace(-87, 88, 500_001).astype(np.float32)
    got = np.empty_like(x)
    _exponentials(x, got)
    np.testing.assert_allclose(got, np.exp(x.astype(np.float64)), rtol=2 * 2**-23)


def test_the_exponential_beyond_its_range() -> None:
    x = np.array([-np.inf, -1000, 1000, np.inf, np.nan], dtype=np.float32)
    got = np.empty_like(x)
    _exponentials(x, got)
    assert (got[:2] < 1e-37).all()
    assert (got[2:4] > 1e38).all()
    assert np.isnan(got[4])


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, True), (torch.bfloat16, True), (torch.half, False)])
def test_which_tensors_loops_can_work_on(dtype: torch.dtype, expected: bool) -> None:
    assert is_on_host(torch.empty(1, dtype=dtype)) == expected
    assert not is_on_host(torch.empty(1, dtype=dtype, device="meta"))
