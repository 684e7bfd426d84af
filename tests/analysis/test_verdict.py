"""Green means green: each kind of wrong input has its name or a verdict that is not ok, and clean ones have neither."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_instrument._analysis.compare import Comparison, compare
from slime_instrument._analysis.groups import MORE_THAN_KERNELS
from slime_instrument._analysis.trend import step_in
from slime_instrument._cli.app import main
from slime_instrument._dump.zigzag import owned
from slime_instrument._format.dumps import rollout_dump_of, train_dump_of
from slime_instrument._validate import validate_v2

Edit = Callable[[dict[str, Any], dict[str, Any]], Any]


def nothing(_rollout: dict[str, Any], _train: dict[str, Any]) -> None:
    """Leaves a sample as it is."""


def dumps(edit: Edit, *, n: int = 8, length: int = 40, noise: float = 0.01) -> tuple[dict[str, Any], dict[str, Any]]:
    """A rollout dump and its train dump; ``edit`` changes each sample."""
    random = torch.Generator().manual_seed(n * length)
    sources, samples = [], []
    for i in range(n):
        ids = torch.randint(9, 999, (5 + length,), generator=random)
        values = -torch.rand(length, generator=random) * 2 - 0.01
        source: dict[str, Any] = {
            "index": i, "tokens": ids.tolist(), "response_length": length, "rollout_log_probs": values.tolist(),
            "loss_mask": [1] * length, "reward": 0.0, "remove_sample": False,
        }  # fmt: skip
        sample: dict[str, Any] = {
            "data_parallel_rank": 0, "rollout_position": i, "sample_index": i, "tokens": ids,
            "total_lengths": 5 + length, "response_lengths": length, "rollout_log_probs": values,
            "loss_masks": torch.ones(length, dtype=torch.int32),
            "log_probs": values + torch.randn(length, generator=random) * noise,
        }  # fmt: skip
        edit(source, sample)
        sources.append(source)
        samples.append(sample)
    shards = [{"rank": 0, "data_parallel_rank": 0}]
    train = {"format_version": 2, "rollout_id": 0, "rank": 0, "samples": samples, "raw_reward": [0.0] * n}
    return {"rollout_id": 0, "samples": sources}, {**train, "dp_shards": shards}


def compared(edit: Edit, **sizes: Any) -> Comparison:
    rollout, train = dumps(edit, **sizes)
    return compare(rollout_dump_of(Path("0.pt"), rollout), train_dump_of(Path("0.pt"), train))


def codes(found: Comparison) -> list[str]:
    return [one.code for one in found.findings]


def first(change: Callable[[dict[str, Any], dict[str, Any]], Any], *indices: int) -> Edit:
    """Changes the samples of these indices only."""
    return lambda source, sample: change(source, sample) if source["index"] in indices else None


def put(value: float, side: str = "rollout", at: int = 3) -> Edit:
    def edit(source: dict[str, Any], sample: dict[str, Any]) -> None:
        if side == "train":
            sample["log_probs"][at] = value
        else:
            source["rollout_log_probs"][at] = value
            sample["rollout_log_probs"] = torch.tensor(source["rollout_log_probs"])

    return edit


def test_a_clean_pair_is_ok() -> None:
    found = compared(nothing)
    assert (found.verdict.level, codes(found)) == ("ok", [])
    assert found["verdict"] == {"level": "ok", "text": found.verdict.text}


SENTINELS = (
    -999.0,
    -9999.0,
    -1e4,
    -65504.0,
    -57344.0,
    -448.0,
    -1e30,
    torch.finfo(torch.bfloat16).min,
    torch.finfo(torch.float32).min,
)


@pytest.mark.parametrize("side", ["rollout", "train"])
@pytest.mark.parametrize("value", [*SENTINELS, -math.inf, math.nan])
def test_what_stands_for_no_value_is_non_finite(value: float, side: str) -> None:
    found = compared(first(put(value, side), 0))
    assert codes(found) == ["non-finite"]
    assert found.n_tokens == 8 * 40 - 1
    assert found.verdict.level == "fault"


@pytest.mark.parametrize("value", [-1e-3, -30.0, -200.0])
def test_improbable_tokens_are_values(value: float) -> None:
    assert "non-finite" not in codes(compared(first(put(value), 0)))


def none(source: dict[str, Any], _sample: dict[str, Any]) -> None:
    source["rollout_log_probs"] = None


def short(source: dict[str, Any], _sample: dict[str, Any]) -> None:
    source["rollout_log_probs"] = source["rollout_log_probs"][:-1]


def empty(source: dict[str, Any], _sample: dict[str, Any]) -> None:
    source["rollout_log_probs"] = []


def no_train(_source: dict[str, Any], sample: dict[str, Any]) -> None:
    sample["log_probs"] = None


@pytest.mark.parametrize("edit", [none, short, empty, no_train])
def test_where_nothing_can_be_compared_nothing_is_green(edit: Edit) -> None:
    found = compared(edit)
    assert found.verdict.level == "nothing-compared"
    assert "8 samples were joined, but no token has both log-probs (320 missing)" in found.verdict.text


@pytest.mark.parametrize("edit", [none, short, empty, no_train])
def test_where_a_part_cannot_be_compared_it_is_named(edit: Edit) -> None:
    found = compared(first(edit, 1, 5))
    assert codes(found) == ["missing-log-probs"]
    assert found.findings[0].samples == (1, 5)
    assert "80 of 320 trained tokens" in found.findings[0].message


def inverted(source: dict[str, Any], sample: dict[str, Any]) -> None:
    source["loss_mask"] = [1] * 15 + [0] * 10 + [1] * 15
    sample["loss_masks"] = 1 - torch.tensor(source["loss_mask"])


def untrained(_source: dict[str, Any], sample: dict[str, Any]) -> None:
    sample["loss_masks"] = torch.zeros_like(sample["loss_masks"])


def without_first(_source: dict[str, Any], sample: dict[str, Any]) -> None:
    sample["loss_masks"][0] = 0


def mask_of_none(source: dict[str, Any], sample: dict[str, Any]) -> None:
    source["loss_mask"] = None
    without_first(source, sample)


@pytest.mark.parametrize("edit", [inverted, untrained, without_first, mask_of_none])
def test_a_train_mask_that_is_not_the_rollouts_is_named_by_both(edit: Edit) -> None:
    edit = first(edit, 1, 2)
    found = compared(edit)
    assert codes(found) == ["mask-differs"]
    assert found.findings[0].samples == (1, 2)
    rollout, train = dumps(edit)
    problems = validate_v2(Path("0.pt"), train, rollout_dump_of(Path("0.pt"), rollout))
    assert [(one.code, one.sample) for one in problems.errors] == [("mask-mismatch", 1), ("mask-mismatch", 2)]


def test_remove_sample_explains_a_mask_of_zeros() -> None:
    def removed(source: dict[str, Any], sample: dict[str, Any]) -> None:
        source["remove_sample"] = True
        untrained(source, sample)

    edit = first(removed, 1)
    assert codes(compared(edit)) == []
    rollout, train = dumps(edit)
    assert not validate_v2(Path("0.pt"), train, rollout_dump_of(Path("0.pt"), rollout)).errors


@pytest.mark.parametrize("change", [torch.zeros_like, lambda values: values + 1e-3, lambda values: values.flip(0)])
def test_trainings_own_copy_of_the_rollouts_log_probs_is_checked(change: Callable[[Any], Any]) -> None:
    def edit(_source: dict[str, Any], sample: dict[str, Any]) -> None:
        sample["rollout_log_probs"] = change(sample["rollout_log_probs"])

    found = compared(first(edit, 4))
    assert codes(found) == ["rollout-log-probs-differ"]
    assert found.findings[0].samples == (4,)
    rollout, train = dumps(edit)
    problems = validate_v2(Path("0.pt"), train, rollout_dump_of(Path("0.pt"), rollout))
    assert {one.code for one in problems.errors} == {"rollout-log-probs-differ"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_copy_in_another_type_is_the_same_within_its_rounding(dtype: torch.dtype) -> None:
    def edit(_source: dict[str, Any], sample: dict[str, Any]) -> None:
        sample["rollout_log_probs"] = sample["rollout_log_probs"].to(dtype)

    assert codes(compared(edit)) == []


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("known", [True, False])
def test_parts_joined_in_rank_order_are_named(cp: int, known: bool) -> None:
    length = 80
    order = [i for rank in range(cp) for piece in owned(5 + length, length, cp, rank) for i in piece]

    def edit(_source: dict[str, Any], sample: dict[str, Any]) -> None:
        sample["log_probs"] = sample["log_probs"][order]

    rollout, train = dumps(edit, n=16, length=length)
    if known:
        train["dp_shards"][0]["provenance"] = {"context_parallel": cp}
    found = compare(rollout_dump_of(Path("0.pt"), rollout), train_dump_of(Path("0.pt"), train))
    assert codes(found) == ["cp-boundary"]
    assert found.findings[0].evidence["context_parallel"] == cp
    assert len(found.findings[0].samples) == 16


def nll(source: dict[str, Any], sample: dict[str, Any]) -> None:
    source["rollout_log_probs"] = [-value for value in source["rollout_log_probs"]]
    sample["rollout_log_probs"] = -sample["rollout_log_probs"]


@pytest.mark.parametrize("edit", [nll, put(1.0), put(0.5, "train")])
def test_values_above_0_are_no_log_probs_and_no_temperature(edit: Edit) -> None:
    found = compared(edit)
    assert codes(found) == ["positive-log-probs"]
    rollout, train = dumps(edit)
    problems = validate_v2(Path("0.pt"), train, rollout_dump_of(Path("0.pt"), rollout))
    assert {one.code for one in problems.errors} == {"positive-log-prob"}


def shifted(by: int) -> Edit:
    def edit(_source: dict[str, Any], sample: dict[str, Any]) -> None:
        sample["log_probs"] = sample["log_probs"].roll(by)

    return edit


def reversed_values(_source: dict[str, Any], sample: dict[str, Any]) -> None:
    sample["log_probs"] = sample["log_probs"].flip(0)


def unrelated(_source: dict[str, Any], sample: dict[str, Any]) -> None:
    random = torch.Generator().manual_seed(int(sample["sample_index"]))
    sample["log_probs"] = -torch.rand(len(sample["log_probs"]), generator=random) * 2


@pytest.mark.parametrize("edit", [shifted(2), shifted(-3), reversed_values, unrelated])
def test_values_that_have_nothing_to_do_with_each_other_are_never_green(edit: Edit) -> None:
    found = compared(edit, n=16)
    assert found.verdict.level in ("unexplained", "fault")
    (finding,) = found.findings
    assert len(finding.samples) == 16


@pytest.mark.parametrize("share", [1, 3, 6])
def test_a_group_that_differs_is_named_whatever_its_share(share: int) -> None:
    def off(_source: dict[str, Any], sample: dict[str, Any]) -> None:
        random = torch.Generator().manual_seed(int(sample["sample_index"]))
        sample["log_probs"] -= torch.rand(40, generator=random) * 2

    found = compared(first(off, *range(share)), noise=0.001)
    (finding,) = found.findings
    assert finding.samples == tuple(range(share))
    assert found.verdict.level in ("unexplained", "fault")


@pytest.mark.parametrize(("noise", "level"), [(0.5 * MORE_THAN_KERNELS, "ok"), (2 * MORE_THAN_KERNELS, "unexplained")])
def test_the_line_is_what_kernels_explain(noise: float, level: str) -> None:
    def improbable(source: dict[str, Any], sample: dict[str, Any]) -> None:
        for name in ("rollout_log_probs", "log_probs"):
            sample[name] = sample[name] - 2
        source["rollout_log_probs"] = sample["rollout_log_probs"].tolist()

    found = compared(improbable, noise=noise * math.sqrt(math.pi / 2), n=32)
    assert found.verdict.level == level


def test_a_change_of_level_is_found_and_noise_is_not() -> None:
    step = step_in([0.018, 0.019, 0.018, 0.134, 0.131, 0.14])
    assert step is not None
    assert step.at == 3
    assert step.factor == pytest.approx(7.36, rel=0.02)
    random = torch.Generator().manual_seed(0)
    found = 0
    for _ in range(400):
        found += step_in((0.02 * (torch.randn(12, generator=random) * 0.2).exp()).tolist()) is not None
    assert found <= 8
    assert step_in([0.01, 0.5]) is None
    assert step_in([None, 0.0, 0.01]) is None


def status(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["compare", *arguments])
    return int(ended.value.code or 0), capsys.readouterr().out


def write(folder: Path, edit: Edit, name: str = "0", **sizes: Any) -> tuple[str, str]:
    rollout, train = dumps(edit, **sizes)
    for side, payload in (("rollout", rollout), ("train", train)):
        (folder / f"{side}_data").mkdir(parents=True, exist_ok=True)
        torch.save({**payload, "rollout_id": int(name)}, folder / f"{side}_data" / f"{name}.pt")
    return str(folder / "rollout_data" / f"{name}.pt"), str(folder / "train_data" / f"{name}.pt")


@pytest.mark.parametrize(
    ("edit", "by_gate"),
    [
        (nothing, {"fault": 0, "unexplained": 0, "nothing-compared": 0, "never": 0}),
        (unrelated, {"fault": 0, "unexplained": 1, "nothing-compared": 1, "never": 0}),
        (untrained, {"fault": 2, "unexplained": 2, "nothing-compared": 1, "never": 0}),
        (first(none, 1), {"fault": 1, "unexplained": 1, "nothing-compared": 1, "never": 0}),
        (none, {"fault": 2, "unexplained": 2, "nothing-compared": 1, "never": 0}),
    ],
)
def test_the_exit_status_is_what_the_gate_says_and_the_last_line_is_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], edit: Edit, by_gate: dict[str, int]
) -> None:
    files = write(tmp_path, edit, n=16)
    for gate, expected in by_gate.items():
        code, out = status(capsys, *files, "--fail-on", gate)
        assert code == expected, gate
        assert out.splitlines()[-1].startswith("verdict: ")
    assert status(capsys, *files)[0] == by_gate["unexplained"]


@pytest.mark.parametrize(
    ("edit", "limit", "code"),
    [
        (nothing, "abs_diff.mean>0.05", 0),
        (nothing, "ess<0.5", 0),
        (nothing, "ess<1.5", 1),
        (first(none, 1), "abs_diff.mean>9", 1),
        (none, "abs_diff.mean>9", 2),
        (put(-800.0, "train"), "token_mult_prob_error>1e300", 1),
        (put(-800.0, "train"), "token_mult_prob_error=1e300", 1),
    ],
)
def test_a_limit_passes_only_on_values_that_keep_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], edit: Edit, limit: str, code: int
) -> None:
    files = write(tmp_path, edit)
    assert status(capsys, *files, "--fail-above", limit)[0] == code
    if code == 1 and edit is not nothing:
        assert status(capsys, *files, "--fail-if", limit, "--fail-on", "never")[0] == (0 if "mean" in limit else 1)


def test_one_bad_file_is_named_and_the_others_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(3):
        write(tmp_path, nothing, str(i))
    path = tmp_path / "rollout_data" / "1.pt"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(SystemExit) as ended:
        main(["compare", str(tmp_path), str(tmp_path / "train_data"), "--json"])
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert [one["rollout_id"] for one in json.loads(printed.out)["pairs"]] == [0, 2]
    assert str(path) in printed.err


def test_verdicts_can_be_written_for_a_ci_system(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write(tmp_path, unrelated, n=16)
    xml = tmp_path / "out.xml"
    assert status(capsys, *files, "--annotations", "junit", "--annotations-file", str(xml))[0] == 1
    assert 'failures="1"' in xml.read_text()
    with pytest.raises(SystemExit):
        main(["compare", *files, "--annotations", "github"])
    assert "::error title=slime-instrument, rollout 0::unexplained" in capsys.readouterr().err
