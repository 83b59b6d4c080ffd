"""Which value each tensor is at the moment, and whether its memory was written since that was noted.

Tensors of a running model enter; the values noted for them leave.  Two tensors may share memory: when one is
written in place, the other is no longer what it was.
"""

from __future__ import annotations

from torch import Tensor

from .records import Value


class Memory:
    """The tensors seen in one run of a model."""

    def __init__(self) -> None:
        self._alive: dict[int, list[Tensor]] = {}  # storage -> every tensor seen, so that no id is used twice
        self._value: dict[int, Value] = {}
        self._where: dict[int, int] = {}  # id(tensor) -> the storage it had when its value was noted
        self._writes: dict[int, int] = {}  # storage -> how often it was written in place
        self._seen: dict[int, int] = {}  # id(tensor) -> the count above when its value was noted
        self._writer: dict[int, Value] = {}  # storage -> the value written last

    def get(self, tensor: Tensor) -> Value | None:
        """The value noted last, whatever has been written since; None if other memory was assigned to `.data`."""
        known = self._value.get(id(tensor))
        return known if known is not None and self._where[id(tensor)] == _storage(tensor) else None

    def same_place(self, tensor: Tensor) -> Tensor | None:
        """A tensor seen before that is this one by another name: `x.as_subclass(torch.Tensor)`."""
        seen = self._alive.get(_storage(tensor), ())
        return next((other for other in seen if _place(other) == _place(tensor)), None)

    def note(self, tensor: Tensor, value: Value) -> Value:
        """From now on a tensor is this value."""
        key, storage = id(tensor), _storage(tensor)
        if key not in self._value:
            self._alive.setdefault(storage, []).append(tensor)
        self._value[key], self._where[key] = value, storage
        self._seen[key] = self._writes.get(storage, 0)
        return value

    def write(self, tensor: Tensor, value: Value) -> None:
        """A tensor was written in place: it is this value now, and what shares its memory is stale."""
        storage = _storage(tensor)
        self._writes[storage] = self._writes.get(storage, 0) + 1
        self._writer[storage] = self.note(tensor, value)

    def written_since(self, tensor: Tensor) -> Value | None:
        """What was written last where a tensor lies, if that was after its value was noted."""
        storage = _storage(tensor)
        return self._writer[storage] if self._seen[id(tensor)] != self._writes.get(storage, 0) else None


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
