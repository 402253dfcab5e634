"""Linear layers of few rows on a CPU, in the faster of the two ways to ask the math library for the same product.

`y = x W^T` can be asked for as it is, or as `y^T = W x^T`. Some libraries have a slow path for the first with few rows:
MKL on AMD takes twice as long for 2 rows as for 1 (119 against 75 ms for a whole forward of 4 tokens, perf/forward.py).
Which one is faster is measured once, at load, on the model's own weights; the numbers agree to rounding.
"""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MOST_ROWS = 128
"""With more rows both ways keep the processor busy, and the first needs no copy."""
_PROBED_ROWS = 4
_PROBED_WEIGHTS = 8
_WORTHWHILE = 1.2
"""Only a clear gain counts, so that every start on a machine chooses alike: rounding depends on the choice."""


class _TransposedLinear(nn.Linear):
    """`nn.Linear` that computes `(W x^T)^T` where there are 2 to 128 rows."""

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        rows = x.reshape(-1, x.shape[-1])
        if not 2 <= len(rows) <= _MOST_ROWS:
            return F.linear(x, self.weight, self.bias)
        y = _transposed_product(rows, self.weight)
        if self.bias is not None:
            y += self.bias
        return y.view(*x.shape[:-1], -1)


def _transposed_product(rows: Tensor, weight: Tensor) -> Tensor:
    """`[n, in]` rows, `[out, in]` weight -> `[n, out]`, contiguous as the layers after it like it."""
    return (weight @ rows.t()).t().contiguous()


def use_fastest_linear(model: nn.Module) -> bool:
    """Lets the model's linear layers compute few rows in the transposed way, if that is faster here.

    Only on a CPU: a GPU's library chooses by itself.

    Returns:
        Whether it is.
    """
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    if not linears or any(module.weight.device.type != "cpu" for module in linears):
        return False
    largest = max(min(module.weight.shape) for module in linears)
    probed = [module.weight for module in linears if min(module.weight.shape) == largest]
    if not _transposed_is_faster(sorted(probed, key=lambda weight: -weight.numel())[:_PROBED_WEIGHTS]):
        return False
    for module in linears:
        module.__class__ = _TransposedLinear
    return True


@torch.inference_mode()
def _transposed_is_faster(weights: list[Tensor]) -> bool:
    """Over several weights in turn, so that they come from memory, as in a forward."""
    plain: list[float] = []
    transposed: list[float] = []
    for repeat in range(6):
        for times, product in ((plain, F.linear), (transposed, _transposed_product)):
            started = time.perf_counter()
            for weight in weights:
                product(torch.ones(_PROBED_ROWS, weight.shape[1], dtype=weight.dtype), weight)
            if repeat:  # the first warms up
                times.append(time.perf_counter() - started)
    return median(plain) > _WORTHWHILE * median(transposed)
