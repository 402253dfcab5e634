"""Packed attention equals attention row by row, whatever pieces and segments the rows are cut into."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adaptive_verification.forward import looped_rows, ragged_attention
from adaptive_verification.forward.looped_rows import are_looped, dealt
from adaptive_verification.forward.ragged_attention import KVCache, RaggedBatch
from adaptive_verification.forward.row import Row
from adaptive_verification.forward.segments import plan_segments

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
    "long prompts": [Row(3, 0, 130), Row(4, 70, 33), Row(8, 100, 16)],
    "far and near": [Row(0, 5, 1), Row(1, 500, 2), Row(2, 5, 1), Row(20, 5, 1)],
    "alone": [Row(7, 30, 5)],
}


@pytest.fixture(params=["one thread", "several threads"], autouse=True)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0 if request.param == "several threads" else 10**6
    monkeypatch.setattr(looped_rows, "POSITIONS_OF_ONE_THREAD", most)


def cache_and_inputs(
    rows: list[Row],
    dtype: torch.dtype = torch.float32,
    key_dim: int = KEY_DIM,
    value_dim: int = VALUE_DIM,
    groups: int = GROUPS,
) -> tuple[KVCache, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    cache = KVCache(1, NUM_SLOTS, KV_HEADS, CAPACITY, key_dim, value_dim, dtype, torch.device("cpu"))
    for row in rows:
        cache.keys[0][row.slot, :, : row.context_length] = torch.randn(KV_HEADS, row.context_length, key_dim)
        cache.values[0][row.slot, :, : row.context_length] = torch.randn(KV_HEADS, row.context_length, value_dim)
    num_tokens = sum(row.query_length for row in rows)
    heads = ((KV_HEADS * groups, key_dim), (KV_HEADS, key_dim), (KV_HEADS, value_dim))
    query, key, value = (torch.randn(num_tokens, *of_one).to(dtype) for of_one in heads)
    return cache, query, key, value


def row_by_row(rows: list[Row], cache: KVCache, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """In float64, token by token: `[T, heads, value_dim]`."""
    outputs = []
    start, groups = 0, query.shape[1] // KV_HEADS
    for row in rows:
        new = slice(start, start + row.query_length)
        old_keys = cache.keys[0][row.slot, :, : row.context_length]
        old_values = cache.values[0][row.slot, :, : row.context_length]
        keys = torch.cat([old_keys, key[new].transpose(0, 1)], 1).double().repeat_interleave(groups, 0)
        values = torch.cat([old_values, value[new].transpose(0, 1)], 1).double().repeat_interleave(groups, 0)
        for token in range(row.query_length):
            seen = row.context_length + token + 1
            scores = SCALING * torch.einsum("hd,htd->ht", query[start + token].double(), keys[:, :seen])
            outputs.append(torch.einsum("ht,htd->hd", scores.softmax(-1), values[:, :seen]))
        start += row.query_length
    return torch.stack(outputs)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("name", BATCHES)
def test_packed_attention_equals_row_by_row(name: str, dtype: torch.dtype, tolerance: float) -> None:
    rows = BATCHES[name]
    cache, query, key, value = cache_and_inputs(rows, dtype)
    expected = row_by_row(rows, cache, query, key, value)
    output = RaggedBatch(rows, cache).attend(0, query, key, value, SCALING)
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("groups", [1, 2, 4, 7])
@pytest.mark.parametrize("name", ["alone", "any"])
def test_any_number_of_query_heads_may_share_a_key_value_head(name: str, groups: int) -> None:
    """They are taken three at a time, and of few rows by different threads: some threes are not full."""
    rows = BATCHES[name]
    cache, query, key, value = cache_and_inputs(rows, groups=groups)
    expected = row_by_row(rows, cache, query, key, value)
    output = RaggedBatch(rows, cache).attend(0, query, key, value, SCALING)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("num_rows", "groups", "parts_per_kv_head"), [(2, 3, 1), (2, 7, 3), (8, 7, 1)])
def test_each_part_fetches_the_keys_of_the_next(
    num_rows: int, groups: int, parts_per_kv_head: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [Row(slot, 10 + slot, 1) for slot in range(num_rows)]
    cache, query, _, _ = cache_and_inputs(rows, groups=groups)
    queries, first_tokens = query.numpy(), np.arange(num_rows)
    pieces = [np.array(numbers) for numbers in zip(*map(astuple, rows), strict=True)]
    attend: Any = looped_rows._loop(queries.dtype, KEY_DIM, VALUE_DIM, True)
    names = inspect.signature(looped_rows._attend_part.py_func).parameters  # type: ignore[attr-defined]
    parts: list[dict[str, Any]] = []
    monkeypatch.setattr(looped_rows, "_attend_part", lambda *part: parts.append(dict(zip(names, part, strict=True))))
    attend.py_func(queries, *cache.arrays[0], *pieces, first_tokens, SCALING, queries)

    assert len(parts) == num_rows * KV_HEADS * parts_per_kv_head
    done = [(part["first_token"], head) for part in parts for head in range(part["head"], part["head"] + part["heads"])]
    assert done == [(row, head) for row in range(num_rows) for head in range(KV_HEADS * groups)]
    own = [(part["keys"].ctypes.data, part["context"] + part["length"]) for part in parts]
    fetched = [(part["next_keys"].ctypes.data, part["num_next_keys"]) for part in parts]
    assert fetched == [*own[1:], own[-1]]


def test_these_batches_meet_every_shape_of_segment() -> None:
    """One row and several, with a mask and without."""
    segments = [segment for rows in BATCHES.values() for segment in plan_segments(rows)]
    assert {segment.num_slots > 1 for segment in segments} == {True, False}
    assert {segment.num_slots > len(segment.rows) for segment in segments} == {True, False}


@pytest.mark.parametrize("longest", [0, 1, 8])
@pytest.mark.parametrize("name", BATCHES)
def test_it_does_not_matter_which_rows_are_looped(name: str, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = BATCHES[name]
    cache, query, key, value = cache_and_inputs(rows)
    expected = row_by_row(rows, cache, query, key, value)
    looped = np.array([row.query_length <= longest for row in rows])
    monkeypatch.setattr(ragged_attention, "are_looped", lambda rows, dtype: looped)
    output = RaggedBatch(rows, cache).attend(0, query, key, value, SCALING)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(10))
def test_every_row_is_in_one_segment_that_is_as_long_as_it(seed: int) -> None:
    rows = random_rows(1 + 2 * seed, [1, 1, 1, 2, 5, 40], seed)
    segments = plan_segments(rows)
    assert sorted(index for segment in segments for index in segment.rows) == list(range(len(rows)))
    for segment in segments:
        for index in segment.rows:
            assert segment.first_slot <= rows[index].slot < segment.first_slot + segment.num_slots
            assert rows[index].query_length <= segment.query_length
            assert rows[index].context_length + rows[index].query_length <= segment.total_length


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_looped_rows_numbers_do_not_depend_on_the_other_rows(head_dim: int) -> None:
    rows = BATCHES["any"]
    cache, query, key, value = cache_and_inputs(rows, key_dim=head_dim, value_dim=head_dim)
    together = RaggedBatch(rows, cache).attend(0, query, key, value, SCALING)
    start = 0
    for row in rows:
        own = slice(start, start + row.query_length)
        alone = RaggedBatch([row], cache).attend(0, query[own], key[own], value[own], SCALING)
        torch.testing.assert_close(together[own], alone, atol=0, rtol=0)
        start += row.query_length


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
@pytest.mark.parametrize("num_pieces", [1, 2, 7, 40])
def test_threads_have_about_the_same_work(num_pieces: int, num_threads: int) -> None:
    work = np.random.default_rng(num_pieces).integers(1, 1000, num_pieces)
    order = dealt(work, num_threads)
    assert sorted(order) == list(range(num_pieces))
    shares = [share.sum() for share in np.array_split(work[order], num_threads)]
    assert max(shares) - min(shares) <= work.max()


@pytest.mark.parametrize("num_threads", [2, 4])
def test_threads_have_the_same_work_of_a_long_prompt(num_threads: int) -> None:
    work = np.arange(1, 41)
    shares = work[dealt(work, num_threads)].reshape(num_threads, -1).sum(1)
    assert (shares == shares[0]).all()


def test_no_piece_of_a_prompt_looks_beyond_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[tuple[int, ...]] = []

    def loop(*kind: object) -> Callable[..., None]:
        def keep(*arrays: Any) -> None:
            pieces.extend(sorted(zip(*(array.tolist() for array in arrays[3:7]), strict=True)))

        return keep

    monkeypatch.setattr(looped_rows, "_loop", loop)
    rows = [Row(2, 9, 1), Row(5, 7, 40)]
    RaggedBatch(rows, cache_and_inputs(rows)[0]).attend(0, *cache_and_inputs(rows)[1:], SCALING)
    assert pieces == [(2, 9, 1, 0), (5, 7, 16, 1), (5, 23, 16, 17), (5, 39, 8, 33)]  # slot, context, length, place


def test_several_threads_attend_where_there_is_much_to_look_back_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted for each token of a row."""
    monkeypatch.setattr(looped_rows, "POSITIONS_OF_ONE_THREAD", 200)
    by_several: list[bool] = []

    def loop(floats: str, key_dim: int, value_dim: int, of_several: bool) -> Callable[..., None]:
        by_several.append(of_several)
        return lambda *arrays: None

    monkeypatch.setattr(looped_rows, "_loop", loop)
    for row in (Row(0, 199, 1), Row(0, 200, 1), Row(0, 98, 2), Row(0, 99, 2)):
        cache, query, key, value = cache_and_inputs([row])
        RaggedBatch([row], cache).attend(0, query, key, value, SCALING)
    assert by_several == [False, True, False, True]


@pytest.mark.parametrize(("dtype", "loops"), [(torch.float32, True), (torch.bfloat16, True), (torch.float16, False)])
def test_all_rows_are_segmented_where_loops_cannot_read_the_numbers(dtype: torch.dtype, loops: bool) -> None:
    cache = KVCache(1, 2, 1, 8, 4, 4, dtype, torch.device("cpu"))
    assert RaggedBatch([Row(0, 1, 1)], cache).has_segmented_rows is not loops


def test_in_tiles_of_bfloat16_rows_are_segmented_where_they_are_long_or_of_one_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Matrix products are faster there, but not where most of them would be padding."""
    monkeypatch.setattr(looped_rows, "multiplies_in_tiles", lambda: True)
    for lengths, expected in (([1], True), ([2], True), ([4], False), ([1, 2, 3, 4, 5], True)):
        rows = [Row(slot, 300, lengths[slot % len(lengths)]) for slot in range(20)]
        assert are_looped(rows, torch.bfloat16).tolist() == [expected] * 20
        assert are_looped(rows, torch.float32).all()
    assert are_looped([Row(slot, 30 * slot, 4) for slot in range(20)], torch.bfloat16).all()
    prompts_beside_one = [Row(0, 0, 9), Row(1, 300, 1), Row(2, 0, 200)]
    assert are_looped(prompts_beside_one, torch.bfloat16).tolist() == [False, True, False]
    assert are_looped(prompts_beside_one, torch.float32).all()
    monkeypatch.setattr(looped_rows, "multiplies_in_tiles", lambda: False)
    assert are_looped([*prompts_beside_one, *(Row(slot, 300, 4) for slot in range(3, 20))], torch.bfloat16).all()


def test_what_is_no_number_stays_none() -> None:
    """A target whose weights are broken must not look as if it were sound."""
    rows = [Row(0, 3, 1), Row(1, 3, 1)]
    cache, query, key, value = cache_and_inputs(rows)
    query[0, 0, 0] = torch.nan
    output = RaggedBatch(rows, cache).attend(0, query, key, value, SCALING)
    assert output[0, 0].isnan().all()
    assert not output[0, 1:].isnan().any()
    assert not output[1].isnan().any()


def test_the_queries_may_be_a_part_of_a_larger_tensor() -> None:
    rows = BATCHES["few draft"]
    cache, query, key, value = cache_and_inputs(rows)
    joined = torch.cat([query, key], 1)
    output = RaggedBatch(rows, cache).attend(0, joined[:, : query.shape[1]], key, value, SCALING)
    assert torch.equal(output, RaggedBatch(rows, cache).attend(0, query, key, value, SCALING))


def test_grouped_heads_are_those_of_torch() -> None:
    """A query head attends to the keys of its group's head, as `enable_gqa` defines it."""
    rows = [Row(0, 0, 7)]
    cache, query, key, value = cache_and_inputs(rows)
    output = RaggedBatch(rows, cache).attend(0, query, key, value, SCALING)
    queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    expected = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=SCALING, enable_gqa=True)
    torch.testing.assert_close(output, expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5)
