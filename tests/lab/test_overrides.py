"""What a run is asked for and cannot do is refused before it starts; a custom function that is not used is an error."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_instrument.lab import LabError, LabOptions, train
from slime_instrument.lab._arguments import LAYOUT_ARGUMENTS
from slime_instrument.lab._preconditions import check
from tools.matrix.layouts import LAYOUTS
from tools.matrix.plan import UNEVEN, absent, cells, checkouts
from tools.matrix.recipes import RECIPES

pytestmark = pytest.mark.lab


def refusal(**options: Any) -> str:
    with pytest.raises(LabError) as caught:
        check(LabOptions(out=Path("nowhere"), **options))
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("slime_instrument: ")
    assert "Nothing was trained." in text
    return text


@pytest.mark.parametrize(
    "name",
    [
        "no_such_argument_at_all",
        "use_rollout_logprob",
        "custom_pg_loss_reducer_function_path",
        "custom_loss_function_path",
    ],
)
def test_the_miniature_refuses_what_it_does_not_read(name: str) -> None:
    text = refusal(overrides={name: "my_plug_in.function"})
    assert f"lab override {name}" in text
    assert "the bundled miniature" in text
    assert "slime=DIR" in text


@pytest.mark.parametrize("name", LAYOUT_ARGUMENTS)
def test_sizes_are_options_and_not_overrides(name: str) -> None:
    assert name in refusal(overrides={name: 2})


@pytest.mark.parametrize(
    "name",
    ["use_rollout_logprobs", "rollout_temperature", "hidden_size", "lr", "num_layers", "use_distributed_optimizer"],
)
def test_what_slime_or_megatron_reads_is_taken(name: str, tmp_path: Path) -> None:
    check(LabOptions(out=tmp_path, overrides={name: 4}))


@pytest.mark.real_slime
def test_real_slime_takes_what_it_reads_and_nothing_else() -> None:
    """Every override of the matrix, at each release that has the recipe."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    installed = Path(next(iter(spec.submodule_search_locations or []))).parent
    for release, source in checkouts().items():
        text = refusal(slime=source, core=installed, overrides={"no_such_argument_at_all": True})
        assert str(source) in text
        for cell in cells([release]):
            if absent(cell, source) is None:
                overrides = {**RECIPES[cell.recipe].overrides, **LAYOUTS[cell.layout].overrides}
                overrides |= UNEVEN if cell.samples == "uneven" else {}
                check(LabOptions(out=Path("nowhere"), slime=source, core=installed, overrides=overrides))


@pytest.mark.real_slime
@pytest.mark.parametrize("release", ["v0.2.0", "v0.2.1"])
def test_a_release_for_an_older_megatron_says_which(release: str, checkout: Callable[[str], Path]) -> None:
    text = refusal(slime=checkout(release))
    assert "expected megatron-core 0.14" in text
    assert "SLIME_OLD_CORE=DIR" in text


CUSTOM = """
    def unused(*args, **kwargs):
        raise AssertionError

    def rewards(args, samples, **kwargs):
        raw = [sample.get_reward_value(args) for sample in samples]
        return raw, [float(number) for number in range(len(raw))]
"""


@pytest.fixture
def custom(tmp_path: Path) -> str:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "my_plug_in.py").write_text(textwrap.dedent(CUSTOM))
    return str(tmp_path / "site")


@pytest.mark.real_slime
def test_a_custom_function_that_slime_never_calls_fails_the_run(
    checkout: Callable[[str], Path], tmp_path: Path, custom: str
) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(f"import sys\nsys.path.insert(0, {custom!r})\n")
    options: dict[str, Any] = {"slime": checkout("681b3adca~1"), "plugin": plugin}
    unused = LabOptions(
        out=tmp_path / "1", overrides={"custom_tis_function_path": "my_plug_in.unused"}, **options
    )  # fmt: skip
    with pytest.raises(LabError, match=r"custom_tis_function_path=my_plug_in\.unused: never called on any rank"):
        train(unused)
    missing = replace(unused, out=tmp_path / "2", overrides={"custom_tis_function_path": "nosuch.module.function"})
    with pytest.raises(LabError, match="No module named 'nosuch'"):
        train(missing)
    result = train(
        LabOptions(out=tmp_path / "3", overrides={"custom_reward_post_process_path": "my_plug_in.rewards"}, **options)
    )
    assert result.custom_calls == {"custom_reward_post_process_path": 1}


def test_nothing_but_dumps_the_log_and_what_was_asked_for_is_left(tmp_path: Path) -> None:
    train(LabOptions(out=tmp_path / "out", instrumented=False))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"lab.log", "rollout_data", "train_data"}
