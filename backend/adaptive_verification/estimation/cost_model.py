"""What a step costs, as a function of its size: measured at load, refined by every live step.

A curve's shape comes from the measurement at load. Live times move its level (the machine is busier, contexts are
longer) and single sizes of it. One observation moves an estimate by at most 3 %, so a hiccup does not matter; what is
no longer observed drifts back to what was measured, so a bad spell at some size, or of the drafter, cannot keep that
size from ever being tried again.

Sizes: `verify` and `draft_prefill` tokens of the forward, `draft_extend` rows of one forward, `verify_context` cached
tokens that the target's forward looks back at. Times in milliseconds.
"""

from __future__ import annotations

import bisect
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaptive_verification.contract.costs import StepCost
from adaptive_verification.estimation.files import write_json

logger = logging.getLogger(__name__)

VERIFY = "verify"
"""The target's forward and acceptance, by tokens in it."""
VERIFY_CONTEXT = "verify_context"
"""The same forward of ever longer contexts. Only its slope counts: drafts do not change what there is to look back at,
so were that time taken for the tokens', drafts would seem dear in a step of many rows, or of long ones."""
DRAFT_PREFILL = "draft_prefill"
"""The drafter's first forward of a step, by tokens in it."""
DRAFT_EXTEND = "draft_extend"
"""One of the drafter's further forwards, a token a row, by rows in it."""

LEARNING_RATE = 0.02
"""Largest relative move of a curve's level by one observation."""
_DEVIATION_SHARE = 0.25
"""A size's deviation moves so much less than the level, so a bad spell goes into the level and out of it again. Were it
the same, sizes that the spell kept from being used would stay dear after it."""
_PROPORTIONAL_WITHIN = 0.1
"""Relative error below which the move shrinks in proportion (a Huber estimate: between mean and median)."""
_LARGEST_LEVEL = math.log(16.0)
_LARGEST_DEVIATION = math.log(2.0)
_FORGETTING = 0.002
"""Share of a deviation that is forgotten in each step that does not confirm it."""
_MOST_ROUNDS = 16
"""Of a measurement at load, however long it goes on finding faster times; and how many without one end it."""
_ROUNDS_WITHOUT_FASTER = 3
_CLEARLY_FASTER = 0.98
"""Of the fastest time so far."""


@dataclass(frozen=True)
class CostCurve:
    """Measured costs at increasing sizes, never falling; linear in between and beyond, constant below.

    Raises:
        ValueError: fewer than two sizes, not increasing, or a time that is not a positive finite number.
    """

    sizes: tuple[float, ...]
    milliseconds: tuple[float, ...]

    def __post_init__(self) -> None:
        sizes, times = np.asarray(self.sizes, float), np.asarray(self.milliseconds, float)
        if sizes.ndim != 1 or sizes.shape != times.shape or sizes.size < 2 or not (np.diff(sizes) > 0).all():
            raise ValueError(f"sizes={self.sizes} must be at least two increasing numbers, one for each time")
        if not (np.isfinite(times).all() and (times > 0).all() and np.isfinite(sizes).all()):
            raise ValueError(f"milliseconds={self.milliseconds} must be positive and finite")
        object.__setattr__(self, "sizes", tuple(sizes.tolist()))
        object.__setattr__(self, "milliseconds", tuple(_monotone(times).tolist()))


def measure_curve(
    run: Callable[[int], None],
    sizes: Sequence[int],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> CostCurve:
    """Times `run(size)` at each size: the fastest of as many repeats as it takes. For the stages, at load.

    The fastest, because what else a machine does only adds to a time, and adds to one size's more than to another's:
    the shape would suffer, which live times correct slowly. Their level they correct at once. Repeats go round the
    sizes, so that a slow spell does not fall on one size alone, and end once several of them found nothing faster.
    """
    fastest = dict.fromkeys(sizes, math.inf)
    rounds_without = 0
    for _ in range(_MOST_ROUNDS):
        rounds_without += 1
        for size in sizes:
            started = clock()
            run(size)
            milliseconds = (clock() - started) * 1e3
            if milliseconds < _CLEARLY_FASTER * fastest[size]:
                rounds_without = 0
            fastest[size] = min(fastest[size], milliseconds)
        if rounds_without == _ROUNDS_WITHOUT_FASTER:
            break
    return CostCurve(tuple(fastest), tuple(fastest.values()))


def publish_curves(directory: str | os.PathLike[str], stage: str, curves: Mapping[str, CostCurve]) -> None:
    """Writes a stage's curves to `costs-<stage>.json` of the state directory, where the estimator finds them."""
    payload = {
        name: {"sizes": list(curve.sizes), "milliseconds": list(curve.milliseconds)} for name, curve in curves.items()
    }
    write_json(Path(directory) / f"costs-{stage}.json", {"curves": payload})


def read_curves(directory: str | os.PathLike[str]) -> dict[str, CostCurve]:
    """All curves that stages have published there. What cannot be read is skipped with a warning."""
    curves = {}
    for path in sorted(Path(directory).glob("costs-*.json")):
        try:
            for name, curve in json.loads(path.read_text())["curves"].items():
                curves[name] = CostCurve(tuple(curve["sizes"]), tuple(curve["milliseconds"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("cost curves in %s cannot be used and are ignored: %s", path, error)
    return curves


class LiveCurve:
    """A measured curve and what live steps have taught about it."""

    def __init__(self, measured: CostCurve) -> None:
        self.measured = measured
        self._log_measured = [math.log(milliseconds) for milliseconds in measured.milliseconds]
        self._level = 0.0  # log of the live cost over the measured one, all sizes
        self._deviations = [0.0] * len(measured.sizes)  # log, by size, on top of the level
        self._refresh()

    @property
    def slowness(self) -> float:
        """The live costs' level over the measured ones'."""
        return math.exp(self._level)

    @property
    def milliseconds(self) -> list[float]:
        """Present estimate at `measured.sizes`, never falling."""
        return self._milliseconds

    def at(self, size: float) -> float:
        """Estimated milliseconds at one size."""
        upper, share = self._segment(size)
        low, high = self._milliseconds[upper - 1], self._milliseconds[upper]
        return low + (high - low) * max(0.0, share)

    def at_all(self, sizes: NDArray[Any]) -> NDArray[np.float64]:
        """Estimated milliseconds at increasing sizes."""
        knots = self.measured.sizes
        largest = float(sizes[-1])
        if largest > knots[-1]:  # one more knot makes the straight continuation of the last segment
            return np.interp(sizes, (*knots, largest), (*self._milliseconds, self.at(largest)))
        return np.interp(sizes, knots, self._milliseconds)

    def observe(self, size: float, milliseconds: float) -> None:
        """One live time. Numbers that cannot be a time are ignored."""
        if not (math.isfinite(milliseconds) and math.isfinite(size) and milliseconds > 0 and size > 0):
            return
        error = math.log(milliseconds / self.at(size))
        move = LEARNING_RATE * _within(1.0, error / _PROPORTIONAL_WITHIN)
        self._level = _within(_LARGEST_LEVEL, self._level + move)
        upper, share = self._segment(size)
        share = min(1.0, max(0.0, share))
        deviations = [deviation * (1 - _FORGETTING) for deviation in self._deviations]
        move *= _DEVIATION_SHARE
        deviations[upper - 1] = _within(_LARGEST_DEVIATION, deviations[upper - 1] + move * (1 - share))
        deviations[upper] = _within(_LARGEST_DEVIATION, deviations[upper] + move * share)
        self._deviations = deviations
        self._refresh()

    def forget_a_little(self) -> None:
        """A step without an observation: what was learned drifts back to what was measured."""
        self._level *= 1 - _FORGETTING
        self._deviations = [deviation * (1 - _FORGETTING) for deviation in self._deviations]
        self._refresh()

    def _segment(self, size: float) -> tuple[int, float]:
        """The upper knot of the segment that `size` is in or continues, and how far it is towards it."""
        knots = self.measured.sizes
        upper = min(max(bisect.bisect_left(knots, size), 1), len(knots) - 1)
        return upper, (size - knots[upper - 1]) / (knots[upper] - knots[upper - 1])

    def _refresh(self) -> None:
        live = (
            math.exp(log_measured + self._level + deviation)
            for log_measured, deviation in zip(self._log_measured, self._deviations, strict=True)
        )
        self._milliseconds = list(itertools.accumulate(live, max))

    def state_dict(self) -> dict[str, Any]:
        return {
            "sizes": list(self.measured.sizes),
            "measured_ms": list(self.measured.milliseconds),
            "milliseconds": self._milliseconds,
            "level": self._level,
            "deviations": self._deviations,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> LiveCurve:
        """The inverse of `state_dict`; `milliseconds` is there for the reader.

        Raises:
            ValueError, KeyError, TypeError: the state is not one.
        """
        curve = cls(CostCurve(tuple(state["sizes"]), tuple(state["measured_ms"])))
        level, deviations = float(state["level"]), [float(deviation) for deviation in state["deviations"]]
        if len(deviations) != len(curve._deviations) or not all(map(math.isfinite, (level, *deviations))):
            raise ValueError("level and deviations must be finite, one deviation for each size")
        curve._level = _within(_LARGEST_LEVEL, level)
        curve._deviations = [_within(_LARGEST_DEVIATION, deviation) for deviation in deviations]
        curve._refresh()
        return curve


class CostModel:
    """The curves of one chain. Without VERIFY and those of drafting nothing is known, and nothing is trimmed.

    Args:
        curves: measured ones.
        has_drafting_model: False: drafting costs nothing, and has no curves.
    """

    def __init__(self, curves: Mapping[str, CostCurve] | None = None, *, has_drafting_model: bool = True) -> None:
        self._has_drafting_model = has_drafting_model
        self._curves: dict[str, LiveCurve] = {}
        self.measured(curves or {})
        self.other_ms = 0.0
        """What a step takes beside its stages: the front's loop and the way between the processes."""

    @property
    def ready(self) -> bool:
        needed = (VERIFY, DRAFT_PREFILL, DRAFT_EXTEND) if self._has_drafting_model else (VERIFY,)
        return all(name in self._curves for name in needed)

    @property
    def curves(self) -> Mapping[str, LiveCurve]:
        return self._curves

    def measured(self, curves: Mapping[str, CostCurve]) -> None:
        """Takes over newly measured curves. One that equals the present one's measurement keeps what was learned."""
        for name, curve in curves.items():
            if name not in self._curves or self._curves[name].measured != curve:
                self._curves[name] = LiveCurve(curve)

    def observe(self, cost: StepCost, context_tokens: float = 0.0) -> None:
        """Refines the curves by one live step, which looked back at so many tokens."""
        draft = cost.draft
        if VERIFY in self._curves and context_tokens > 0:  # a deviation is both parts', in proportion
            tokens_ms = self._curves[VERIFY].at(cost.verify_tokens)
            share = tokens_ms / (tokens_ms + self._context_ms(context_tokens))
        else:
            share = 1.0
        self._refine(VERIFY, cost.verify_tokens, cost.verify_ms * share)
        self._refine(DRAFT_PREFILL, draft.prefill_tokens, draft.prefill_ms)
        further_forwards = draft.depth - 1
        if further_forwards >= 1:
            self._refine(DRAFT_EXTEND, draft.drafting_rows, draft.extend_ms / further_forwards)
        else:
            self._refine(DRAFT_EXTEND, 0, 0)

    def observe_other(self, milliseconds: float) -> None:
        """One step's time outside its stages. Bounded moves (0.05 ms or 2 %): a pause between requests is no news."""
        if math.isfinite(milliseconds) and milliseconds >= 0:
            bound = max(0.05, LEARNING_RATE * self.other_ms)
            self.other_ms += max(-bound, min(bound, milliseconds - self.other_ms))

    def verify_ms(self, tokens: float, context_tokens: float = 0.0) -> float:
        """Milliseconds of a step without its drafting, whose target computes so many tokens and looks back at more."""
        return self._curves[VERIFY].at(tokens) + self._context_ms(context_tokens) + self.other_ms

    def all_verify_ms(self, tokens: NDArray[Any]) -> NDArray[np.float64]:
        """The same at increasing numbers of tokens, without looking back."""
        return self._curves[VERIFY].at_all(tokens) + self.other_ms

    def _context_ms(self, context_tokens: float) -> float:
        curve = self._curves.get(VERIFY_CONTEXT)
        if curve is None:
            return 0.0
        sizes, times = curve.measured.sizes, curve.measured.milliseconds
        slope = (times[-1] - times[0]) / (sizes[-1] - sizes[0])
        return slope * context_tokens * self._curves[VERIFY].slowness

    def draft_ms(self, prefill_tokens: float, rows: float, depth: int) -> float:
        """Milliseconds of drafting `rows` rows so deep with the model."""
        if depth == 0 or not self._has_drafting_model:
            return 0.0
        further_ms = (depth - 1) * self._curves[DRAFT_EXTEND].at(rows) if depth > 1 else 0.0
        return self._curves[DRAFT_PREFILL].at(prefill_tokens) + further_ms

    def all_draft_ms(self, prefill_tokens: float, rows: float, deepest: int) -> list[float]:
        """The same 0, 1, ... `deepest` deep."""
        return [self.draft_ms(prefill_tokens, rows, depth) for depth in range(deepest + 1)]

    def _refine(self, name: str, size: float, milliseconds: float) -> None:
        curve = self._curves.get(name)
        if curve is None:
            return
        if size > 0:
            curve.observe(size, milliseconds)
        else:
            curve.forget_a_little()

    def state_dict(self) -> dict[str, Any]:
        return {
            "curves": {name: curve.state_dict() for name, curve in self._curves.items()},
            "other_ms": self.other_ms,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`.

        Raises:
            ValueError, KeyError, TypeError: the state is not one; the model is then unchanged.
        """
        curves = {name: LiveCurve.from_state_dict(curve) for name, curve in state["curves"].items()}
        other_ms = float(state["other_ms"])
        if not (math.isfinite(other_ms) and other_ms >= 0):
            raise ValueError("other_ms must be a finite number, at least 0")
        self._curves, self.other_ms = curves, other_ms


def _within(bound: float, value: float) -> float:
    return max(-bound, min(bound, value))


def _monotone(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The closest never-falling sequence in least squares (isotonic regression, by its max-min formula; O(n^2))."""
    sums = np.concatenate([[0.0], values.cumsum()])
    first, last = np.triu_indices(len(values))
    means = np.full((len(values), len(values)), np.inf)
    means[first, last] = (sums[last + 1] - sums[first]) / (last + 1 - first)
    # means[j, k] of values j..k; for each i: the largest over j <= i of the smallest over k >= i
    smallest = np.minimum.accumulate(means[:, ::-1], 1)[:, ::-1]
    smallest[np.tril_indices(len(values), -1)] = -np.inf
    return smallest.max(0)
