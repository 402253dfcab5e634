"""The compiled parts of a layer against torch's definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from adaptive_verification.forward import few_tokens
from adaptive_verification.forward.ragged_attention import KVCache, RaggedBatch
from adaptive_verification.forward.row import Row
from adaptive_verification.forward.short_rows import FEWEST_POSITIONS

HEAD_DIM, CAPACITY = 8, 32


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _assert_close(got: few_tokens.Floats, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.from_numpy(got), expected, rtol=1e-5, atol=1e-6)


def test_normalize_is_the_root_mean_square_norm() -> None:
    x, weight = _random(3, 40), _random(40, seed=1)
    _assert_close(few_tokens.normalize(x.numpy(), weight.numpy(), 1e-5), F.rms_norm(x, (40,), weight, 1e-5))


def test_activate_is_the_gated_silu() -> None:
    gate_and_up = 40 * _random(3, 20)
    gate, up = gate_and_up.chunk(2, -1)
    _assert_close(few_tokens.activate(gate_and_up.numpy()), F.silu(gate) * up)


def test_add_adds_in_place() -> None:
    x, update = _random(2, 5), _random(2, 5, seed=1)
    expected = x + update
    few_tokens.add(x.numpy(), update.numpy())
    assert torch.equal(x, expected)


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(1, 1), (6, 2), (4, 4)])
def test_attend_rotates_writes_the_cache_and_attends_up_to_each_token(query_heads: int, kv_heads: int) -> None:
    """A row of two tokens, one of one, and a first token."""
    slots, positions = torch.tensor([2, 2, 0, 3]), torch.tensor([9, 10, 4, 0])
    keys, values = (_random(4, kv_heads, CAPACITY, HEAD_DIM, seed=seed) for seed in (1, 2))
    qkv = _random(4, query_heads + 2 * kv_heads, HEAD_DIM)
    angle = _random(4, HEAD_DIM // 2, seed=3)
    turned = torch.view_as_complex(qkv.unflatten(-1, (-1, 2))) * torch.polar(torch.ones(()), angle)[:, None]
    rotated = torch.view_as_real(turned).flatten(-2)
    expected_keys, expected_values = keys.clone(), values.clone()
    expected_keys[slots, :, positions] = rotated[:, query_heads : query_heads + kv_heads]
    expected_values[slots, :, positions] = qkv[:, query_heads + kv_heads :]

    places, cache = (slots.numpy(), positions.numpy()), (keys.numpy(), values.numpy())
    own_qkv, rotation = qkv.clone().flatten(1).numpy(), torch.stack([angle.cos(), angle.sin()], -1).numpy()
    few_tokens.rotate_and_cache(own_qkv, rotation, *places, *cache)
    attended = few_tokens.attend(own_qkv, *places, *cache, 0.3)
    torch.testing.assert_close(keys, expected_keys)
    torch.testing.assert_close(values, expected_values)
    for token, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        query = rotated[token, :query_heads].unsqueeze(1)  # [heads, 1, head_dim]
        seen_keys, seen_values = (
            of_slot[slot, :, : position + 1].repeat_interleave(query_heads // kv_heads, 0)
            for of_slot in (expected_keys, expected_values)
        )
        expected = F.scaled_dot_product_attention(query, seen_keys, seen_values, scale=0.3)
        _assert_close(attended[token], expected.flatten())


def test_a_batch_has_few_tokens_on_a_cpu_in_float32_only() -> None:
    def has_few_tokens(rows: list[Row], dtype: torch.dtype = torch.float32) -> bool:
        cache = KVCache(1, 16, 1, 2048, HEAD_DIM, HEAD_DIM, dtype, torch.device("cpu"))
        return RaggedBatch(rows, cache).has_few_tokens

    assert has_few_tokens([Row(slot, 100, 1) for slot in range(few_tokens.MOST_TOKENS)])
    assert not has_few_tokens([Row(slot, 100, 1) for slot in range(few_tokens.MOST_TOKENS + 1)])
    assert not has_few_tokens([Row(0, 100, 1)], torch.bfloat16)


def test_several_threads_attend_where_there_is_much_to_look_back_at() -> None:
    cache = KVCache(1, 16, 1, 2048, HEAD_DIM, HEAD_DIM, torch.float32, torch.device("cpu"))
    assert RaggedBatch([Row(0, FEWEST_POSITIONS - 1, 1)], cache).looks_back_at_little
    assert not RaggedBatch([Row(slot, FEWEST_POSITIONS // 2, 1) for slot in range(2)], cache).looks_back_at_little
