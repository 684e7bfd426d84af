"""Tensors as flat streams of bytes, and back, whatever their dtype and shape and wherever the buckets are cut."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_instrument._dump.packing import Flats, Packer

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
tensors = st.tuples(st.sampled_from(["", "log_probs", "values"]), st.sampled_from(DTYPES), shapes, st.booleans())


def make(dtype: torch.dtype, shape: tuple[int, ...], transposed: bool) -> torch.Tensor:
    count = int(torch.Size(shape).numel())
    base = (torch.arange(count) % 7).to(dtype).reshape(shape)
    return base.mT.contiguous().mT if transposed and len(shape) >= 2 else base


@settings(max_examples=150, deadline=None)
@given(st.lists(tensors, max_size=8), st.integers(1, 40))
def test_what_goes_in_comes_out_for_any_dtype_shape_and_bucket(
    given_tensors: list[tuple[str, torch.dtype, tuple[int, ...], bool]], limit: int
) -> None:
    packer = Packer()
    made = [make(dtype, shape, transposed) for _, dtype, shape, transposed in given_tensors]
    refs = [packer.add(section, tensor) for (section, *_), tensor in zip(given_tensors, made, strict=True)]
    flats = Flats(dict(packer.sizes))
    sizes = []
    for bucket in packer.buckets(limit):
        assert bucket.dtype == torch.uint8
        sizes.append(bucket.numel())
        flats.feed(bucket)
    assert sum(sizes) == packer.nbytes == sum(tensor.numel() * tensor.element_size() for tensor in made)
    assert all(size == min(limit, packer.nbytes) for size in sizes[:-1])
    for source in (flats, packer.flats()):
        for ref, tensor in zip(refs, made, strict=True):
            back = source.tensor(ref)
            assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(back, tensor)
    assert pickle.loads(pickle.dumps(refs)) == refs


def test_values_are_bit_identical_also_nan_inf_and_negative_zero() -> None:
    tensor = torch.tensor([float("nan"), float("inf"), -0.0, -3.4028235e38])
    packer = Packer()
    ref = packer.add("", tensor)
    assert torch.equal(packer.flats().tensor(ref).view(torch.int32), tensor.view(torch.int32))


def test_one_stream_is_one_storage_and_a_small_view_of_a_large_one_is_packed_small() -> None:
    large = torch.zeros(1_000_000)
    packer = Packer()
    refs = [packer.add("log_probs", large[10:13]), packer.add("log_probs", large[:2])]
    flats = packer.flats()
    assert packer.nbytes == 5 * 4
    assert {flats.tensor(ref).untyped_storage().data_ptr() for ref in refs} == {
        flats.buffers[refs[0].key].untyped_storage().data_ptr()
    }
    assert flats.tensor(refs[0]).untyped_storage().nbytes() == 20


def test_a_tensor_that_trains_is_packed_without_its_graph() -> None:
    packer = Packer()
    ref = packer.add("", torch.ones(2, requires_grad=True) * 2)
    assert packer.flats().tensor(ref).requires_grad is False


def test_more_bytes_than_announced_are_refused() -> None:
    flats = Flats({("", torch.float32): 1})
    flats.feed(torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="1 bytes more than announced"):
        flats.feed(torch.zeros(1, dtype=torch.uint8))
