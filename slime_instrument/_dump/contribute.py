"""What this rank contributes to the dump of one rollout: a description, and a queue of tensors.

Context-parallel rank 0 contributes everything of its data-parallel rank; the other context-parallel ranks contribute
their parts of the sharded fields. Describing copies nothing: tensors are queued, and joined into pieces when they
travel or are taken.

A value that cannot be stored costs its own field, with the reason in the provenance, and never the dump.
"""

from __future__ import annotations

import contextlib
import enum
import io
import pickle
import sys
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from slime_instrument._dump.agree import Topology
from slime_instrument._dump.zigzag import shard_lengths
from slime_instrument._errors import DumpError, contained, describe, not_ours
from slime_instrument._format.references import fate
from slime_instrument._format.schema import ID_COLUMNS, LAYOUT_FIELDS, WHOLE_BATCH_FIELDS

StreamKey = tuple[str, torch.dtype, tuple[int, ...]]
"""Field (:data:`COMMON` for what is not sharded), dtype and trailing shape. One stream becomes one flat tensor, so that
a file of many thousand tensors holds few storages."""

COMMON = ""


@dataclass(frozen=True)
class Ref:
    """Stands for a tensor whose bytes travel: which stream, where in it (in elements), and its shape."""

    key: StreamKey
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """Stands for a value whose bytes are a file of ``torch.save``: what has no flat memory of its own, such as sparse,
    quantized and nested tensors, or more elements than memory, such as expanded ones."""

    file: Ref


@dataclass(frozen=True)
class InFile:
    """Stands for a tensor that slime left in a file and that its dumps hold. The writer reads it, and no other rank."""

    reference: Any


@dataclass(frozen=True)
class Sharded:
    """The samples of one response-level field that share a dtype and a trailing shape.

    ``samples``: their local numbers. ``lengths``: first dimensions of this rank's parts. ``full``: the rank holds
    whole responses (up to v0.2.1 slime leaves teacher log-probs unsliced); None where this rank's lengths fit both
    readings, and another rank decides.
    """

    key: StreamKey
    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    full: bool | None


@dataclass
class Description:
    """What the bytes of a contribution mean; travels before them.

    Four fields are filled by context-parallel rank 0 only: ``columns`` pair with single samples, ``ids`` identify them,
    ``layout`` is the schedule of this data-parallel rank, ``whole`` the whole batch's. A :class:`Ref`,
    :class:`Stored` or :class:`InFile` stands where a tensor was. ``in_files``: the samples of a sharded field whose
    whole response is in a file instead.
    """

    rank: int
    data_rank: int
    context_rank: int
    total_lengths: list[int]
    response_lengths: list[int]
    padded: list[int] | None
    sizes: dict[StreamKey, int] = field(default_factory=dict)
    sharded: dict[str, list[Sharded]] = field(default_factory=dict)
    in_files: dict[str, dict[int, Any]] = field(default_factory=dict)
    columns: dict[Any, Any] = field(default_factory=dict)
    ids: dict[str, Any] = field(default_factory=dict)
    layout: dict[Any, Any] = field(default_factory=dict)
    whole: dict[Any, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    converted: dict[str, list[str]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """As bytes. A field that cannot be pickled is left out, with its reason."""
        try:
            return pickle.dumps(self)
        except Exception as error:
            if not_ours(error):
                raise
        for part in (self.columns, self.ids, self.layout, self.whole):
            for name in list(part):
                with contained(partial(self.left_out.__setitem__, str(name))):
                    value = part.pop(name)
                    pickle.dumps(value)
                    part[name] = value
        return pickle.dumps(self)


@dataclass
class Contribution:
    """A description, and the tensors that its streams are made of, in order: those of training, or, ``held``, one flat
    tensor for each stream that is nobody else's."""

    description: Description
    streams: dict[StreamKey, list[torch.Tensor]]
    held: bool = False

    @classmethod
    def empty(cls, description: Description) -> Contribution:
        """Memory for all that was described."""
        streams = {k: [torch.empty(size, dtype=k[1], device="cpu")] for k, size in description.sizes.items()}
        return cls(description, streams, held=True)

    @property
    def nbytes(self) -> int:
        return sum(size * key[1].itemsize for key, size in self.description.sizes.items())

    def memory(self) -> list[memoryview]:
        """Of the streams, one by one; where it is held."""
        return [bytes_of(flat) for (flat,) in self.streams.values()]

    def take(self, key: StreamKey) -> torch.Tensor:
        """One stream, flat and nobody else's, and only once: so that it is given up as soon as it was used."""
        tensors = self.streams.pop(key, [])
        if self.held and tensors:
            return tensors[0]
        flat = torch.empty(self.description.sizes[key] if tensors else 0, dtype=key[1], device="cpu")
        place = bytes_of(flat)
        for piece in map(bytes_of, _pieces_of(key, tensors, _CACHED_BYTES)):
            place[: len(piece)] = piece
            place = place[len(piece) :]
        return flat

    def pieces(self, on_device: int) -> Iterator[torch.Tensor]:
        """All bytes in stream order: flat uint8 tensors on the CPU, each of one stream. Neighbours on a device are
        joined there, up to ``on_device`` bytes at a time; on the CPU in steps that stay in the processor's cache."""
        for key, tensors in self.streams.items():
            yield from _pieces_of(key, tensors, on_device)


def _pieces_of(key: StreamKey, tensors: Sequence[torch.Tensor], on_device: int) -> Iterator[torch.Tensor]:
    for run in _neighbours(tensors, max(1, on_device // key[1].itemsize), _CACHED_BYTES // key[1].itemsize):
        with torch.no_grad():
            whole = torch.cat(run) if len(run) > 1 else run[0].detach().contiguous()
            yield whole.cpu().view(torch.uint8)


_CACHED_BYTES = 1 << 20


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    buffer: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(buffer)


def contribute(
    rollout_data: Mapping[str, Any],
    topology: Topology,
    cp_fields: Sequence[str],
    *,
    padded: Sequence[int] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Contribution:
    """Describe and queue this rank's part.

    ``cp_fields``: names of the response-level fields that context parallelism shards, in the order in which the file
    has them; ``padded``: per sample the length that chunks are cut from, where it is not the total length. Raises
    :class:`DumpError` where the samples' lengths themselves do not fit together.
    """
    totals = [int(length) for length in rollout_data["total_lengths"]]
    responses = [int(length) for length in rollout_data["response_lengths"]]
    if len(totals) != len(responses):
        raise DumpError(f"total_lengths has {len(totals)} samples, response_lengths {len(responses)}")
    cp, cp_rank = topology.context_parallel, topology.context_rank
    described = Description(
        topology.rank, topology.data_rank, cp_rank, totals, responses, None if padded is None else list(padded)
    )
    described.provenance.update(provenance or {})
    queue = _Queue()
    expected = shard_lengths(totals, responses, cp, cp_rank, padded)
    sharded: set[str] = set()
    for name in cp_fields:
        values = rollout_data.get(name)
        if values is None or not isinstance(values, (list, tuple)):
            continue
        try:
            if not any(map(torch.is_tensor, values)):
                continue
            held = {index: _in_file(value) for index, value in enumerate(values)}
            described.in_files[name] = {index: value for index, value in held.items() if value is not None}
            described.sharded[name] = _sharded(name, values, expected, responses, queue)
            sharded.add(name)
        except _NeedsTorch:
            if cp == 1:
                continue  # nothing to put together: an ordinary field
            described.left_out[name] = "its values have no flat memory, and context parallelism cuts them"
        except Exception as error:
            if not_ours(error):
                raise
            described.left_out[name] = describe(error)
        if name in described.left_out:
            queue.drop(name)
            sharded.add(name)
    if cp_rank == 0:
        rest = {
            key: value
            for key, value in rollout_data.items()
            # A response-level field that is None was not computed; slime's own file leaves it out as well.
            if not isinstance(key, str) or (key not in sharded and not (value is None and key in cp_fields))
        }
        _common(rest, len(responses), described, queue)
    described.sizes = {key: size for key, size in queue.sizes.items() if size}
    # In the order of the sizes, by which bytes are told apart: an empty tensor has a place there and none in the queue.
    return Contribution(described, {key: queue.tensors[key] for key in described.sizes})


def _common(rest: Mapping[Any, Any], count: int, described: Description, queue: _Queue) -> None:
    """Everything that is not sharded, each field in the place where slime's own file has it."""
    names = _keys(rest)
    for name, value in zip(names, rest.values(), strict=True):
        undo = queue.mark()
        try:
            try:
                _take(name, value, count, described, queue)
            except RecursionError:
                queue.back_to(undo)
                with deeper():
                    _take(name, value, count, described, queue)
        except Exception as error:
            if not_ours(error):
                raise
            queue.back_to(undo)
            described.left_out[str(name)] = describe(error)


def _take(name: Any, value: Any, count: int, described: Description, queue: _Queue) -> None:
    """One field that is not sharded."""
    plain = _Plain(queue)
    try:
        if name in ID_COLUMNS:
            # A list also where it was a tensor or an array: its values are those of single samples.
            described.ids[name] = None if value is None else plain.value(list(value))
        elif name in WHOLE_BATCH_FIELDS:
            described.whole[name] = plain.value(value)
        elif name not in LAYOUT_FIELDS and is_per_sample(value, count):
            described.columns[name] = plain.value(value)
        else:
            described.layout[name] = plain.value(value)
    finally:
        if plain.converted:
            described.converted[str(name)] = sorted(plain.converted)


@contextlib.contextmanager
def deeper() -> Iterator[None]:
    """Room for nests that pickle can still hold: it takes one level of the recursion limit for each of theirs, we
    three. Entered only where the usual limit did not do."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(4 * limit)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def is_per_sample(value: Any, count: int) -> bool:
    """Whether ``value`` pairs with the ``count`` samples of a rank, by slime's own rule."""
    if torch.is_tensor(value):
        with torch._C.DisableTorchFunctionSubclass():
            return value.dim() >= 1 and value.size(0) == count
    return isinstance(value, (list, tuple)) and len(value) == count


def _sharded(
    name: str, values: Sequence[Any], expected: list[int], responses: list[int], queue: _Queue
) -> list[Sharded]:
    """Queue the samples of a response-level field, but for those in files. Raises :class:`DumpError` naming the sample
    and the numbers."""
    if len(values) != len(expected):
        raise DumpError(f"must hold one tensor per sample: expected {len(expected)}, found {len(values)}")
    flat: dict[int, torch.Tensor] = {}
    for index, value in enumerate(values):
        if _in_file(value) is not None:
            continue
        if not torch.is_tensor(value):
            raise DumpError(f"local sample {index} must be a tensor, found {type(value).__name__}")
        movable = _flat_memory(value)
        if movable.dim() == 0:
            raise DumpError(f"local sample {index} must have a dimension, found a single number")
        flat[index] = movable
    lengths = {index: value.size(0) for index, value in flat.items()}
    as_shard, as_full = (all(lengths[i] == all_of[i] for i in lengths) for all_of in (expected, responses))
    if not as_shard and not as_full:
        index = next(i for i, length in lengths.items() if length != expected[i])
        raise DumpError(
            f"local sample {index} holds {lengths[index]} values; "
            f"expected {expected[index]} (response length {responses[index]})"
        )
    groups: dict[StreamKey, list[int]] = {}
    for index, value in flat.items():
        groups.setdefault((name, value.dtype, tuple(value.shape[1:])), []).append(index)
    found = []
    for key, samples in groups.items():
        queue.add_all(key, [flat[index] for index in samples])
        full = None if as_shard and as_full else as_full
        found.append(Sharded(key, tuple(samples), tuple(lengths[i] for i in samples), full))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Tensors as bytes


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """A block in which torch does what it says: on the CPU where no device is named, and without the user's own modes,
    which may count, refuse or fake each operation."""
    with contextlib.ExitStack() as stack:
        # The default device is such a mode as well.
        while torch._C._len_torch_function_stack():
            stack.enter_context(torch.overrides._pop_mode_temporarily())
        if torch._C._len_torch_dispatch_stack():  # looked at first: what follows imports much
            stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
        yield


class _NeedsTorch(Exception):
    """A tensor whose bytes cannot travel as they are in memory; torch's own file format can hold it."""


@dataclass
class _Queue:
    """Tensors by stream, in the order in which they are added."""

    tensors: dict[StreamKey, list[torch.Tensor]] = field(default_factory=dict)
    sizes: dict[StreamKey, int] = field(default_factory=dict)

    def add(self, key: StreamKey, tensor: torch.Tensor) -> Ref:
        """``tensor``: as :func:`_flat_memory` gives it."""
        return Ref(key, self.add_all(key, [tensor]), tuple(tensor.shape))

    def add_all(self, key: StreamKey, tensors: Sequence[torch.Tensor]) -> int:
        """Returns where the first one starts."""
        start = self.sizes.get(key, 0)
        held = [tensor for tensor in tensors if tensor.numel()]
        self.sizes[key] = start + sum(tensor.numel() for tensor in held)
        if held:
            if key[1] not in ORDINARY_DTYPES:  # not every dtype has a kernel that joins tensors; bytes have
                held = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in held]
            self.tensors.setdefault(key, []).extend(held)
        return start

    def drop(self, name: str) -> None:
        for key in [key for key in self.sizes if key[0] == name]:
            del self.sizes[key]
            self.tensors.pop(key, None)

    def mark(self) -> dict[StreamKey, tuple[int, int]]:
        return {key: (size, len(self.tensors.get(key, ()))) for key, size in self.sizes.items()}

    def back_to(self, mark: Mapping[StreamKey, tuple[int, int]]) -> None:
        """Forget what was added since."""
        for key in list(self.sizes):
            self.sizes[key], kept = mark.get(key, (0, 0))
            if key in self.tensors:
                del self.tensors[key][kept:]


ORDINARY_DTYPES = frozenset(
    {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128}
    | {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool}
)
"""Dtypes that torch can fill, add, join and store in its usual way; the others are only moved, as bytes."""


def _flat_memory(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as a plain, dense, detached one whose elements can be read as they lie in memory.

    Raises :class:`_NeedsTorch` where only torch's own format can hold it, :class:`DumpError` where it has no data.
    """
    if type(tensor) is not torch.Tensor:
        if _holds_no_memory(tensor):
            raise _NeedsTorch
        tensor = _without_subclass(tensor)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise _NeedsTorch
    if tensor.is_meta:
        raise DumpError("a tensor on the meta device has no data")
    if tensor.requires_grad:
        tensor = tensor.detach()
    count, itemsize = tensor.numel(), tensor.dtype.itemsize
    held = tensor.untyped_storage().nbytes() - tensor.storage_offset() * itemsize
    if count * itemsize > held or not tensor.is_contiguous():
        reach = 1 + sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if count and reach * itemsize > held:
            raise DumpError(f"a tensor of shape {tuple(tensor.shape)} has only {max(0, held)} bytes of memory left")
        if count > reach:
            raise _NeedsTorch  # an expanded view: as it is, it costs its memory; written out, its shape
    return tensor.resolve_conj().resolve_neg()  # only now: it reads the memory


def _holds_no_memory(tensor: torch.Tensor) -> bool:
    """Whether it is of a subclass that keeps its data in other tensors; torch's own jagged ones are."""
    own = (torch.Tensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl)
    return type(tensor).__torch_dispatch__ not in own


def _without_subclass(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor below a subclass, whose own code is not called."""
    if type(tensor) is torch.Tensor:
        return tensor  # a sparse one has no other view of itself
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def _as_torch_stores(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as the bytes of a file that torch's safe loader takes, uint8. What cannot be read safely raises."""
    wrapper = _holds_no_memory(tensor)
    file = io.BytesIO()
    torch.save((tensor if wrapper else _without_subclass(tensor)).detach().cpu(), file)
    try:
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except pickle.UnpicklingError:
        if not wrapper:
            raise
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise DumpError(f"a {kind} keeps its data in a way of its own, which cannot be read safely") from None
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _neighbours(tensors: Iterable[torch.Tensor], on_device: int, on_cpu: int) -> Iterator[list[torch.Tensor]]:
    """Flat neighbours on the same device, together at most that many elements. A tensor above that is cut."""
    run: list[torch.Tensor] = []
    room = 0
    for tensor in tensors:
        count = tensor.numel()
        flat = tensor if tensor.dim() == 1 else tensor.reshape(-1)
        if not run or count > room or flat.device != run[0].device:
            if run:
                yield run
                run = []
            room = max(1, on_cpu if flat.device.type == "cpu" else on_device)
            if count > room:
                yield from ([piece] for piece in torch.split(flat, room))
                continue
        run.append(flat)
        room -= count
    if run:
        yield run


# ---------------------------------------------------------------------------------------------------------------------
# Everything else as plain values

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_SCALARS: Mapping[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: lambda value: complex(value.real, value.imag),
    str: str.__str__,
    bytes: lambda value: bytes(memoryview(value)),
}
"""How an instance of a subclass becomes one of the class itself, whatever the subclass overrides."""

_DEEPEST = 2000
"""A bound of our own: a user may have raised Python's far above what the machine's stack holds, and a stack that
overflows ends the process."""


class _Plain:
    """Turns one field into what torch's safe loader takes: plain Python values, with a :class:`Ref` or
    :class:`Stored` for each tensor.

    NumPy scalars become Python numbers, NumPy arrays and storages tensors, deques and the like lists or dicts, enums
    their values; anything else its ``repr``, which ``converted`` notes by type: a dump that cannot be loaded safely is
    worse than one that shows an object as text.
    """

    def __init__(self, queue: _Queue) -> None:
        self._queue = queue
        self._open: set[int] = set()
        self._done: dict[int, tuple[Any, Any]] = {}
        self.converted: set[str] = set()

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value  # cannot change; what can is copied below, for the file may be written while training goes on
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (dict, list, tuple, set, frozenset)):
            return self._container(value)
        if isinstance(value, (UserDict, UserList, deque, array)):
            self._note(value)
            return self._container(value)
        if isinstance(value, (torch.TypedStorage, torch.UntypedStorage)):
            return self._storage(value)
        if isinstance(value, enum.Enum):
            return self.value(value.value)
        if isinstance(value, bytearray):
            return bytes(value)  # equal to it; readers refuse what takes memory by a number in the file
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
            return self._numpy(value)
        for base, exactly in _SCALARS.items():
            if isinstance(value, base):
                return exactly(value)
        found = _in_file(value)
        return self._as_text(value) if found is None else found

    def _tensor(self, value: torch.Tensor) -> Ref | Stored:
        """Once per tensor: samples of one prompt may well share theirs."""
        if id(value) in self._done:
            known: Ref | Stored = self._done[id(value)][1]
            return known
        found: Ref | Stored
        try:
            tensor = _flat_memory(value)
            found = self._queue.add((COMMON, tensor.dtype, ()), tensor)
        except _NeedsTorch:
            found = Stored(self._queue.add((COMMON, torch.uint8, ()), _as_torch_stores(value)))
        self._done[id(value)] = value, found
        return found

    def _storage(self, value: Any) -> Ref | Stored:
        """The tensor over a whole storage: as text, each number would be a line, and take minutes."""
        self._note(value)
        typed = isinstance(value, torch.TypedStorage)
        tensor = torch.empty(0, dtype=value.dtype if typed else torch.uint8, device=value.device)
        return self._tensor(tensor.set_(value._untyped_storage if typed else value))

    def _container(self, value: Any) -> Any:
        if isinstance(value, (list, tuple, array, deque)) and all(type(item) in _PLAIN for item in value):
            return tuple(value) if isinstance(value, tuple) else list(value)  # long lists of numbers: the common case
        if id(value) in self._done:
            return self._done[id(value)][1]
        if id(value) in self._open:
            raise DumpError(f"a {type(value).__name__} holds itself")
        if len(self._open) >= _DEEPEST:
            raise DumpError(f"its values are nested more than {_DEEPEST} deep")
        self._open.add(id(value))
        plain: Any
        if isinstance(value, (dict, UserDict)):
            plain = {}
            # Loops: a comprehension would double the depth of deep nestings.
            for key, item in zip(_keys(value), value.values(), strict=True):
                plain[key] = self.value(item)
        else:
            plain = []
            for item in value:
                # What stands in a set must stay hashable, and torch's safe loader knows no frozenset.
                in_set = isinstance(value, (set, frozenset)) and isinstance(item, frozenset)
                plain.append(self._as_text(item) if in_set else self.value(item))
            if isinstance(value, tuple):
                plain = tuple(plain)
            elif isinstance(value, (set, frozenset)):
                plain = set(plain)
        self._open.discard(id(value))
        self._done[id(value)] = value, plain  # held, so that the number stays this object's
        return plain

    def _numpy(self, value: Any) -> Any:
        dtype = value.dtype
        if value.shape and dtype.kind in "biufc" and dtype.itemsize <= (16 if dtype.kind == "c" else 8):
            # A native copy: torch takes no negative strides and no foreign byte order, and warns of read-only memory.
            numpy: Any = sys.modules["numpy"]
            if isinstance(value, numpy.ma.MaskedArray):
                self._note(value)
            native = numpy.array(value, dtype=dtype.newbyteorder("="), order="C", copy=True, subok=False)
            return self._tensor(torch.from_numpy(native))
        if dtype.kind in "Mm":
            self._note(value)
            return value.astype(str).tolist()
        if id(value) in self._done:
            return self._done[id(value)][1]
        listed = value.tolist()
        if type(listed) is type(value):
            return self._as_text(value)
        if dtype.kind == "V" or (dtype.itemsize > 8 and dtype.kind in "fc"):
            self._note(value)  # the names of a record's fields, or digits
        plain = self.value(listed)
        self._done[id(value)] = value, plain
        return plain

    def _as_text(self, value: Any) -> str:
        self._note(value)
        return _text(value)

    def _note(self, value: Any) -> None:
        self.converted.add(f"{type(value).__module__}.{type(value).__qualname__}")


def _in_file(value: Any) -> Any:
    """What stands for a tensor that slime left in a file: the reference itself where slime's dumps keep it. None for
    anything else."""
    kind: Any = type(value)
    if kind is torch.Tensor:  # looked at first: a dump holds thousands
        return None
    found = fate(kind)
    return InFile(value) if found == "written out" else value if found == "kept" else None


def _text(value: Any) -> str:
    try:
        return str.__str__(repr(value))  # repr() may give an instance of a subclass
    except Exception as error:
        if not_ours(error):
            raise
        return f"<{type(value).__module__}.{type(value).__qualname__}>"


def _keys(given: Mapping[Any, Any]) -> list[Any]:
    """The keys of a dict as plain ones, in its order. Different keys stay different: plain ones stay as they are, and
    the others get out of their way."""
    taken = {key for key in given if type(key) in _PLAIN}
    plain = []
    for key in given:
        if type(key) not in _PLAIN:
            key = _key(key)
            while key in taken:
                key = f"{key}'"
            taken.add(key)
        plain.append(key)
    return plain


def _key(key: Any) -> Any:
    if type(key) in _PLAIN:
        return key
    if isinstance(key, tuple):
        return tuple([_key(item) for item in key])
    if isinstance(key, enum.Enum) and isinstance(key, tuple(_SCALARS)):
        key = key.value
    if type(key).__module__ == "numpy" and hasattr(key, "tolist"):
        number = key.tolist()
        return number if type(number) in _PLAIN else str.__str__(str(key))
    for base, exactly in _SCALARS.items():
        if isinstance(key, base):
            return exactly(key)
    try:
        return str.__str__(str(key))
    except Exception as error:
        if not_ours(error):
            raise
        return _text(key)
