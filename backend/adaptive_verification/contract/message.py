"""What the messages of a step have in common: flat fields, and how these lie on the wire.

A field is 1-D. On the wire it is a tensor of its own, `[1, length]`, which has the field's name in capitals; or a line
of a tensor `[1, lines, length]` that it shares with fields of the same type and length, because every tensor costs some
0.05 ms of a step. This module knows nothing of what the fields mean (`contract.messages` does), nor of Triton.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adaptive_verification.errors import ContractError

ONE_PER_ROW = "one per row"
ANY_LENGTH = "any length"

_MEMORY_TYPES = {"INT32": torch.int32, "FP32": torch.float32, "UINT64": torch.int64, "UINT8": torch.uint8}
"""64-bit unsigned wire types are kept as int64 with the same bits, because torch does no arithmetic on uint64."""

M = TypeVar("M", bound="Message")


class Range(NamedTuple):
    """Which values are allowed: those from `lowest` to `highest`, both included, and no NaN."""

    lowest: float
    highest: float
    in_words: str


@dataclass(frozen=True, eq=False)
class WireTensor:
    """One tensor on the wire, which is one field of a message, or several as its lines.

    `length` is `ONE_PER_ROW`, `ANY_LENGTH` or the name of the count field of the same message whose sum it is; of a
    tensor that `is_wide` each entry is a run of values, all of one width, which may be 0.
    `read_by` names the stages that are sent the tensor, those that read something of it; empty: all of them.
    """

    name: str
    wire_type: str
    length: str
    read_by: tuple[str, ...] = ()
    is_wide: bool = False
    fields: tuple[str, ...] = ()
    """Names of the message's fields, in the order of the lines; the message fills them in."""
    ranges: tuple[Range, ...] = ()
    """One of each line, or none; likewise."""

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The fields' type in memory."""
        return _MEMORY_TYPES[self.wire_type]

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """On the wire, without the length, which is the last dimension."""
        return (1,) if len(self.fields) == 1 else (1, len(self.fields))

    @functools.cached_property
    def bounds(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """The lowest and the highest values of the lines, each `[lines, 1]`."""
        dtype = torch.empty(0, dtype=self.dtype).numpy().dtype
        lowest, highest, _ = zip(*self.ranges, strict=True)
        return np.array(lowest, dtype)[:, np.newaxis], np.array(highest, dtype)[:, np.newaxis]

    @functools.cached_property
    def nothing(self) -> Tensor:
        """A field without values."""
        return torch.empty(0, dtype=self.dtype)

    def is_read_by(self, reader: str | None) -> bool:
        """Whether the stage is sent it; None stands for whoever is sent everything."""
        return reader is None or not self.read_by or reader in self.read_by

    def check_ranges(self, values: NDArray[Any]) -> None:
        """Checks the fields' values, `[lines, length]`, or `[length]` of one field.

        Raises:
            ContractError: naming the field, the first wrong value, and which are allowed.
        """
        lowest, highest = self.bounds
        holds = (values >= lowest) & (values <= highest)  # [lines, length]; NaN is not
        if not holds.all():
            line, entry = np.argwhere(~holds)[0]
            value = np.atleast_2d(values)[line, entry]
            raise ContractError(
                f"{self.fields[line].upper()}[{entry}] is {value}; it must be {self.ranges[line].in_words}"
            )

    def label(self, field: str) -> str:
        """The field as an error names it."""
        name = field.upper()
        return name if name == self.name else f"{name} (line {self.fields.index(field)} of {self.name})"


def line_of(tensor: WireTensor) -> Any:
    """Declares a field that is the next line of the tensor."""
    return dataclasses.field(metadata={"tensor": tensor})


def alone(wire_type: str, length: str, *read_by: str) -> Any:
    """Declares a field that is a tensor of its own."""
    return line_of(WireTensor("", wire_type, length, read_by))


def wide(wire_type: str, length: str, *read_by: str) -> Any:
    """Likewise, with a run of values for each entry."""
    return line_of(WireTensor("", wire_type, length, read_by, is_wide=True))


@dataclass
class Message:
    """A bundle of flat tensors that can be validated, concatenated with others of its kind, and split again."""

    shared_fields: ClassVar[frozenset[str]] = frozenset()
    """Free-length fields that describe the whole step: `split` hands them to every part, `concatenate` keeps the first
    that is not empty. Other free-length fields are concatenated, and not split."""

    ranges: ClassVar[dict[str, Range]] = {}
    """Field -> which values are allowed; of a tensor's lines all have a range, or none."""

    @classmethod
    def wire_tensors(cls, reader: str | None = None) -> tuple[WireTensor, ...]:
        """What the message is on the wire, in order; only what a stage reads, where one is named."""
        return _wire_tensors(cls, reader)  # type: ignore[arg-type]  # a class is hashable, though its instances are not

    @property
    def num_rows(self) -> int:
        """How many sequences the message speaks of."""
        of_rows = next(tensor for tensor in self.wire_tensors() if tensor.length == ONE_PER_ROW)
        return int(getattr(self, of_rows.fields[0]).numel())

    def lines(self, tensor: WireTensor) -> Tensor:
        """The tensor's fields as one, `[lines, length]`, which must be of one length and on one device; or `[length]`
        where there is one field."""
        fields = [getattr(self, name) for name in tensor.fields]
        return torch.stack(fields) if len(fields) > 1 else fields[0]

    def validate(self: M, reader: str | None = None) -> M:
        """Checks types, dimensions, lengths and values; returns self.

        Args:
            reader: a stage whose copy of the message this is: what it is not sent is empty, and not checked.

        Raises:
            ContractError: naming the field, what it is and what it must be.
        """
        self.check_lengths(reader)
        for tensor in self.wire_tensors(reader):
            if tensor.ranges and getattr(self, tensor.fields[0]).device.type == "cpu":  # a GPU would be waited for
                tensor.check_ranges(self.lines(tensor).numpy())
        return self

    def check_lengths(self, reader: str | None = None) -> None:
        """Checks that fields fit each other: types, dimensions, and that every ragged length is the sum of its counts.

        Of a message from the wire nothing else is left to be checked.

        Args, Raises: as `validate`.
        """
        tensors = self.wire_tensors(reader)
        lengths = {ONE_PER_ROW: self.num_rows}
        for tensor in tensors:
            if tensor.length not in lengths and tensor.length != ANY_LENGTH:
                lengths[tensor.length] = sum(getattr(self, tensor.length).tolist())
            self._check_shapes(tensor, lengths.get(tensor.length))

    def _check_shapes(self, tensor: WireTensor, length: int | None) -> None:
        for name in tensor.fields:
            field = getattr(self, name)
            if field.dim() != 1 or field.dtype != tensor.dtype:
                raise ContractError(
                    f"{tensor.label(name)} is {list(field.shape)} {field.dtype}; it must be one-dimensional "
                    f"{tensor.dtype}"
                )
            num_entries = field.numel()
            if length is None or num_entries == length or (tensor.is_wide and length and num_entries % length == 0):
                continue
            reason = (
                f"one entry for each of the {length} rows"
                if tensor.length == ONE_PER_ROW
                else f"the sum of {tensor.length.upper()}"
            )
            must_have = f"as many for each of {length}" if tensor.is_wide else str(length)
            raise ContractError(f"{tensor.label(name)} has {num_entries} entries; it must have {must_have} ({reason})")

    @classmethod
    def concatenate(cls: type[M], parts: Sequence[M]) -> M:
        """One message with the rows of all parts in order."""
        if len(parts) == 1:
            return parts[0]
        joined = {}
        for field_name in (field.name for field in dataclasses.fields(cls)):
            tensors = [getattr(part, field_name) for part in parts]
            if field_name in cls.shared_fields:
                joined[field_name] = next((tensor for tensor in tensors if tensor.numel()), tensors[0])
            else:
                joined[field_name] = torch.cat(tensors)
        return cls(**joined)

    def split(self: M, rows_per_part: Sequence[int]) -> list[M]:
        """The inverse of `concatenate`: parts of so many rows each."""
        if len(rows_per_part) == 1:
            return [self]
        pieces: dict[str, list[Tensor]] = {}
        for tensor in self.wire_tensors():
            for name in tensor.fields:
                field = getattr(self, name)
                if tensor.length == ANY_LENGTH:
                    pieces[name] = [field] * len(rows_per_part)
                elif tensor.length == ONE_PER_ROW:
                    pieces[name] = list(field.split(list(rows_per_part)))
                else:
                    lengths = [int(counts.sum()) for counts in pieces[tensor.length]]
                    pieces[name] = split_wide(field, lengths) if tensor.is_wide else list(field.split(lengths))
        return [type(self)(**{name: parts[i] for name, parts in pieces.items()}) for i in range(len(rows_per_part))]


def lists_of_rows(values: Tensor, counts: Tensor) -> list[list[int]]:
    """A ragged field's values, row by row: of as many lists as there are counts. One call to torch for all rows."""
    rest = iter(values.tolist())
    return [list(itertools.islice(rest, count)) for count in counts.tolist()]


def split_wide(tensor: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """A wide tensor's parts of so many entries each."""
    width = tensor.numel() // max(sum(counts), 1)
    return list(tensor.split([count * width for count in counts]))


@functools.cache
def _wire_tensors(message_type: type[Message], reader: str | None) -> tuple[WireTensor, ...]:
    """The tensors as the fields declare them, in the order of their first lines."""
    if reader is not None:
        return tuple(tensor for tensor in message_type.wire_tensors() if tensor.is_read_by(reader))
    declared: dict[str, WireTensor] = {}
    lines: dict[str, list[str]] = {}
    for field in dataclasses.fields(message_type):
        tensor: WireTensor = field.metadata["tensor"]
        name = tensor.name or field.name.upper()
        declared[name] = tensor
        lines.setdefault(name, []).append(field.name)
    ranges = message_type.ranges
    return tuple(
        dataclasses.replace(
            tensor,
            name=name,
            fields=tuple(lines[name]),
            ranges=tuple(ranges[field] for field in lines[name]) if ranges.keys() & set(lines[name]) else (),
        )
        for name, tensor in declared.items()
    )
