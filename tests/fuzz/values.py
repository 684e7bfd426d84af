"""Whatever stands in rollout_data, on any layout: our file beside what slime's own code (681b3adca) writes.

``python -m tests.fuzz.values --seconds N --seed S`` looks for a difference for as long as that.

One file is compared with the other by :func:`difference`. It knows the rules by which ours may differ: what torch's
safe loader refuses is written as its plain counterpart (a subclass as its base, an enum as its value, a NumPy array as
a tensor) or, named under "converted", as text; a field that cannot be stored at all is named under "left_out".
"""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import datetime
import enum
import importlib.util
import io
import logging
import pickle
import random
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from slime_instrument._dump.contribute import Contribution, Description, contribute
from slime_instrument._dump.file import Disk, write_dump
from slime_instrument._dump.payload import build_payload, put_together
from slime_instrument._format.schema import NATIVE_CONTEXT_PARALLEL_FIELDS
from tests.dump.ranks import cut, topology

# ---------------------------------------------------------------------------------------------------------------------
# One value of each kind


class Status(str, enum.Enum):
    DONE = "completed"


class Level(enum.IntEnum):
    HIGH = 3


class Colour(enum.Enum):
    RED = enum.auto()


class Text(str):
    def __str__(self) -> str:
        return self  # an instance of the subclass


class Whole(int):
    def __int__(self) -> int:
        raise RuntimeError("int() of somebody's class")


class Real(float):
    pass


class Bytes(bytes):
    pass


class Point(NamedTuple):
    x: int
    y: Any


class Numbers(list):  # type: ignore[type-arg]
    pass


class Custom:
    def __repr__(self) -> str:
        return "<custom>"


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no")


class Quiet(torch.Tensor):
    """A subclass without behaviour of its own."""


class Loud(torch.Tensor):
    """A subclass whose every operation raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("somebody's __torch_function__")


class Wrapper(torch.Tensor):
    """A subclass that holds no data itself."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    inner: torch.Tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrapped(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapper) else value

        return func(*map(unwrapped, args), **(kwargs or {}))


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def freed_conjugate() -> torch.Tensor:
    tensor = torch.ones(1 << 20, dtype=torch.complex64)
    view = tensor.conj()
    tensor.untyped_storage().resize_(0)
    return view


def freed_sparse() -> torch.Tensor:
    values = torch.ones(3)
    tensor = torch.sparse_coo_tensor(torch.arange(3)[None], values, (3,), is_coalesced=True)
    values.untyped_storage().resize_(0)
    return tensor


def quiet(make: Callable[[], Any]) -> Callable[[], Any]:
    """Without torch's warnings that a kind of tensor is experimental or deprecated."""

    def made() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make()

    return made


def bits(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    return quiet(lambda: torch.arange(8, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype))


DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]

TENSORS: dict[str, Callable[[], Any]] = {
    **{f"{dtype}": bits(dtype) for dtype in DTYPES if dtype is not torch.bool},
    "torch.bool": lambda: torch.tensor([True, False, True]),
    "no dimension": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0, 4),
    "nan, inf, -0.0": lambda: torch.tensor([float("nan"), float("inf"), -0.0]),
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "with steps": lambda: torch.arange(9)[1::3],
    "expanded": lambda: torch.tensor([1.5]).expand(4),
    "overlapping": lambda: torch.arange(5).as_strided((3, 3), (1, 1)),
    "conjugate": lambda: torch.tensor([1 + 2j, -3j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j, -3j]).conj().imag,
    "trains": lambda: torch.ones(3, requires_grad=True) * 2,
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "inference": lambda: _inference(),
    "quantized": quiet(lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)),
    "quantized by channel": quiet(
        lambda: torch.quantize_per_channel(
            torch.ones(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
        )
    ),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": quiet(lambda: torch.eye(4).to_sparse_csr()),
    "csc": quiet(lambda: torch.eye(4).to_sparse_csc()),
    "bsr": quiet(lambda: torch.eye(4).to_sparse_bsr((2, 2))),
    "bsc": quiet(lambda: torch.eye(4).to_sparse_bsc((2, 2))),
    "nested": quiet(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    "jagged": quiet(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)),
    "subclass": lambda: torch.ones(3).as_subclass(Quiet),
    "loud subclass": lambda: torch.ones(3).as_subclass(Loud),
    "wrapper subclass": lambda: Wrapper(torch.ones(3)),
    "meta": lambda: torch.empty(3, device="meta"),
    "freed": freed,
    "freed conjugate": freed_conjugate,
    "freed sparse": quiet(freed_sparse),
}


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2)


class _Masked:
    def __new__(cls) -> Any:
        return np.ma.masked_array([1.0, 2.0], mask=[True, False])


ARRAYS: dict[str, Callable[[], Any]] = {
    **{
        f"numpy {code}": (lambda code=code: np.arange(4).astype(code))
        for code in ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16", ">f4", ">i8")
    },
    "numpy longdouble": lambda: np.arange(3, dtype=np.longdouble),
    "numpy clongdouble": lambda: np.arange(2, dtype=np.clongdouble),
    "numpy reversed": lambda: np.arange(4.0)[::-1],
    "numpy transposed": lambda: np.arange(6).reshape(2, 3).T,
    "numpy empty": lambda: np.zeros((0, 4), dtype=np.float16),
    "numpy no dimension": lambda: np.array(3),
    "numpy scalar": lambda: np.float32(0.1),
    "numpy bool": lambda: np.bool_(True),
    "numpy text": lambda: np.str_("s"),
    "numpy bytes": lambda: np.bytes_(b"s"),
    "numpy texts": lambda: np.array(["a", "b"]),
    "numpy objects": lambda: np.array([1, "a", None, torch.ones(2)], dtype=object),
    "numpy masked": _Masked,
    "numpy structured": lambda: np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "numpy small structured": lambda: np.array([(1,)], dtype=[("a", "i4")]),
    "numpy date": lambda: np.datetime64("2026-01-02"),
    "numpy dates": lambda: np.array(["2026-01-02"], dtype="M8[ns]"),
    "numpy spans": lambda: np.array([3], dtype="m8[s]"),
    "numpy dtype": lambda: np.dtype("f4"),
    "numpy function": lambda: np.sin,
}


def _cycle() -> Any:
    cycle: list[Any] = [1]
    cycle.append(cycle)
    return cycle


def _cyclic_deque() -> Any:
    cycle: Any = collections.deque([1])
    cycle.append(cycle)
    return cycle


def _deep(depth: int) -> Any:
    nest: Any = torch.ones(1)
    for _ in range(depth):
        nest = [nest]
    return nest


def _wide(depth: int = 40) -> Any:
    nest: Any = [1]
    for _ in range(depth):
        nest = [nest, nest]
    return nest


def _wide_dicts(depth: int = 40) -> Any:
    nest: Any = {"t": torch.ones(1)}
    for _ in range(depth):
        nest = {"a": nest, "b": (nest,)}
    return nest


def _wide_arrays(depth: int = 40) -> Any:
    nest: Any = np.array([1, None], dtype=object)
    for _ in range(depth):
        outer = np.empty(2, dtype=object)
        outer[:] = [nest, nest]
        nest = outer
    return nest


OBJECTS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "big int": lambda: -(2**70),
    "surrogate": lambda: "ü\ud800",
    "long text": lambda: "x" * 100_000,
    "looks like a tensor": lambda: "tensor([1.])",
    "bytes": lambda: b"\x00\xff",
    "bytearray": lambda: bytearray(b"x"),
    "complex": lambda: 2j,
    "enum": lambda: Colour.RED,
    "text enum": lambda: Status.DONE,
    "number enum": lambda: Level.HIGH,
    "text subclass": lambda: Text("x"),
    "int subclass": lambda: Whole(4),
    "float subclass": lambda: Real(0.5),
    "bytes subclass": lambda: Bytes(b"x"),
    "list subclass": lambda: Numbers([1, 2]),
    "namedtuple": lambda: Point(1, [2]),
    "size": lambda: torch.Size([2, 3]),
    "torch dtype": lambda: torch.bfloat16,
    "torch device": lambda: torch.device("cpu"),
    "ordered": lambda: collections.OrderedDict(a=1),
    "defaultdict": lambda: collections.defaultdict(list, a=[1]),
    "set": lambda: {1, "a"},
    "frozenset": lambda: frozenset({1}),
    "sets in a set": lambda: {frozenset({1}), frozenset({2})},
    "tensors in a set": lambda: {torch.ones(2)},
    "keys that look alike": lambda: {0: "zero", uuid.SafeUUID.safe: "A", "SafeUUID.safe": "B"},
    "keys that look alike, turned": lambda: {Colour.RED: 1, "Colour.RED": 2, "Colour.RED'": 3},
    "odd keys": lambda: {np.int64(3): 1, Status.DONE: 2, (np.int64(1), Text("k")): 3, None: 4, 1.5: 5},
    "a date as key": lambda: {np.datetime64("2026-01-02"): 1, datetime.date(2026, 1, 2): 2},
    "longdouble as key": lambda: {np.longdouble(1.5): 1},
    "objects as keys": lambda: {Custom(): 1, Custom(): 2, frozenset({1}): 3},
    "unprintable key": lambda: {Unprintable(): 1},
    "object": Custom,
    "unprintable": Unprintable,
    "class": lambda: Custom,
    "function": lambda: len,
    "lambda": lambda: lambda: 1,
    "generator": lambda: (i for i in range(3)),
    "lock": threading.Lock,
    "date": lambda: datetime.date(2026, 1, 2),
    "module": lambda: sys,
    "range": lambda: range(3),
    "memoryview": lambda: memoryview(b"ab"),
    "deque": lambda: collections.deque([1, torch.ones(2)], maxlen=5),
    "array": lambda: array.array("d", [0.5, 1.5]),
    "UserList": lambda: collections.UserList([torch.ones(2)]),
    "UserDict": lambda: collections.UserDict({"a": torch.ones(2), 3: [1]}),
    "storage": lambda: torch.arange(3.0).untyped_storage(),
    "typed storage": quiet(lambda: torch.arange(3.0).storage()),
    "cycle": _cycle,
    "a deque that holds itself": _cyclic_deque,
    "depth 200": lambda: _deep(200),
    "depth 1000": lambda: _deep(1000),
    "a shared nest": _wide,
    "a shared nest of dicts": _wide_dicts,
    "a shared nest of arrays": _wide_arrays,
}

KINDS = {**TENSORS, **ARRAYS, **OBJECTS}

HANGS_SLIME = frozenset(
    {"a shared nest", "a shared nest of dicts", "a shared nest of arrays", "cycle", "a deque that holds itself"}
)
"""slime, or the comparison here, walks every path of a nest, and a cycle until Python's depth ends: not asked about."""

ENDS_THE_PROCESS = frozenset({"freed conjugate", "freed sparse"})
"""slime's own way reads memory that is gone."""

# ---------------------------------------------------------------------------------------------------------------------
# Both files


def slimes_own(checkout: Path) -> Any:
    """slime's own module; it imports nothing but torch."""
    path = checkout / "slime/backends/megatron_utils/train_dump_utils.py"
    spec = importlib.util.spec_from_file_location("slimes_train_dump_utils", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_slime(module: Any, ranks: Sequence[Sequence[dict[str, Any]]]) -> Any:
    """What is in slime's own file for ``ranks[dp][cp]``. Raises what slime raises."""
    shards = []
    for dp_rank, of_rank in enumerate(ranks):
        cp = len(of_rank)
        # slime sums the zero-padded parts over the context-parallel group, tensor by tensor in this order.
        parts = iter(
            [
                [data[name][index] for data in of_rank]
                for name in NATIVE_CONTEXT_PARALLEL_FIELDS
                if isinstance(of_rank[0].get(name), (list, tuple))
                for index in range(len(of_rank[0][name]))
            ]
        )

        def gather(value: torch.Tensor, total: int, response: int, parts: Any = parts, cp: int = cp) -> torch.Tensor:
            held = next(parts)
            if cp == 1:
                return value
            whole = torch.zeros(response, *value.shape[1:], dtype=value.dtype)
            for rank, of_that_rank in enumerate(held):
                index = cut(torch.arange(response), total, cp, rank)
                padded = torch.zeros_like(whole)
                padded[index] = of_that_rank
                whole = whole + padded
            return whole

        data = module.restore_context_parallel_fields_to_cpu(of_rank[0], gather, keep_restored=True)
        shards.append({"rank": dp_rank * cp, "data_parallel_rank": dp_rank, "rollout_data": data})
    file = io.BytesIO()
    torch.save(module._build_dump_payload(shards, rollout_id=0, writer_rank=0), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_us(ranks: Sequence[Sequence[dict[str, Any]]], path: Path, fields: Sequence[str]) -> Any:
    """Our file for the same ranks, read the safe way; contributions travel as they do between processes."""
    contributions = []
    for dp_rank, of_rank in enumerate(ranks):
        for cp_rank, data in enumerate(of_rank):
            made = contribute(data, topology(len(of_rank), cp_rank, len(ranks), dp_rank), fields)
            description: Description = pickle.loads(made.description.encode())
            contributions.append(Contribution(description, made.streams))
    parts = put_together(contributions, len(ranks[0]), fields)
    write_dump(build_payload(parts, rollout_id=0, writer_rank=0), path, Disk(lambda text: None))
    return torch.load(path, weights_only=True)


# ---------------------------------------------------------------------------------------------------------------------
# Their difference


class Differs(AssertionError):
    pass


def same(ours: Any, theirs: Any, converted: Sequence[str], where: str = "") -> None:
    """Raises :class:`Differs` where ``ours`` is neither the value itself nor what the rules make of it."""

    def differs(why: str) -> Differs:
        return Differs(f"{where}: {why}: ours {ours!r:.200}, slime's {theirs!r:.200}")

    if isinstance(theirs, torch.Tensor):
        kind = type(theirs) if theirs.layout is torch.jagged else torch.Tensor
        if type(ours) is not kind or not _same_tensor(ours, theirs):
            raise differs("another tensor")
    elif isinstance(theirs, enum.Enum):
        same(ours, theirs.value, converted, where)
    elif isinstance(theirs, (np.ndarray, np.generic)):
        _same_array(ours, theirs, converted, where)
    elif isinstance(theirs, (torch.TypedStorage, torch.UntypedStorage)):
        same(ours, torch.tensor(theirs.tolist(), dtype=getattr(theirs, "dtype", torch.uint8)), converted, where)
    elif isinstance(theirs, (collections.UserList, collections.deque, array.array)):
        same(ours, list(theirs), converted, where)
    elif isinstance(theirs, collections.UserDict):
        same(ours, dict(theirs), converted, where)
    elif isinstance(theirs, dict):
        if type(ours) is not dict or len(ours) != len(theirs):
            raise differs("another dict")
        for (our_key, our_value), (key, value) in zip(ours.items(), theirs.items(), strict=True):
            if type(key) in (str, int, float, bool, bytes, type(None)) and (type(our_key), our_key) != (type(key), key):
                raise differs(f"the key {key!r} became {our_key!r}")
            same(our_value, value, converted, f"{where}[a {type(key).__name__}]")
    elif isinstance(theirs, (set, frozenset)):
        if type(ours) is not set or len(ours) != len(theirs):
            raise differs("another set")
        plain = [item for item in theirs if not isinstance(item, (torch.Tensor, frozenset))]
        if not all(item in ours for item in plain):
            raise differs("another set")
    elif isinstance(theirs, (list, tuple)):
        kind = tuple if isinstance(theirs, tuple) else list
        if type(ours) is not kind or len(ours) != len(theirs):
            raise differs(f"another {kind.__name__}")
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            same(one, other, converted, f"{where}[{index}]")
    elif isinstance(theirs, bytearray):
        if type(ours) is not bytes or ours != theirs:  # readers refuse a bytearray of a size that only a number claims
            raise differs("other bytes")
    elif isinstance(theirs, (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)):
        kind = next(k for k in (bool, int, float, complex, str, bytes, object) if isinstance(theirs, k))
        equal = ours == theirs or (ours != ours and theirs != theirs)
        if (kind is not object and type(ours) is not kind) or not equal:
            raise differs("another value")
    elif type(ours) is not str or f"{type(theirs).__module__}.{type(theirs).__qualname__}" not in converted:
        raise differs("an object must become text and be named")


def _same_tensor(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if theirs.layout is torch.jagged:
        return all(map(_same_tensor, (ours.values(), ours.offsets()), (theirs.values(), theirs.offsets())))
    with torch._C.DisableTorchFunctionSubclass():
        theirs = theirs.detach() if type(theirs) is torch.Tensor else theirs.detach().as_subclass(torch.Tensor)
        if (ours.dtype, ours.layout, ours.is_quantized, ours.dim()) != (
            theirs.dtype, theirs.layout, theirs.is_quantized, theirs.dim(),
        ):  # fmt: skip
            return False
        if ours.requires_grad:
            return False
        if theirs.is_nested:
            return len(ours.unbind()) == len(theirs.unbind()) and all(map(_same_tensor, ours.unbind(), theirs.unbind()))
        if ours.shape != theirs.shape:
            return False
        if theirs.is_quantized:
            return torch.equal(ours.int_repr(), theirs.int_repr()) and torch.equal(
                ours.dequantize(), theirs.dequantize()
            )
        if theirs.layout is not torch.strided:
            return torch.equal(ours.to_dense(), theirs.to_dense())
        return _bytes(ours) == _bytes(theirs)


def _bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(plain.view(torch.uint8).numpy().tobytes()) if plain.numel() else b""


def _same_array(ours: Any, theirs: Any, converted: Sequence[str], where: str) -> None:
    dtype = theirs.dtype
    named = f"{type(theirs).__module__}.{type(theirs).__qualname__}" in converted
    if isinstance(theirs, np.ma.MaskedArray) and not named:
        raise Differs(f"{where}: the mask is gone and not named")
    if theirs.shape and dtype.kind in "biufc" and dtype.itemsize <= (16 if dtype.kind == "c" else 8):
        expected = torch.from_numpy(np.array(theirs, dtype=dtype.newbyteorder("="), order="C", subok=False))
        if type(ours) is not torch.Tensor or not _same_tensor(ours, expected):
            raise Differs(f"{where}: ours {ours!r:.200}, slime's {theirs!r:.200}")
    elif dtype.kind in "Mm" or dtype in (np.longdouble, np.clongdouble):
        if not named and not any("longdouble" in kind for kind in converted):
            raise Differs(f"{where}: {theirs!r:.100} became text and is not named")
    elif dtype.kind == "V" and not named:
        raise Differs(f"{where}: the names of its fields are gone and not named")
    else:
        listed = theirs.tolist()
        same(ours, listed, converted, where)


def difference(ours: Any, theirs: Any, fields: Sequence[str]) -> None:
    """Compare two whole files. Raises :class:`Differs` with the place and both values."""
    for one in (ours, theirs):
        assert [*one][:5] == ["format_version", "rollout_id", "rank", "samples", "dp_shards"]
    left_out: set[str] = set()
    converted: set[str] = set()
    for shard in ours["dp_shards"]:
        record = shard.pop("provenance")
        left_out |= record.get("left_out", {}).keys()
        for kinds in record.get("converted", {}).values():
            converted |= set(kinds)
    holders = [
        *((f"sample {i}", *pair) for i, pair in enumerate(zip(ours["samples"], theirs["samples"], strict=True))),
        *((f"shard {i}", *pair) for i, pair in enumerate(zip(ours["dp_shards"], theirs["dp_shards"], strict=True))),
        (
            "top",
            *(
                {key: value for key, value in one.items() if key not in ("samples", "dp_shards")}
                for one in (ours, theirs)
            ),
        ),
    ]
    for where, one, other in holders:
        lacking = other.keys() - one.keys() - left_out
        more = one.keys() - other.keys()
        if lacking or more:
            raise Differs(f"{where}: lacks {sorted(map(str, lacking))}, has beside slime's {sorted(map(str, more))}")
        for name in one:
            same(one[name], other[name], sorted(converted), f"{where}, {name}")


# ---------------------------------------------------------------------------------------------------------------------
# Many of them


def rollout(chance: random.Random, cp: int, dp: int, kinds: Sequence[str]) -> list[list[dict[str, Any]]]:
    """``ranks[dp][cp]`` of one rollout that holds some odd values, nested or as columns, beside ordinary fields."""
    ranks, position = [], 0
    names = [f"field {i}" for i in range(chance.randint(1, 3))]
    plan = [(name, chance.choice(kinds), chance.choice(_PLACES)) for name in names]
    sharded = {name: _sharded_kind(chance) for name in ("log_probs", "values", "entropy") if chance.random() < 0.6}
    whole = [KINDS[chance.choice(kinds)]() for _ in range(2)] if chance.random() < 0.3 else [0.5, 1.0]
    for _ in range(dp):
        count = chance.randint(0, 3)
        # A prompt of at least one token: what no rank owns differs by rule and has tests of its own.
        responses = [chance.randint(0, 6) for _ in range(count)]
        totals = [response + chance.randint(1, 6) for response in responses]
        data: dict[str, Any] = {
            "tokens": [torch.arange(total) for total in totals],
            "total_lengths": totals,
            "response_lengths": responses,
            "partition": list(range(position, position + count)),
            "micro_batch_indices": [[index] for index in range(count)],
            "raw_reward": whole,
        }
        position += count
        for name, kind, place in plan:
            data[name] = place(KINDS[kind], count)
        of_rank = [dict(data) for _ in range(cp)]
        for name, make in sharded.items():
            full = [make(response, chance) for response in responses]
            for rank, held in enumerate(of_rank):
                held[name] = [cut(value, total, cp, rank) for value, total in zip(full, totals, strict=True)]
        ranks.append(of_rank)
    return ranks


def _sharded_kind(chance: random.Random) -> Callable[[int, random.Random], torch.Tensor]:
    first, second = (chance.choice([torch.float32, torch.bfloat16, torch.float64, torch.int64]) for _ in range(2))
    tail = chance.choice([(), (), (2,)])
    mixed = chance.random() < 0.2

    def make(response: int, chance: random.Random) -> torch.Tensor:
        dtype = second if mixed and chance.random() < 0.5 else first
        return (
            torch.tensor([chance.choice([0, -1, 2, 3]) for _ in range(response * (2 if tail else 1))])
            .to(dtype)
            .reshape(response, *tail)
        )

    return make


Make = Callable[[], Any]
_PLACES: list[Callable[[Make, int], Any]] = [
    lambda make, count: make(),
    lambda make, count: [make() for _ in range(count)],
    lambda make, count: tuple(make() for _ in range(count)),
    lambda make, count: [make()] * count,
    lambda make, count: [{"a": make(), "b": [make(), 1]} for _ in range(count)],
    lambda make, count: {"deep": [({"x": make()},)]},
    lambda make, count: [make() for _ in range(count + 1)],
    lambda make, count: [None, *[make() for _ in range(max(0, count - 1))]],
]


def look(seed: int, module: Any, path: Path, kinds: Sequence[str]) -> bool:
    """One rollout from ``seed``, both ways. Whether slime's own way could write it at all."""
    chance = random.Random(seed)
    ranks = rollout(chance, chance.randint(1, 3), chance.randint(1, 3), kinds)
    fields = NATIVE_CONTEXT_PARALLEL_FIELDS
    ours = by_us(ranks, path, fields)  # whatever it is: written, and read the safe way
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            theirs = by_slime(module, ranks)
        except Exception:
            return False  # a value that ends slime's dump costs ours a field at most
    difference(ours, theirs, fields)
    return True


def askable() -> list[str]:
    """Kinds that slime's own way can be asked about."""
    return [kind for kind in KINDS if kind not in HANGS_SLIME | ENDS_THE_PROCESS]


def main(arguments: Sequence[str] | None = None) -> int:
    from slime_instrument.lab import find_sources

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.values", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    checkout = next((folder for folder in find_sources() if folder.name == "681b3adca"), None)
    if checkout is None:
        print("no checkout of slime 681b3adca was found; there is nothing to compare with", file=sys.stderr)
        return 2
    logging.disable(logging.WARNING)
    module, seed, compared = slimes_own(checkout), given.seed, 0
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        ends = time.monotonic() + given.seconds
        while time.monotonic() < ends:
            try:
                compared += look(seed, module, Path(folder) / "0.pt", askable())
            except BaseException as error:
                print(f"seed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
                if not isinstance(error, Differs):
                    raise
                return 1
            seed += 1
    print(f"{seed - given.seed} rollouts, {compared} of them compared with slime's own file: no difference")
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
