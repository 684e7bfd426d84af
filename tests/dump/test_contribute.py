"""What a rank contributes: every value of every kind comes through as slime's own file has it, costs at most its own
field, and is never copied before it travels."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slime_instrument._dump.contribute import contribute, is_per_sample
from slime_instrument._dump.payload import left_out, put_together
from slime_instrument._errors import DumpError
from slime_instrument._hooks.capture import CaptureSession
from slime_instrument.lab import find_sources
from tests.fuzz import values
from tests.fuzz.values import KINDS

from .ranks import payload_of, topology

FIELDS = ("log_probs", "teacher_log_probs")

# torch says of several kinds of tensor that they are experimental or deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def data(**more: Any) -> dict[str, Any]:
    return {"total_lengths": [9, 8], "response_lengths": [3, 6], "tokens": [torch.zeros(9), torch.zeros(8)], **more}


def written(tmp_path: Path, fields: dict[Any, Any], count: int = 2, **more: Any) -> Any:
    """The file of one rank that holds ``fields`` and ``count`` samples, read the safe way."""
    lengths = {"total_lengths": [4] * count, "response_lengths": [2] * count}
    return values.by_us([[{**lengths, **fields, **more}]], tmp_path / "0.pt", FIELDS)


# ---------------------------------------------------------------------------------------------------------------------
# Who contributes what


def test_rank_0_contributes_everything_and_the_others_only_their_shards() -> None:
    first = contribute(data(log_probs=[torch.zeros(0), torch.zeros(2)]), topology(cp=2, cp_rank=0), FIELDS)
    second = contribute(data(log_probs=[torch.zeros(3), torch.zeros(4)]), topology(cp=2, cp_rank=1), FIELDS)
    assert set(first.description.columns) == {"total_lengths", "response_lengths", "tokens"}
    assert not second.description.columns
    assert (set(first.description.sharded), set(second.description.sharded)) == ({"log_probs"}, {"log_probs"})
    assert second.nbytes == 7 * 4


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"log_probs": [torch.zeros(1), torch.zeros(2)]}, "sample 0 holds 1 values; expected 0 (response length 3)"),
        ({"log_probs": [torch.zeros(0), torch.zeros(6)]}, "sample 1 holds 6 values; expected 2 (response length 6)"),
        ({"log_probs": [torch.zeros(0)]}, "must hold one tensor per sample: expected 2, found 1"),
        ({"log_probs": [torch.zeros(0), None]}, "local sample 1 must be a tensor, found NoneType"),
        ({"log_probs": [torch.zeros(0), torch.tensor(1.0)]}, "local sample 1 must have a dimension, found a single"),
        ({"log_probs": [torch.zeros(0), torch.eye(2).to_sparse()]}, "no flat memory, and context parallelism cuts"),
        ({"log_probs": [torch.zeros(0), torch.empty(2, device="meta")]}, "meta device has no data"),
    ],
)  # fmt: skip
def test_a_response_level_field_that_does_not_fit_is_left_out_with_sample_and_numbers(more: Any, reason: str) -> None:
    entropy = [torch.zeros(0), torch.zeros(2)]
    described = contribute(data(**more, teacher_log_probs=entropy), topology(cp=2), FIELDS).description
    assert reason in described.left_out["log_probs"]
    assert described.left_out.keys() == {"log_probs"}
    assert described.sharded.keys() == {"teacher_log_probs"}
    assert all(key[0] != "log_probs" for key in described.sizes)


def test_lengths_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(DumpError, match="total_lengths has 2 samples, response_lengths 1"):
        contribute(data(response_lengths=[3]), topology(cp=2), FIELDS)


def test_positions_of_other_samples_than_these_are_not_claimed(tmp_path: Path) -> None:
    found = written(tmp_path, {"partition": [0]})
    assert ["rollout_position" in sample for sample in found["samples"]] == [False, False]
    record = found["dp_shards"][0]["provenance"]
    assert record["left_out"] == {"rollout_position": "partition has 1 values for 2 samples"}
    assert record["positions"] == "unknown"


def test_a_response_level_field_that_is_no_list_of_tensors_is_an_ordinary_field(tmp_path: Path) -> None:
    found = written(tmp_path, {"log_probs": torch.ones(2, 3), "teacher_log_probs": [0.5, 1.5]})
    assert [sample["log_probs"].tolist() for sample in found["samples"]] == [[1.0] * 3] * 2
    assert [sample["teacher_log_probs"] for sample in found["samples"]] == [0.5, 1.5]


def test_a_field_that_was_not_computed_is_left_out_without_a_word() -> None:
    described = contribute(data(log_probs=None, other=None), topology(), FIELDS).description
    assert {*described.columns, *described.layout} == {"total_lengths", "response_lengths", "tokens", "other"}
    assert described.left_out == {}


def test_samples_of_one_field_may_differ_in_dtype_and_shape(tmp_path: Path) -> None:
    mixed = [torch.tensor([1.0, 2.0]).double(), torch.tensor([3.0, 4.0])]
    found = written(tmp_path, {"log_probs": mixed})
    assert [sample["log_probs"].dtype for sample in found["samples"]] == [torch.float64, torch.float32]
    assert [sample["log_probs"].tolist() for sample in found["samples"]] == [[1.0, 2.0], [3.0, 4.0]]


def test_whole_responses_on_a_context_parallel_rank_are_recognised() -> None:
    full = [torch.zeros(3), torch.zeros(6)]
    assert contribute(data(log_probs=full), topology(cp=2), FIELDS).description.sharded["log_probs"][0].full is True
    shard = [torch.zeros(0), torch.zeros(2)]
    assert contribute(data(log_probs=shard), topology(cp=2), FIELDS).description.sharded["log_probs"][0].full is False


def test_lengths_that_fit_both_readings_are_left_to_another_rank() -> None:
    one = {"total_lengths": [9], "response_lengths": [3], "log_probs": [torch.zeros(3)]}
    assert contribute(one, topology(cp=2, cp_rank=1), FIELDS).description.sharded["log_probs"][0].full is None


def test_an_empty_rank_contributes_empty_lists() -> None:
    empty: dict[str, Any] = {"total_lengths": [], "response_lengths": [], "tokens": [], "log_probs": []}
    contribution = contribute(empty, topology(cp=2), FIELDS)
    assert (contribution.description.columns, contribution.nbytes) == (empty, 0)


def test_objects_that_had_to_be_written_as_text_are_named_in_the_provenance() -> None:
    payload = payload_of([[data(metadata=[{"o": object()}, len])]], FIELDS, provenance={"a": 1})
    assert payload["dp_shards"][0]["provenance"] == {
        "a": 1,
        "converted": {"metadata": ["builtins.builtin_function_or_method", "builtins.object"]},
    }


@pytest.mark.parametrize(
    ("value", "per_sample"),
    [
        ([1, 2], True),
        ((1, 2), True),
        (torch.zeros(2, 3), True),
        (np.zeros(2), False),  # slime's rule knows lists, tuples and tensors
        ({0: 1, 1: 2}, False),
        ("ab", False),
        ([1], False),
        (torch.tensor(2), False),
    ],
)
def test_what_pairs_with_samples_is_decided_by_slimes_own_rule(value: Any, per_sample: bool) -> None:
    assert is_per_sample(value, 2) is per_sample


def test_an_array_as_long_as_the_batch_stands_where_slime_has_it(tmp_path: Path) -> None:
    found = written(tmp_path, {"x": np.arange(2)})
    assert "x" not in found["samples"][0]
    assert found["dp_shards"][0]["x"].tolist() == [0, 1]


@pytest.mark.parametrize("make", [list, tuple, torch.tensor, np.array], ids=["list", "tuple", "tensor", "array"])
@pytest.mark.parametrize("column", ["partition", "sample_indices"])
def test_positions_and_indices_may_come_as_any_column(column: str, make: Callable[[Any], Any], tmp_path: Path) -> None:
    found = written(tmp_path, {column: make([5, 3]), "x": ["five", "three"]})
    assert [sample["x"] for sample in found["samples"]] == ["three", "five"]
    assert [int(one) for one in found["dp_shards"][0][column]] == [5, 3]


@pytest.mark.parametrize("odd", [3, {"a": 1}, "x", object(), [object()]])
def test_odd_sample_indices_do_not_cost_the_dump(odd: Any, tmp_path: Path) -> None:
    found = written(tmp_path, {"sample_indices": odd, "x": [1, 2]})
    assert [sample["x"] for sample in found["samples"]] == [1, 2]


# ---------------------------------------------------------------------------------------------------------------------
# Values

LEFT_OUT = {
    "meta": "a tensor on the meta device has no data",
    "freed": "has only 0 bytes of memory left",
    "freed conjugate": "has only 0 bytes of memory left",
    "freed sparse": "",
    "cycle": "holds itself",
    "a deque that holds itself": "holds itself",
    "depth 1000": "recursion depth",
}
"""What cannot be stored at all, or not so that it could be read safely: the field is left out, and why is said."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_of_any_kind_costs_at_most_its_own_field_and_the_file_loads_safely(kind: str, tmp_path: Path) -> None:
    make = KINDS[kind]
    fields = {"odd": make(), "nested": {"a": [1, make()]}, "per_sample": [make(), make()], "good": [torch.ones(2)] * 2}
    found = written(tmp_path, fields)
    assert [sample["good"].tolist() for sample in found["samples"]] == [[1.0, 1.0]] * 2
    lacking = left_out(found)
    if kind in LEFT_OUT:
        assert lacking.keys() == {"odd", "nested", "per_sample"}
        assert all(LEFT_OUT[kind] in reason for reason in lacking.values()), lacking
    else:
        assert lacking == {}
        assert "odd" in {*found["samples"][0], *found["dp_shards"][0]}
        assert "per_sample" in found["samples"][0]


@pytest.fixture(scope="module")
def slimes() -> Any:
    checkout = next((folder for folder in find_sources() if folder.name == "681b3adca"), None)
    if checkout is None:
        pytest.skip("no checkout of slime 681b3adca to compare with")
    return values.slimes_own(checkout)


@pytest.mark.parametrize("kind", values.askable())
def test_a_value_of_any_kind_is_the_one_that_slimes_own_file_has_in_the_same_place(
    kind: str, slimes: Any, tmp_path: Path
) -> None:
    lengths: dict[str, Any] = {"total_lengths": [4, 4], "response_lengths": [2, 2], "partition": [1, 0]}
    asked = 0
    for shape in values._PLACES:
        ranks = [[{**lengths, "odd": shape(KINDS[kind], 2)}]]
        try:
            theirs = values.by_slime(slimes, ranks)
        except Exception:
            continue  # slime's dump is lost; ours is not, as the test above shows
        asked += 1
        ours = values.by_us(ranks, tmp_path / "0.pt", FIELDS)
        assert kind in LEFT_OUT or left_out(ours) == {}
        values.difference(ours, theirs, FIELDS)
    can_ask = kind not in {
        "loud subclass",
        "generator",
        "lock",
        "lambda",
        "module",
        "memoryview",
        "depth 1000",
        "freed",
        "meta",
    }
    assert asked or not can_ask


def test_a_difference_is_seen(slimes: Any, tmp_path: Path) -> None:
    """The comparison with slime's file can fail: each of these changes is found."""
    ranks = [[{"total_lengths": [4], "response_lengths": [2], "x": [torch.ones(2)], "m": {"a": [1, "b", len]}}]]

    def both() -> tuple[Any, Any]:
        return values.by_us(ranks, tmp_path / "0.pt", FIELDS), values.by_slime(slimes, ranks)

    values.difference(*both(), FIELDS)
    changes: list[Callable[[Any], Any]] = [
        lambda ours: ours["samples"][0].update(x=torch.tensor([1.0, 2.0])),
        lambda ours: ours["samples"][0].update(x=torch.ones(2).double()),
        lambda ours: ours["samples"][0].pop("x"),
        lambda ours: ours["samples"][0].update(more=1),
        lambda ours: ours["dp_shards"][0].update(x=1),
        lambda ours: ours["dp_shards"][0]["m"].update(a=[True, "b", "<built-in function len>"]),
        lambda ours: ours["dp_shards"][0]["m"].update(a=(1, "b", "<built-in function len>")),
        lambda ours: ours["dp_shards"][0]["provenance"].pop("converted"),
        lambda ours: ours["samples"].clear(),
    ]
    for change in changes:
        ours, theirs = both()
        change(ours)
        with pytest.raises((values.Differs, ValueError)):
            values.difference(ours, theirs, FIELDS)


@pytest.mark.parametrize("seed", range(25))
def test_any_nesting_on_any_layout_is_as_in_slimes_own_file(seed: int, slimes: Any, tmp_path: Path) -> None:
    values.look(random.Random(seed).randrange(10**9), slimes, tmp_path / "0.pt", values.askable())


def test_different_keys_stay_different_whatever_their_order(tmp_path: Path) -> None:
    for name in ("keys that look alike", "keys that look alike, turned", "a date as key", "objects as keys"):
        given = KINDS[name]()
        found = written(tmp_path, {"x": given})["dp_shards"][0]["x"]
        assert list(found.values()) == list(given.values())
        plain = {key: value for key, value in given.items() if type(key) in (int, str)}
        assert plain.items() <= found.items()


class Hostile:
    """A key of rollout_data whose every method raises."""

    def __hash__(self) -> int:
        return 12345

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("__eq__")

    def __str__(self) -> str:
        raise RuntimeError("__str__")

    __repr__ = __str__


@pytest.mark.parametrize("key", [Hostile(), None, 3, ("a", 1), torch.float32, values.Status.DONE, values.Text("t")])
def test_a_field_may_have_any_name(key: Any, tmp_path: Path) -> None:
    found = written(tmp_path, {key: [1, 2], "x": [1, 2]})
    assert len(found["samples"][0]) == 5
    assert [sample["x"] for sample in found["samples"]] == [1, 2]


class Falling(list):  # type: ignore[type-arg]
    """A list whose reading raises."""

    def __iter__(self) -> Any:
        raise RuntimeError("__iter__")


def test_a_list_that_cannot_be_read_costs_its_own_field(tmp_path: Path) -> None:
    for name in ("x", "log_probs", "raw_reward", "sample_indices"):
        found = written(tmp_path, {name: Falling([torch.ones(2), torch.ones(2)]), "good": [1, 2]})
        assert left_out(found).keys() == {name}
        assert [sample["good"] for sample in found["samples"]] == [1, 2]


class Longer(list):  # type: ignore[type-arg]
    """A list that says of itself that it has two items."""

    def __len__(self) -> int:
        return 2


def test_a_list_that_is_shorter_than_it_says_costs_its_own_field(tmp_path: Path) -> None:
    found = written(tmp_path, {"x": Longer([1]), "good": [1, 2]})
    assert left_out(found).keys() == {"x"}
    assert [sample["good"] for sample in found["samples"]] == [1, 2]


def test_a_name_of_ours_in_rollout_data_is_said_to_be_missing(tmp_path: Path) -> None:
    assert left_out(written(tmp_path, {"provenance": "theirs"})).keys() == {"provenance"}


def test_an_expanded_view_costs_its_memory_and_not_its_shape(tmp_path: Path) -> None:
    found = written(tmp_path, {"x": torch.zeros(1).expand(10**12), "y": torch.ones(1).expand(10**9)})
    assert found["dp_shards"][0]["x"].shape == (10**12,)
    assert found["dp_shards"][0]["y"].shape == (10**9,)
    assert (tmp_path / "0.pt").stat().st_size < 20_000


def test_a_tensor_that_many_samples_share_is_written_once(tmp_path: Path) -> None:
    """As slime writes it: siblings of one prompt share their images."""
    image = torch.rand(10_000)
    found = written(tmp_path, {"images": [{"pixels": image, "again": [image]} for _ in range(50)]}, count=50)
    assert all(torch.equal(sample["images"]["again"][0], image) for sample in found["samples"])
    assert (tmp_path / "0.pt").stat().st_size < 3 * image.numel() * 4


def test_a_small_view_of_a_large_tensor_is_written_small(tmp_path: Path) -> None:
    large = torch.zeros(1_000_000)
    written(tmp_path, {"x": [large[10:13], large[:2]], "log_probs": [large[:2], large[5:7]]})
    assert (tmp_path / "0.pt").stat().st_size < 10_000


def test_the_trainers_own_values_are_left_as_they_are(tmp_path: Path) -> None:
    weights = torch.ones(2, requires_grad=True)
    array = np.arange(2.0)
    array.flags.writeable = False
    given = {"x": [weights * 2, weights], "y": {"a": [array]}, "log_probs": [torch.ones(2), torch.zeros(2)]}
    before = {key: id(value) for key, value in given.items()}
    written(tmp_path, given)
    assert {key: id(value) for key, value in given.items()} == before
    assert given["x"][0].requires_grad
    assert given["y"]["a"][0] is array


@pytest.mark.parametrize("kind", ["a shared nest", "a shared nest of dicts", "a shared nest of arrays"])
def test_a_nest_with_more_paths_than_anybody_can_walk_takes_no_time(kind: str, tmp_path: Path) -> None:
    began = time.monotonic()
    assert left_out(written(tmp_path, {"x": KINDS[kind]()})) == {}
    assert time.monotonic() - began < 5.0


def test_values_that_end_a_process_when_touched_do_not_end_it(tmp_path: Path) -> None:
    """In a process of its own: what is wrong here shows as SIGSEGV."""
    script = textwrap.dedent(
        """
        import sys, warnings
        from pathlib import Path
        warnings.simplefilter("ignore")
        from tests.fuzz import values
        from slime_instrument._dump.payload import left_out
        names = ("quantized", "quantized by channel", "freed", "freed conjugate", "freed sparse", "meta")
        data = {"total_lengths": [2], "response_lengths": [1], **{name: values.KINDS[name]() for name in names}}
        data["log_probs"] = [values.KINDS["freed conjugate"]()]
        sys.setrecursionlimit(10**6)
        data["deep"] = values._deep(40_000)
        found = values.by_us([[data]], Path(sys.argv[1]), ("log_probs",))
        print(sorted(left_out(found)))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "0.pt")],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['deep', 'freed', 'freed conjugate', 'freed sparse', 'log_probs', 'meta']"


def test_an_empty_tensor_before_those_of_another_dtype_does_not_mix_their_bytes(tmp_path: Path) -> None:
    fields = {"none": torch.empty(0, dtype=torch.float64), "whole": torch.arange(4), "real": torch.ones(4).double()}
    found = written(tmp_path, fields)["dp_shards"][0]
    assert found["whole"].tolist() == [0, 1, 2, 3]
    assert found["real"].tolist() == [1.0] * 4


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python's own calls take the machine's stack there")
def test_a_nest_on_a_thread_with_a_small_stack_does_not_end_the_process() -> None:
    script = textwrap.dedent(
        """
        import threading
        from slime_instrument._dump.contribute import contribute, deeper
        from slime_instrument._dump.payload import put_together
        from slime_instrument._dump.payload import build_payload
        from tests.dump.ranks import topology
        from tests.fuzz.values import _deep

        def dump():
            data = {"total_lengths": [2], "response_lengths": [1], "deep": _deep(900)}
            with deeper():
                parts = put_together([contribute(data, topology(1, 0, 1, 0), ())], 1, ())
                found = build_payload(parts, rollout_id=0, writer_rank=0)
            print("deep" in found["samples"][0])

        dump()  # imports take stack of their own
        threading.stack_size(128 * 1024)
        thread = threading.Thread(target=dump)
        thread.start()
        thread.join()
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"]


def test_a_read_only_array_gives_no_warning_and_a_copy(tmp_path: Path) -> None:
    array = np.arange(3.0)
    array.flags.writeable = False
    assert written(tmp_path, {"x": array})["dp_shards"][0]["x"].tolist() == [0.0, 1.0, 2.0]


def test_images_may_be_mixed_with_samples_without_any_and_ragged_lists_are_kept(tmp_path: Path) -> None:
    fields = {
        "multimodal_train_inputs": [None, {"pixel_values": torch.ones(4, 1176)}],
        "rollout_top_p_token_ids": [torch.arange(5), torch.arange(0)],
        "rollout_top_p_token_offsets": [torch.tensor([0, 2, 2, 5]), torch.tensor([0])],
    }
    first, second = written(tmp_path, fields)["samples"]
    assert first["multimodal_train_inputs"] is None
    assert second["multimodal_train_inputs"]["pixel_values"].shape == (4, 1176)
    assert first["rollout_top_p_token_ids"].tolist() == [0, 1, 2, 3, 4]
    assert first["rollout_top_p_token_offsets"].tolist() == [0, 2, 2, 5]


# ---------------------------------------------------------------------------------------------------------------------
# Pieces: what packing does on a device, counted on torch's meta device, where each operation is seen and none is done

META = torch.device("meta")
_VIEWS = {"detach", "view", "split", "slice", "alias", "_reshape_alias", "unsafe_split", "split_with_sizes", "narrow"}
_VIEWS |= {"empty", "_to_copy"}  # the copy to the CPU is one per piece, counted by pieces


class Operations(TorchDispatchMode):
    """Device operations that start a kernel, and the largest tensor that one of them made, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []
        self.made: list[int] = [0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "_to_copy":
            return torch.empty(args[0].shape, dtype=args[0].dtype, device="cpu")
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in _VIEWS:
            self.kernels.append(name)
        if name in ("cat", "empty", "clone") and isinstance(result, torch.Tensor):
            self.made.append(result.numel() * result.itemsize)
        return result


def on_device(tensors: list[torch.Tensor]) -> Any:
    """A contribution of ``tensors`` as if a device had them."""
    from slime_instrument._dump.contribute import Contribution, Description

    streams: dict[Any, list[torch.Tensor]] = {}
    for index, tensor in enumerate(tensors):
        streams.setdefault((f"field{index % 3}", tensor.dtype, ()), []).append(tensor)
    described = Description(0, 0, 0, [], [], None)
    described.sizes = {key: sum(one.numel() for one in held) for key, held in streams.items()}
    return Contribution(described, streams)


@pytest.mark.parametrize("samples", [4, 64])
def test_operations_grow_with_pieces_and_not_with_samples(samples: int) -> None:
    contribution = on_device([torch.empty(4096 // samples, device=META) for _ in range(3 * samples)])
    with Operations() as seen:
        pieces = list(contribution.pieces(4096))
    assert len(pieces) == contribution.nbytes // 4096 == 12
    assert len(seen.kernels) <= len(pieces)


def test_device_memory_stays_within_the_bucket() -> None:
    contribution = on_device([torch.empty(333, device=META) for _ in range(200)])
    with Operations() as seen:
        sent = sum(piece.numel() for piece in contribution.pieces(10_000))
    assert sent == contribution.nbytes
    assert 0 < max(seen.made) <= 10_000


def test_a_tensor_larger_than_the_bucket_is_cut_and_not_copied_whole() -> None:
    contribution = on_device([torch.empty(1 << 20, device=META)])
    with Operations() as seen:
        assert sum(piece.numel() for piece in contribution.pieces(4096)) == 4 << 20
    assert max(seen.made) <= 4096


@pytest.mark.parametrize("bucket", [1, 7, 64, 1 << 20])
def test_nothing_is_copied_before_it_travels_and_pieces_hold_each_byte_once(bucket: int) -> None:
    tensors = [torch.rand(300_000), torch.rand(5), torch.rand(5).double(), torch.rand(2, 3).t()]
    given = data(x=tensors[:2], y=tensors[2:], log_probs=[torch.rand(3), torch.rand(6)])
    contribution = contribute(given, topology(), FIELDS)
    queued = [one for held in contribution.streams.values() for one in held]
    assert {one.untyped_storage().data_ptr() for one in tensors} <= {one.untyped_storage().data_ptr() for one in queued}
    if bucket >= 64:
        assert sum(piece.numel() for piece in contribution.pieces(bucket)) == contribution.nbytes
    (part,) = put_together([contribution], 1, FIELDS)
    assert torch.equal(part.fields["log_probs"][1], given["log_probs"][1])


def test_capture_is_one_operation_per_micro_batch_whatever_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    # It takes off the modes of others, and with them the one that counts here.
    monkeypatch.setattr("slime_instrument._dump.contribute.undisturbed", contextlib.nullcontext)
    for samples in (1, 16, 256):
        session = CaptureSession(0, {"partition": list(range(samples)), "response_lengths": [8] * samples})
        log_probs = [torch.empty(8, device=META) for _ in range(samples)]
        with Operations() as seen:
            session.capture(list(range(samples)), log_probs)
        assert seen.kernels == ["cat"]
