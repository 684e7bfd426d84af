"""The faster pickler writes what torch's own would have written."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import pytest
import torch

from slime_instrument._dump.saving import Pickler, save


def saved(payload: Any) -> Any:
    file = io.BytesIO()
    save(payload, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
)
def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(-3, 5).to(dtype)
    back = saved([tensor])[0]
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_shapes_strides_and_empty_tensors_come_back() -> None:
    tensors = [
        torch.arange(12).view(3, 4).t(),
        torch.arange(10)[2:9:3],
        torch.empty(0),
        torch.empty(0, 4),
        torch.tensor(2.5),
    ]
    for one, other in zip(saved(tensors), tensors, strict=True):
        assert one.shape == other.shape
        assert torch.equal(one, other)


def test_views_of_one_tensor_share_one_storage_in_the_file() -> None:
    flat, other = torch.arange(1000.0), torch.arange(50)
    file = io.BytesIO()
    save({"samples": [{"a": view} for view in flat.split(10)], "b": other}, file)
    with zipfile.ZipFile(file) as archive:
        sizes = [info.file_size for info in archive.infolist() if "/data/" in info.filename]
        assert archive.testzip() is None  # checksums as torch writes them
    assert sorted(sizes) == [400, 4000]


def test_plain_objects_come_back_as_they_are() -> None:
    payload = {"a": [1, None, 2.5, True, "x", (1, "y")], "b": {"c": {}}, 3: b"bytes"}
    assert saved(payload) == payload


def test_a_tensor_that_is_not_plain_is_left_to_torch() -> None:
    weight = torch.ones(3, requires_grad=True)
    assert saved([weight])[0].requires_grad
    conjugate = torch.tensor([1 + 2j]).conj()
    assert torch.equal(saved([conjugate])[0], conjugate)


def test_torch_asks_for_few_storages_and_for_no_other_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for this module: a call of torch's own function per object is two thirds of the time."""
    asked: list[Any] = []
    original = Pickler.__init_subclass__.__func__  # type: ignore[attr-defined]

    def counting(cls: Any) -> None:
        theirs = cls.persistent_id
        cls.persistent_id = lambda self, value: asked.append(value) or theirs(self, value)
        original(cls)

    monkeypatch.setattr(Pickler, "__init_subclass__", classmethod(counting))
    flats = [torch.arange(1000.0), torch.arange(1000)]
    saved([{"a": a, "b": b} for a, b in zip(flats[0].split(10), flats[1].split(10), strict=True)])
    assert len(asked) == len(flats)
