"""``torch.save`` with a pickler that does not ask about every object. The file is the same kind of file.

Two thirds of the time to save some thousand small tensors go into Python calls per pickled object: torch asks for a
persistent id of every integer and every key, and each tensor describes its storage anew. Both are answered from a
table here. It goes in through ``torch.save``'s own ``pickle_module`` argument; a torch that would not use it this way
still gets a right file, only slower.
"""

from __future__ import annotations

import pickle
import sys
from collections import OrderedDict
from typing import IO, Any

import torch

__all__ = ["Pickler", "save"]


def save(payload: Any, file: IO[bytes]) -> None:
    """Write ``payload`` (plain objects and CPU tensors) so that ``torch.load(..., weights_only=True)`` takes it."""
    torch.save(payload, file, pickle_module=sys.modules[__name__])


class Pickler(pickle.Pickler):
    """Base of the pickler class that ``torch.save`` makes for itself by adding ``persistent_id``."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        torchs_own = cls.__dict__.get("persistent_id")
        if torchs_own is not None:
            setattr(cls, "persistent_id", _only_for_storages(torchs_own))  # noqa: B010 - a method cannot be assigned to

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._storages: dict[tuple[int, torch.dtype], Any] = {}
        self._nothing: OrderedDict[str, Any] = OrderedDict()  # a tensor's hooks, always none

    def reducer_override(self, value: Any) -> Any:
        """A plain tensor as torch reduces it, except that views of one flat tensor share the object of its storage."""
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout is not torch.strided:
            return NotImplemented
        if value.requires_grad or value.is_conj() or value.is_neg() or value.is_quantized:
            return NotImplemented
        untyped = value.untyped_storage()
        key = untyped._cdata, value.dtype
        storage = self._storages.get(key)
        if storage is None:
            storage = self._storages[key] = torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
                wrap_storage=untyped, dtype=value.dtype, _internal=True
            )
        place = storage, value.storage_offset(), tuple(value.shape), value.stride(), False, self._nothing
        return torch._utils._rebuild_tensor_v2, place


def _only_for_storages(torchs_own: Any) -> Any:
    typed, untyped = torch.storage.TypedStorage, torch.UntypedStorage
    ids: dict[int, tuple[Any, Any]] = {}

    def persistent_id(self: Any, value: Any) -> Any:
        kind = type(value)
        if kind is not typed and kind is not untyped:
            return None
        if id(value) not in ids:
            ids[id(value)] = value, torchs_own(self, value)  # held, so that the number stays this object's
        return ids[id(value)][1]

    return persistent_id
