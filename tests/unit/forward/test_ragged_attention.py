"""Packed attention equals attention row by row, whatever segments the rows are cut into."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adaptive_verification.forward.ragged_attention import KVCache, RaggedBatch, Row, plan_segments

KV_HEADS, GROUPS, KEY_DIM, VALUE_DIM, NUM_SLOTS, CAPACITY = 2, 3, 4, 5, 40, 600
SCALING = 0.37


def random_rows(num_rows: int, query_lengths: list[int], seed: int, longest_context: int = 200) -> list[Row]:
    """In arbitrary slots; each row has one of the query lengths."""
    rng = random.Random(seed)
    slots = rng.sample(range(NUM_SLOTS), num_rows)
    return [Row(slot, rng.randrange(longest_context), rng.choice(query_lengths)) for slot in slots]


ONE_LONG_AMONG_MANY = [Row(slot, 150, 8 if slot == 9 else 1) for slot in range(30)]
FEW_LONG_AMONG_MANY = [Row(slot, 150, 6 if slot % 7 == 3 else 1) for slot in range(30)]
BATCHES = {
    "decoding": random_rows(20, [1], 0),
    "all draft": random_rows(12, [4], 1),
    "one drafts": ONE_LONG_AMONG_MANY,
    "few draft": FEW_LONG_AMONG_MANY,
    "any": random_rows(25, [1, 1, 1, 2, 8], 2),
    "with a prompt": [*random_rows(8, [1, 3], 3)[:7], Row(39, 0, 90)],
    "far and near": [Row(0, 5, 1), Row(1, 500, 2), Row(2, 5, 1), Row(20, 5, 1)],
    "alone": [Row(7, 30, 5)],
}


def cache_and_inputs(rows: list[Row]) -> tuple[KVCache, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    cache = KVCache(1, NUM_SLOTS, KV_HEADS, CAPACITY, KEY_DIM, VALUE_DIM, torch.float32, torch.device("cpu"))
    for row in rows:
        cache.keys[0][row.slot, :, : row.context_length] = torch.randn(KV_HEADS, row.context_length, KEY_DIM)
        cache.values[0][row.slot, :, : row.context_length] = torch.randn(KV_HEADS, row.context_length, VALUE_DIM)
    num_tokens = sum(row.query_length for row in rows)
    query = torch.randn(num_tokens, KV_HEADS * GROUPS, KEY_DIM)
    return cache, query, torch.randn(num_tokens, KV_HEADS, KEY_DIM), torch.randn(num_tokens, KV_HEADS, VALUE_DIM)


def row_by_row(rows: list[Row], cache: KVCache, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """In float64, token by token: `[T, heads, value_dim]`."""
    outputs = []
    start = 0
    for row in rows:
        new = slice(start, start + row.query_length)
        old_keys = cache.keys[0][row.slot, :, : row.context_length]
        old_values = cache.values[0][row.slot, :, : row.context_length]
        keys = torch.cat([old_keys, key[new].transpose(0, 1)], 1).double().repeat_interleave(GROUPS, 0)
        values = torch.cat([old_values, value[new].transpose(0, 1)], 1).double().repeat_interleave(GROUPS, 0)
        for token in range(row.query_length):
            seen = row.context_length + token + 1
            scores = SCALING * torch.einsum("hd,htd->ht", query[start + token].double(), keys[:, :seen])
            outputs.append(torch.einsum("ht,htd->hd", scores.softmax(-1), values[:, :seen]))
        start += row.query_length
    return torch.stack(outputs)


@pytest.mark.parametrize("name", BATCHES)
def test_packed_attention_equals_row_by_row(name: str) -> None:
    rows = BATCHES[name]
    cache, query, key, value = cache_and_inputs(rows)
    expected = row_by_row(rows, cache, query, key, value)
    output = RaggedBatch(rows, cache).attend(0, query, key, value, SCALING)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)


def test_both_ways_to_attend_are_among_the_batches_above() -> None:
    """Matrix products and torch's own attention, with and without a mask; views and copies of the cache."""
    segments = [segment for rows in BATCHES.values() for segment in plan_segments(rows)]
    assert {segment.query_length * GROUPS > 12 for segment in segments} == {True, False}
    assert {isinstance(segment.slots, range) for segment in segments} == {True, False}
    few_queries = [segment for segment in segments if segment.query_length * GROUPS <= 12]
    assert {len(segment.slots) > 1 for segment in few_queries} == {True, False}


@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_in_one_segment_that_is_as_long_as_it(seed: int) -> None:
    rows = random_rows(1 + seed, [1, 1, 1, 2, 5, 40], seed)
    segments = plan_segments(rows)
    assert sorted(index for segment in segments for index in segment.rows) == list(range(len(rows)))
    for segment in segments:
        for place, index in enumerate(segment.rows):
            row = rows[index]
            assert row.slot in segment.slots
            assert isinstance(segment.slots, range) or segment.slots[place] == row.slot
            assert row.query_length <= segment.query_length
            assert row.context_length + row.query_length <= segment.total_length


def test_a_few_rows_of_many_tokens_do_not_pad_the_others() -> None:
    run, copied = plan_segments(FEW_LONG_AMONG_MANY)
    assert (run.query_length, len(run.rows)) == (1, 26)
    assert copied.slots == (3, 10, 17, 24)


def test_rows_of_equal_tokens_are_never_copied() -> None:
    (run,) = plan_segments([Row(slot, 150, 4) for slot in range(30)])
    assert run.slots == range(30)


def test_matrix_products_and_torchs_attention_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = BATCHES["any"]
    cache, query, key, value = cache_and_inputs(rows)
    by_products = RaggedBatch(rows, cache).attend(0, query, key, value, SCALING)
    monkeypatch.setattr("adaptive_verification.forward.ragged_attention._MOST_QUERIES_BY_PRODUCTS", 0)
    by_torch = RaggedBatch(rows, cache).attend(0, query, key, value, SCALING)
    assert not torch.equal(by_products, by_torch)
    torch.testing.assert_close(by_products, by_torch, atol=1e-6, rtol=1e-5)


def test_grouped_heads_are_those_of_torch() -> None:
    """A query head attends to the keys of its group's head, as `enable_gqa` defines it."""
    rows = [Row(0, 0, 7)]
    cache, query, key, value = cache_and_inputs(rows)
    output = RaggedBatch(rows, cache).attend(0, query, key, value, SCALING)
    queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    expected = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=SCALING, enable_gqa=True)
    torch.testing.assert_close(output, expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5)
