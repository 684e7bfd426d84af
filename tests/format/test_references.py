from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_instrument._errors import DumpFormatError
from slime_instrument._format.dumps import read_rollout_dump, read_train_dump
from slime_instrument._format.references import TensorReference
from slime_instrument._validate import validate_files
from tests.format import builders
from tests.tensor_files import tensor_store

EXPERTS = torch.arange(5 * 2 * 2, dtype=torch.uint8).reshape(5, 2, 2)
CLASS = "slime.utils.tensor_store.DiskTensorRef"
FIELD = "rollout_routed_experts"


def written(folder: Path, class_path: str = CLASS) -> tuple[Path, Path]:
    """A rollout and a train dump, as slime leaves them: each sample's routed experts are in a file beside them."""
    module, _, name = class_path.rpartition(".")
    train, rollout = builders.v2(), builders.rollout()
    with tensor_store(module, name) as Reference:
        for payload, stem in ((rollout, "rollout_data/7"), (train, "train_data/7")):
            for i, sample in enumerate(payload["samples"]):
                path = folder / f"{stem}_r3_spill" / "0123abcd" / f"{i}_experts.safetensors"
                sample[FIELD] = Reference.write(EXPERTS + i, path)
            torch.save(payload, folder / f"{stem}.pt")
    return folder / "rollout_data/7.pt", folder / "train_data/7.pt"


@pytest.mark.parametrize(
    "class_path", [CLASS, "slime.data.tensor.DiskTensorRef", "vime.data.tensor.DiskTensorRef",
                   "slime.utils.tensor_store.TensorRef"],
)  # fmt: skip
def test_a_reference_is_read_without_slime_and_loads_its_tensor_when_asked(tmp_path: Path, class_path: str) -> None:
    rollout, train = written(tmp_path, class_path)
    for dump in (read_rollout_dump(rollout, compact=True), read_train_dump(train)):
        found = dump.samples[2][FIELD]
        assert isinstance(found, TensorReference)
        assert (found.class_path, found.shape, found.dtype) == (class_path, (5, 2, 2), "uint8")
        assert torch.equal(found.load(), EXPERTS + 2)
    assert class_path.rpartition(".")[0] not in sys.modules


def test_a_plain_pickle_of_a_newer_protocol_may_hold_references(tmp_path: Path) -> None:
    with tensor_store() as Reference:
        reference = Reference.write(EXPERTS, tmp_path / "experts.safetensors")
        (tmp_path / "5.pkl").write_bytes(pickle.dumps([{"tokens": [1], FIELD: reference}], protocol=4))
    (sample,) = read_rollout_dump(tmp_path / "5.pkl").samples
    assert torch.equal(sample[FIELD].load(), EXPERTS)


def test_a_file_that_the_user_trusts_gives_the_same_references(tmp_path: Path) -> None:
    with tensor_store() as Reference:
        reference = Reference.write(EXPERTS, tmp_path / "experts.safetensors")
        torch.save({"rollout_id": 5, "samples": [{FIELD: reference, "path": Path("x")}]}, tmp_path / "5.pt")
    (sample,) = read_rollout_dump(tmp_path / "5.pt", allow_pickle=True).samples
    assert torch.equal(sample[FIELD].load(), EXPERTS)


@pytest.mark.parametrize("name", ["7.pt", "renamed.pt"])
def test_a_dump_that_was_moved_finds_the_files_beside_it(tmp_path: Path, name: str) -> None:
    rollout, _ = written(tmp_path / "before")
    shutil.move(tmp_path / "before", tmp_path / "after")
    moved = tmp_path / "after" / "rollout_data"
    (moved / "7.pt").rename(moved / name)
    if name == "renamed.pt":
        (moved / "7_r3_spill").rename(moved / "renamed_r3_spill")
    found = read_rollout_dump(moved / name).samples[1][FIELD]
    assert not Path(found.path).exists()
    assert found.file.parents[2] == moved
    assert torch.equal(found.load(), EXPERTS + 1)
    assert not rollout.exists()


def test_a_reference_of_the_wrong_shape_is_an_error_of_its_field(tmp_path: Path) -> None:
    _, train = written(tmp_path)
    with tensor_store() as Reference:
        payload = torch.load(train, weights_only=False)
        payload["samples"][0][FIELD] = Reference.write(EXPERTS[:3], tmp_path / "short.safetensors")
        torch.save(payload, train)
    (error,) = validate_files([train]).errors
    assert (error.code, error.sample, error.field) == ("routed-experts", 0, FIELD)


def test_a_file_with_another_tensor_is_refused(tmp_path: Path) -> None:
    rollout, _ = written(tmp_path)
    first, second = (read_rollout_dump(rollout).samples[i][FIELD] for i in (0, 1))
    with tensor_store() as Reference:
        os.unlink(first.path), os.unlink(second.path)
        Reference.write(EXPERTS[:4], Path(first.path))
        Reference.write(EXPERTS.to(torch.int16), Path(second.path))
    with pytest.raises(DumpFormatError, match=r"shape \(4, 2, 2\), not \(5, 2, 2\)"):
        first.load()
    with pytest.raises(DumpFormatError, match=r"int16, not torch\.uint8"):
        second.load()
    Path(first.path).write_bytes(b"no safetensors file")
    with pytest.raises(DumpFormatError, match="cannot be read"):
        first.load()


def test_without_safetensors_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout, _ = written(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(DumpFormatError, match=r"needs safetensors.*install slime-instrument\[analysis\]"):
        read_rollout_dump(rollout).samples[0][FIELD].load()


class _Hostile:
    """Pickles as a reference with whatever state."""

    def __init__(self, kind: type, state: Any) -> None:
        self.kind, self.state = kind, state

    def __reduce__(self) -> Any:
        return (object.__new__, (self.kind,), self.state)


GOOD = {"path": "x", "shape": (1,), "dtype": "uint8", "nbytes": 1}


@pytest.mark.parametrize(
    "change",
    [{"path": 3}, {"path": "a\0b"}, {"shape": None}, {"shape": (-1,)}, {"shape": (2**70,)}, {"dtype": None},
     {"nbytes": "1"}, {"kind": [1]}, {"kind": torch.zeros(1)}],
)  # fmt: skip
def test_a_reference_that_says_nonsense_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with tensor_store() as Reference:
        hostile = Reference(**GOOD)
        hostile.__dict__.update(change)
        torch.save({"rollout_id": 5, "samples": [{FIELD: hostile}]}, tmp_path / "5.pt")
    with pytest.raises(DumpFormatError, match=f"holds an object of class {CLASS}"):
        read_rollout_dump(tmp_path / "5.pt")


def test_a_reference_without_a_state_is_refused(tmp_path: Path) -> None:
    with tensor_store() as Reference:
        hollow = Reference(**GOOD)
        hollow.__dict__.clear()
        torch.save({"rollout_id": 5, "samples": [{FIELD: hollow}]}, tmp_path / "5.pt")
    with pytest.raises(DumpFormatError, match=f"holds an object of class {CLASS}"):
        read_rollout_dump(tmp_path / "5.pt")


def test_other_classes_of_those_modules_stay_refused(tmp_path: Path) -> None:
    with tensor_store("slime.utils.tensor_store", "Other") as Other:
        torch.save({"rollout_id": 5, "samples": [{FIELD: Other(**GOOD)}]}, tmp_path / "5.pt")
    with pytest.raises(DumpFormatError, match=r"holds an object of class slime\.utils\.tensor_store\.Other"):
        read_rollout_dump(tmp_path / "5.pt")


def test_an_archive_of_the_queue_is_named_with_the_way_to_a_dump(tmp_path: Path) -> None:
    index = tmp_path / "0.straw.json"
    index.write_text(json.dumps({"format": "slime.straw-debug", "version": 1, "rollout_id": 0}))
    with pytest.raises(DumpFormatError, match=r"does not read yet.*export_pt"):
        read_rollout_dump(index)
