"""The compiled parts of a layer against torch's definitions, in float32 and bfloat16, by one thread and by several."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adaptive_verification.forward import between_products
from adaptive_verification.forward.between_products import MOST_TOKENS_OF_ONE_THREAD
from adaptive_verification.forward.host_floats import as_array, as_pairs
from adaptive_verification.forward.ragged_attention import KVCache, RaggedBatch
from adaptive_verification.forward.row import Row

HEAD_DIM, CAPACITY = 8, 32
DTYPES = [torch.float32, torch.bfloat16]
TOKENS = [3, MOST_TOKENS_OF_ONE_THREAD + 1]


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _assert_close(got: Tensor, expected: Tensor) -> None:
    """Equal to rounding in the type of what was got."""
    rtol, atol = (1e-5, 1e-6) if got.dtype == torch.float32 else (2**-8, 1e-4)
    torch.testing.assert_close(got.float(), expected.float(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_normalize_is_the_root_mean_square_norm(tokens: int, dtype: torch.dtype) -> None:
    x, weight = _random(tokens, 40), _random(40, dtype=dtype, seed=1)
    normalized = torch.empty(tokens, 40, dtype=dtype)
    between_products.normalize(x.numpy(), as_array(weight), 1e-5, as_array(normalized))
    _assert_close(normalized, F.rms_norm(x, (40,), weight.float(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_activate_is_the_gated_silu(tokens: int, dtype: torch.dtype) -> None:
    gate_and_up = 40 * _random(tokens, 20, dtype=dtype)
    activated = torch.empty(tokens, 10, dtype=dtype)
    between_products.activate(as_array(gate_and_up), as_array(activated))
    gate, up = gate_and_up.float().chunk(2, -1)
    _assert_close(activated, F.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_add_adds_in_place(tokens: int, dtype: torch.dtype) -> None:
    x, update = _random(tokens, 5), _random(tokens, 5, dtype=dtype, seed=1)
    expected = x + update.float()
    between_products.add(x.numpy(), as_array(update))
    assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens_before", [0, MOST_TOKENS_OF_ONE_THREAD])
@pytest.mark.parametrize(("query_heads", "kv_heads"), [(1, 1), (6, 2), (4, 4)])
def test_queries_and_keys_are_rotated_and_keys_and_values_are_cached(
    query_heads: int, kv_heads: int, tokens_before: int, dtype: torch.dtype
) -> None:
    """A row of some tokens, one of two, one of one, and a first token."""
    slots = torch.tensor([1] * tokens_before + [2, 2, 0, 3])
    positions = torch.tensor([*range(tokens_before), 9, 10, 4, 0])
    num_tokens = len(slots)
    keys, values = (_random(4, kv_heads, CAPACITY, HEAD_DIM, dtype=dtype, seed=seed) for seed in (1, 2))
    qkv = _random(num_tokens, query_heads + 2 * kv_heads, HEAD_DIM, dtype=dtype)
    angle = _random(num_tokens, HEAD_DIM // 2, seed=3)
    pairs = torch.view_as_complex(qkv.float().unflatten(-1, (-1, 2)))
    rotated = torch.view_as_real(pairs * torch.polar(torch.ones(()), angle)[:, None]).flatten(-2).to(dtype)
    expected_keys, expected_values = keys.clone(), values.clone()
    expected_keys[slots, :, positions] = rotated[:, query_heads : query_heads + kv_heads]
    expected_values[slots, :, positions] = qkv[:, query_heads + kv_heads :]

    query, places = torch.empty(num_tokens, query_heads, HEAD_DIM, dtype=dtype), (slots.numpy(), positions.numpy())
    turn = angle.cos().numpy(), angle.sin().numpy()
    qkv_pairs, *written = (as_pairs(as_array(tensor)) for tensor in (qkv, keys, values, query))
    between_products.rotate_and_cache(qkv_pairs, *turn, *places, *written)
    _assert_close(query, rotated[:, :query_heads])
    _assert_close(keys, expected_keys)
    assert torch.equal(values, expected_values)


def test_a_batch_is_on_the_host_in_float32_and_bfloat16() -> None:
    def is_on_host(dtype: torch.dtype) -> bool:
        cache = KVCache(1, 16, 1, 2048, HEAD_DIM, HEAD_DIM, dtype, torch.device("cpu"))
        return RaggedBatch([Row(0, 100, 1)], cache).is_on_host

    assert is_on_host(torch.float32)
    assert is_on_host(torch.bfloat16)
    assert not is_on_host(torch.float16)
