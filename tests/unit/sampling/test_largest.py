"""The largest few of long rows, against looking at the whole row."""

from __future__ import annotations

import pytest
import torch

from adaptive_verification.sampling.largest import first_largest, largest


@pytest.mark.parametrize("size", [1, 255, 257, 1000, 49_152])
@pytest.mark.parametrize("count", [1, 7, 128])
def test_the_largest_are_those_of_the_whole_row(size: int, count: int) -> None:
    values = torch.randn(5, size, generator=torch.Generator().manual_seed(size))
    count = min(count, size)
    found, places = largest(values, count)
    assert torch.equal(found, values.topk(count).values)
    assert torch.equal(values.gather(-1, places), found)
    assert all(len(set(row)) == count for row in places.tolist())


def test_many_of_the_largest_in_one_block_and_equal_ones_are_found() -> None:
    values = torch.zeros(2, 3000)
    values[0, 640:700] = torch.arange(60.0, 0.0, -1)
    values[1, ::2] = 1.0
    found, places = largest(values, 8)
    assert places[0].tolist() == list(range(640, 648))
    assert (found[1] == 1).all()
    assert (values[1, places[1]] == 1).all()


@pytest.mark.parametrize("size", [1, 300, 1000, 3001])
def test_of_equal_ones_the_first_is_the_largest(size: int) -> None:
    values = torch.full((3, size), -torch.inf)
    values[1, size // 3 :] = 2.0
    values[2, -1] = 5.0
    assert first_largest(values).tolist() == [0, size // 3, size - 1]
