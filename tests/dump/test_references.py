"""Tensors that slime left in files: the dump keeps and reads what slime's own keeps and reads, and the files live as
long as the dump."""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.shards import rollout_data
from slime_instrument._dump import dumper as dumper_module
from slime_instrument._dump.agree import Seen
from slime_instrument._dump.file import Disk, keep_references, write_dump
from slime_instrument._dump.payload import left_out
from slime_instrument._errors import DumpError
from slime_instrument._format.dumps import read_train_dump
from slime_instrument._format.references import TensorReference, count_references
from slime_instrument._format.schema import SAMPLER_HEAD_FIELDS, SHARDED_FIELDS
from tests.tensor_files import tensor_store

from .ranks import payload_of, sharded
from .test_dumper import CASE, args, dumper, no_megatron, on_ranks  # noqa: F401  # the last but one: a fixture

EXPERTS, (IDS, _) = "rollout_routed_experts", SAMPLER_HEAD_FIELDS
LATER = Path(os.environ.get("SLIME_LATER", Path.home() / ".cache/slime-instrument/later"))
"""Of a slime of after 2026-08-21: ``slime/utils/tensor_store.py`` and ``slime/observability/train_data_utils.py``."""


@pytest.fixture
def Reference() -> Iterator[Any]:
    with tensor_store() as made:
        yield made


def experts(position: int) -> torch.Tensor:
    return torch.arange(24, dtype=torch.int16).reshape(6, 2, 2) + position


def in_files(kind: Any, folder: Path, rank: int, rollout_id: int = 0) -> dict[str, Any]:
    """What ``rank`` holds: routed experts in files, and of the sampler's ids those of every other sample."""
    data = rollout_data(CASE, rank)
    whole = [torch.arange(length * 3, dtype=torch.int32).reshape(length, 3) for length in data["response_lengths"]]
    kept = {**{name: data[name] for name in ("total_lengths", "response_lengths")}, IDS: whole}
    own = sharded(kept, CASE.cp, rank % CASE.cp, [IDS])[IDS]
    data[EXPERTS] = []
    for i, position in enumerate(data["partition"]):
        path = folder / f"{rollout_id}/{rank}/experts-{position}.safetensors"
        data[EXPERTS].append(kind.write(experts(position), path))
        if i % 2:
            own[i] = kind.write(whole[i], path.with_name(f"ids-{position}.safetensors"))
    data[IDS] = own
    return data


def dumped(
    folder: Path, kind: Any, settings: dict[str, Any], rollouts: int, rank: int, broken: bool = False
) -> tuple[str, int]:
    """What became of the dumps, and how many tensors this rank read. slime removes its files after each rollout."""
    made, said = dumper(**settings), "done"
    if broken:
        dumper_module.write_dump = partial(_no_space)  # type: ignore[assignment]  # in this forked process only
    for rollout_id in range(rollouts):
        made.begin(rollout_id)
        data = in_files(kind, folder / "spill", rank, rollout_id)
        dist.barrier()  # in the place of a training step
        try:
            made.dump(args(folder / "train_data"), rollout_id, data, Seen())
        except DumpError as error:
            said = str(error)
        dist.barrier()  # slime cleans up when the step has ended on all ranks
        for value in (*data[EXPERTS], *data[IDS][1::2]):
            os.unlink(value.path)
    made._background.flush()
    return said, kind.reads


def _no_space(*_: Any) -> int:
    raise DumpError("no space left")


@pytest.mark.parametrize("async_write", [False, True])
def test_a_reference_is_kept_with_a_file_of_its_own_and_no_rank_reads_it(
    tmp_path: Path, Reference: Any, async_write: bool
) -> None:
    body = partial(dumped, tmp_path, Reference, {"async_write": async_write}, 1)
    assert on_ranks(body) == [("done", 0)] * 4
    dump = read_train_dump(tmp_path / "train_data/0.pt")
    assert left_out({"dp_shards": dump.dp_shards}) == {}
    assert count_references(dump.samples).total == 10 + 4
    for sample in dump.samples:
        found = sample[EXPERTS]
        assert isinstance(found, TensorReference)
        assert found.file is not None
        assert found.file.parents[1] == tmp_path / "train_data/0_r3_spill"
        assert torch.equal(found.load(), experts(sample["rollout_position"]))
        ids = sample[IDS].load() if isinstance(sample[IDS], TensorReference) else sample[IDS]
        assert torch.equal(ids, torch.arange(ids.numel(), dtype=torch.int32).reshape(-1, 3))
        assert len(ids) == sample["response_lengths"]


@pytest.mark.parametrize("class_path", ["slime.utils.tensor_store.TensorRef", "straw.tensor.TensorRef"])
def test_what_slime_writes_out_is_read_by_the_writer_alone(tmp_path: Path, class_path: str) -> None:
    module, _, name = class_path.rpartition(".")
    with tensor_store(module, name) as kind:
        (said, reads), *others = on_ranks(partial(dumped, tmp_path, kind, {}, 1))
    assert (said, reads) == ("done", 10 + 4)
    assert others == [("done", 0)] * 3
    samples = torch.load(tmp_path / "train_data/0.pt", weights_only=True)["samples"]
    for sample in samples:
        assert torch.equal(sample[EXPERTS], experts(sample["rollout_position"]))
        assert torch.equal(sample[IDS].flatten(), torch.arange(sample["response_lengths"] * 3, dtype=torch.int32))
    assert os.listdir(tmp_path / "train_data") != []
    assert not list((tmp_path / "train_data").glob("*_r3_spill"))


def test_rotation_removes_the_files_of_the_dumps_that_it_removes(tmp_path: Path, Reference: Any) -> None:
    other = tmp_path / "train_data/0_r3_spill/somebody-elses"
    other.mkdir(parents=True)
    assert on_ranks(partial(dumped, tmp_path, Reference, {"keep_last": 2}, 4)) == [("done", 0)] * 4
    assert sorted(path.name for path in (tmp_path / "train_data").glob("[0-9]*")) == [
        "0_r3_spill", "2.pt", "2_r3_spill", "3.pt", "3_r3_spill",
    ]  # fmt: skip
    assert list(other.parent.iterdir()) == [other]
    assert count_references(read_train_dump(tmp_path / "train_data/2.pt").samples).missing == 0


def test_a_dump_that_is_not_written_leaves_no_files(tmp_path: Path, Reference: Any) -> None:
    (said, _), *_ = on_ranks(partial(dumped, tmp_path, Reference, {}, 1, broken=True))
    assert "no space left" in said
    assert not list(tmp_path.glob("train_data/*_r3_spill"))


def payload(fields: dict[str, list[Any]]) -> dict[str, Any]:
    count = len(next(iter(fields.values())))
    lengths = {"total_lengths": [7] * count, "response_lengths": [4] * count, "partition": list(range(count))}
    return payload_of([[{**lengths, "tokens": [torch.arange(7)] * count, **fields}]], SHARDED_FIELDS)


def test_a_file_that_is_gone_costs_its_own_field(tmp_path: Path, Reference: Any) -> None:
    values = [Reference.write(experts(i), tmp_path / f"{i}.safetensors") for i in range(3)]
    os.unlink(tmp_path / "1.safetensors")
    made = payload({EXPERTS: values})
    keep_references(made, tmp_path / "dump.pt")
    write_dump(made, tmp_path / "dump.pt", Disk(lambda text: None))
    assert "FileNotFoundError" in left_out(made)[EXPERTS]
    assert {EXPERTS} & {name for sample in made["samples"] for name in sample} == set()
    assert len(torch.load(tmp_path / "dump.pt", weights_only=True)["samples"]) == 3


def test_samples_that_share_a_file_share_its_link(tmp_path: Path, Reference: Any) -> None:
    one = Reference.write(experts(0), tmp_path / "one.safetensors")
    made = payload({EXPERTS: [one, copy.copy(one), one]})
    folder = keep_references(made, tmp_path / "dump.pt")
    assert folder is not None
    (link,) = folder.iterdir()
    assert {sample[EXPERTS].path for sample in made["samples"]} == {str(link)}
    assert link.samefile(one.path)


def test_beside_a_device_nothing_is_made(tmp_path: Path, Reference: Any) -> None:
    made = payload({EXPERTS: [Reference.write(experts(0), tmp_path / "one.safetensors")]})
    assert keep_references(made, Path("/dev/null")) is None
    assert not Path("/dev/null_r3_spill").exists()


@pytest.fixture
def slimes(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """slime's own two modules, and Megatron's groups of one rank."""
    if not (LATER / "slime/utils/tensor_store.py").exists():
        pytest.skip("no tensor_store.py of a later slime in $SLIME_LATER or ~/.cache/slime-instrument/later")
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(LATER)
    store = importlib.import_module("slime.utils.tensor_store")
    utils = importlib.import_module("slime.observability.train_data_utils")
    yield SimpleNamespace(store=store, utils=utils)
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
        del sys.modules[name]


def test_the_dump_is_the_one_that_slimes_own_function_makes(tmp_path: Path, slimes: Any) -> None:
    kind = slimes.store.DiskTensorRef
    lengths = {"total_lengths": [7, 9], "response_lengths": [4, 4], "partition": [1, 0]}
    data = {
        **lengths,
        "tokens": [torch.arange(7), torch.arange(9)],
        EXPERTS: [kind.write(experts(i), tmp_path / f"{i}.safetensors", kind="r3", validated=True) for i in range(2)],
        IDS: [kind.write(torch.zeros(4, 3, dtype=torch.int32), tmp_path / f"ids{i}.safetensors") for i in range(2)],
        "log_probs": [torch.rand(4), torch.rand(4)],
    }
    restored = slimes.utils.restore_context_parallel_fields_to_cpu(data, lambda value, *_: value, keep_restored=True)
    shard = {"rank": 0, "data_parallel_rank": 0, "rollout_data": restored}
    theirs = slimes.utils._build_dump_payload([shard], rollout_id=0, writer_rank=0)
    slimes.store.retain_debug_tensor_refs(theirs, tmp_path / "theirs.pt")

    ours = payload_of([[data]], SHARDED_FIELDS)
    keep_references(ours, tmp_path / "ours.pt")
    write_dump(ours, tmp_path / "ours.pt", Disk(lambda text: None))
    ours = torch.load(tmp_path / "ours.pt", weights_only=False)
    for mine, own in zip(ours["samples"], theirs["samples"], strict=True):
        assert list(mine) == list(own)
        for name in own:
            if not isinstance(own[name], kind):
                assert torch.equal(torch.as_tensor(mine[name]), torch.as_tensor(own[name]))
                continue
            assert type(mine[name]) is kind
            assert {**vars(mine[name]), "path": None} == {**vars(own[name]), "path": None}
            one, other = Path(mine[name].path), Path(own[name].path)
            assert one.samefile(other)
            assert (one.name, one.parents[1].name) == (other.name, other.parents[1].name.replace("theirs", "ours"))
            assert torch.equal(mine[name].load(), own[name].load())
    # What slime wrote with its own class is what the reader without slime finds.
    torch.save(theirs, tmp_path / "theirs.pt")
    assert [one[EXPERTS].shape for one in read_train_dump(tmp_path / "theirs.pt").samples] == [(6, 2, 2)] * 2
