"""Linear layers on a CPU, in the fastest of five ways to compute the same product.

- plain: `y = x W^T`, as the model asks for it.
- transposed: `y^T = W x^T`. Some libraries have a slow path for the plain way with few rows: MKL on AMD takes twice as
  long for 2 rows as for 1.
- float16_weights: the weights are kept as float16 and multiplied in float32 (FBGEMM). Few rows wait for memory, and
  this reads half as much of it. Only where every weight is exactly a float16 times one power of two, as published
  bfloat16, float16 and 4-bit weights are, so that the model is still the same model.
- packed: the weights are kept in the order in which oneDNN multiplies them. In bfloat16 it would bring them into that
  order anew for every product, which takes half as long as the product of few rows itself.
- streamed: packed for many rows. For few, a loop of ours reads the weights as they are, without waiting at every page
  (`streamed_products`): they are kept twice.

In all of them the numbers differ by the order of the additions only. bfloat16 is packed where it can be, or streamed,
which depends on the processor; otherwise it is measured once, at load, on the model's own weights, which way is faster
(perf/forward.py compares them).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from adaptive_verification.forward import called_products
from adaptive_verification.forward.called_products import PackedWeights
from adaptive_verification.forward.host_floats import as_array
from adaptive_verification.forward.placement import multiplies_in_tiles
from adaptive_verification.forward.streamed_products import StreamedWeights, can_stream, multiplies_pairs, stream

_TRANSPOSED_MOST_ROWS = 128
"""With more rows both ways keep the processor busy, and the plain one needs no copy."""
_PACKED_FOR_ROWS = 256
"""oneDNN asks how many rows there will be. The order that it chooses for so many is as good for fewer, not the other
way round: packed for 1, 32 rows take twice as long."""
_STREAMED_MOST_ROWS = 32
"""With more rows a product waits for arithmetic."""
_PROBED_ROWS = (1, 4, 32)
_PROBED_WEIGHTS = 8
_PROBE_REPEATS = 6
_WORTHWHILE = 1.2
"""Only a clear gain counts, so that every start on a machine chooses alike: rounding depends on the choice."""
_LARGEST_EXPONENT = 15
"""Of a float16."""

_Product = Callable[[Tensor, Any], Tensor]
"""Rows `[n, in]` and the weights in the way's own form -> `[n, out]`."""


class _TransposedLinear(nn.Linear):
    """Computes `(W x^T)^T` where there are 2 to 128 rows."""

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        rows = x.reshape(-1, x.shape[-1])
        if not 2 <= len(rows) <= _TRANSPOSED_MOST_ROWS:
            return F.linear(x, self.weight, self.bias)
        y = _transposed_product(rows, self.weight)
        if self.bias is not None:
            y += self.bias
        return y.view(*x.shape[:-1], -1)


class _Float16WeightsLinear(nn.Linear):
    """Has packed float16 weights instead of `weight` and `bias`, and multiplies them in float32."""

    packed: Any
    input_scale: float

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        if self.input_scale != 1:
            x = x * self.input_scale
        y: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x, self.packed)
        return y


class _PackedLinear(nn.Linear):
    """Has weights in oneDNN's order instead of `weight`."""

    packed: Tensor
    called: PackedWeights | None
    """The same for compiled loops, where these can call the product and read its type."""

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        rows = x.reshape(-1, x.shape[-1])
        num_more = multiplied_rows(self, len(rows)) - len(rows)
        if num_more == 0:
            y = _packed_product(rows, self.packed, self.bias)
        else:
            y = _packed_product(F.pad(rows, (0, 0, 0, num_more)), self.packed, self.bias)[: len(rows)]
        return y if x.ndim == 2 else y.view(*x.shape[:-1], y.shape[-1])


class _StreamedLinear(_PackedLinear):
    """Has `weight` as well, for few rows."""

    streamed: StreamedWeights

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) > _STREAMED_MOST_ROWS:
            return super().forward(x)
        y = torch.empty(len(rows), self.out_features, dtype=x.dtype)
        stream(as_array(rows.contiguous()), self.streamed.addresses, as_array(y))
        return y.view(*x.shape[:-1], y.shape[-1])


@functools.cache
def padded_rows(num_rows: int, *, in_tiles: bool) -> int:
    """As how many rows so many are multiplied: oneDNN makes a kernel for every number of rows that it meets, which
    takes some milliseconds a layer, and steps have many.

    Args:
        num_rows: that there are.
        in_tiles: whether the processor multiplies 16 rows at a time (AMX). There, 32 rows take no less than 48: with
            two cores that others use as well, a third more. Without tiles each further row takes its time.
    """
    if num_rows <= 16:
        return num_rows
    if in_tiles and num_rows <= 48:
        return 48
    steps = [(64, 16 if in_tiles else 4), (128, 16 if in_tiles else 8), (256, 16), (1024, 32)]
    step = next((step for most_rows, step in steps if num_rows <= most_rows), 128)
    return -(-num_rows // step) * step


def multiplied_rows(linear: nn.Linear, num_rows: int) -> int:
    """As how many rows the layer multiplies so many. Inputs that have as many already need not be copied."""
    if not isinstance(linear, _PackedLinear) or (
        isinstance(linear, _StreamedLinear) and num_rows <= _STREAMED_MOST_ROWS
    ):
        return num_rows
    return padded_rows(num_rows, in_tiles=multiplies_in_tiles())


def weights_for_loops(linear: nn.Linear) -> NDArray[np.intp] | None:
    """The layer's weights for `layer_loops`; None where these cannot call its product."""
    if not isinstance(linear, _PackedLinear) or linear.called is None:
        return None
    streamed = [_STREAMED_MOST_ROWS, *linear.streamed.addresses] if isinstance(linear, _StreamedLinear) else [0, 0, 0]
    return np.array([*linear.called.addresses, *streamed], dtype=np.intp)


def _packed_product(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return y


def _transposed_product(rows: Tensor, weight: Tensor) -> Tensor:
    """`[n, in]` rows, `[out, in]` weight -> `[n, out]`, contiguous as the layers after it like it."""
    return (weight @ rows.t()).t().contiguous()


def use_fastest_linear(model: nn.Module) -> str:
    """Lets the model's linear layers compute in the way that is fastest here; they cannot be trained after that.

    Only on a CPU: a GPU's library chooses by itself.

    Returns:
        The way.
    """
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    if not linears or any(module.weight.device.type != "cpu" for module in linears):
        return "plain"
    way = fastest_way(linears)
    if way == "transposed":
        for module in linears:
            module.__class__ = _TransposedLinear
    elif way == "float16_weights":
        for module in linears:
            _keep_as_float16(module)
    elif way in ("packed", "streamed"):
        for module in linears:
            _pack(module, streamed=way == "streamed")
    return way


def _pack(module: nn.Linear, *, streamed: bool) -> None:
    weight = module.weight.detach()
    packed = _packed(weight)
    can_be_called = packed.dtype == torch.bfloat16 and called_products.are_callable()
    called = PackedWeights(packed, module.bias) if can_be_called else None
    if streamed and can_stream(weight):
        module.__class__ = _StreamedLinear
        module.streamed = StreamedWeights(weight, module.bias)  # type: ignore[assignment]  # mypy sees nn.Linear still
    else:
        del module.weight
        module.__class__ = _PackedLinear
    module.packed, module.called = packed, called  # type: ignore[assignment]  # as above


def _packed(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous(), _PACKED_FOR_ROWS)
    return packed


def can_pack(weight: Tensor) -> bool:
    """Whether such weights, `[out, in]`, can be multiplied in the packed way, and natively."""
    if weight.dtype != torch.bfloat16:
        return False
    try:
        _packed_product(torch.ones(1, weight.shape[1], dtype=weight.dtype), _packed(weight))
    except (AttributeError, RuntimeError):  # no oneDNN in this build, or none that multiplies bfloat16 here
        return False
    return True


def _keep_as_float16(module: nn.Linear) -> None:
    scale = float16_scale(module.weight)
    if scale is None:
        return
    bias = None if module.bias is None else module.bias.detach()
    packed = torch.ops.quantized.linear_prepack_fp16(module.weight.detach() * scale, bias)
    del module.weight, module.bias
    module.__class__ = _Float16WeightsLinear
    module.packed, module.input_scale = packed, 1 / scale  # type: ignore[assignment]  # mypy sees nn.Linear still


def float16_scale(weight: Tensor) -> float | None:
    """The power of two that makes every weight exactly a float16; None where there is none."""
    if weight.dtype != torch.float32 or not weight.numel():
        return None
    largest = float(weight.detach().abs().max())
    if not math.isfinite(largest):
        return None
    exponent = _LARGEST_EXPONENT - math.frexp(largest)[1]
    for scale in (1.0, math.ldexp(1.0, exponent)):
        scaled = weight.detach() * scale
        if torch.equal(scaled.half().float(), scaled):
            return scale
    return None


@torch.inference_mode()
def fastest_way(linears: list[nn.Linear]) -> str:
    """Measures the ways on the largest of the layers, several in turn, so that they come from memory as in a forward.

    Packed needs no measuring where it can be had: it does less, and knows few numbers of rows.

    Returns:
        "plain", "transposed", "float16_weights", "packed" or "streamed"; all but the first two only where they can be
        had, and the third only where it is exact.
    """
    largest = sorted(linears, key=lambda module: -module.weight.numel())[:_PROBED_WEIGHTS]
    weights = [module.weight.detach() for module in largest]
    if can_pack(weights[0]):
        return "streamed" if _streaming_is_faster() else "packed"
    ways: dict[str, tuple[_Product, list[Any]]] = {
        "plain": (F.linear, weights),
        "transposed": (_transposed_product, weights),
    }
    if all(float16_scale(weight) is not None for weight in weights):
        try:
            packed = [torch.ops.quantized.linear_prepack_fp16(weight, None) for weight in weights]
        except RuntimeError:  # no FBGEMM in this build or on this processor
            pass
        else:
            ways["float16_weights"] = (torch.ops.quantized.linear_dynamic_fp16, packed)
    times = {way: [_Times() for _ in _PROBED_ROWS] for way in ways}
    for _ in range(_PROBE_REPEATS):
        for place, num_rows in enumerate(_PROBED_ROWS):
            inputs = [torch.ones(num_rows, weight.shape[1], dtype=weight.dtype) for weight in weights]
            for way, (product, prepared) in ways.items():
                times[way][place].measure(product, inputs, prepared)
    relative = {
        way: sum(own.median() / plain.median() for own, plain in zip(times[way], times["plain"], strict=True))
        for way in ways
    }
    best = min(relative, key=lambda way: relative[way])
    return best if relative["plain"] > _WORTHWHILE * relative[best] else "plain"


def _streaming_is_faster() -> bool:
    """Whether few rows take less time here with streamed weights than with packed ones.

    Not measured at load, when several stages load at once and wait for each other. On a processor with AVX512-BF16 and
    no tiles it is so for weights of 576 x 576 to 14,336 x 2,048; on others it was not tried.
    """
    return multiplies_pairs() and not multiplies_in_tiles()


class _Times:
    """Of one way with one number of rows."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def measure(self, product: _Product, inputs: list[Tensor], weights: list[Any]) -> None:
        started = time.perf_counter()
        for x, weight in zip(inputs, weights, strict=True):
            product(x, weight)
        self._seconds.append(time.perf_counter() - started)

    def median(self) -> float:
        return median(self._seconds[1:])  # the first warms up
