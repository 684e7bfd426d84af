"""The pytest plugin, as other projects meet it: an installed entry point in a session of their own."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

IS_WRAPPED = """
    import slime.backends.megatron_utils.actor as actor

    def is_wrapped():
        return hasattr(actor.MegatronTrainRayActor.train_actor, "__wrapped__")
"""


@pytest.fixture
def session(pytester: pytest.Pytester, installed: Any, fake_slime: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs pytest of the environment with the wheel, on files of the test's own, in a process of its own."""
    for name in ("SLIME_INSTRUMENT", "PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", f"{fake_slime}:{pytester.path}")
    pytester.makepyfile(looking=IS_WRAPPED)

    def run(*arguments: str, **files: str) -> pytest.RunResult:
        pytester.makepyfile(**files)
        return pytester.run(installed.python, "-m", "pytest", "-p", "no:cacheprovider", *arguments)

    return run


def test_without_asking_nothing_is_armed_and_nothing_of_ours_is_loaded(session: Any) -> None:
    result = session(
        test_it="""
        import sys
        import looking

        def test_slime_is_as_it_is():
            assert not looking.is_wrapped()
            assert sorted(name for name in sys.modules if name.startswith("slime_instrument")) == [
                "slime_instrument", "slime_instrument._activation", "slime_instrument._activation.boot",
                "slime_instrument._activation.pytest_plugin", "slime_instrument._switch",
            ]
            assert not {"torch", "wrapt"} & set(sys.modules)
        """
    )
    result.assert_outcomes(passed=1)
    assert "slime_instrument: armed" not in result.stdout.str()


def test_importing_the_package_in_a_test_does_not_arm(session: Any) -> None:
    result = session(
        test_it="""
        import slime_instrument
        import looking

        def test_slime_is_as_it_is():
            assert not looking.is_wrapped()
            assert not slime_instrument.status().armed
        """
    )
    result.assert_outcomes(passed=1)


def test_the_variable_arms_a_session_from_outside(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_INSTRUMENT", "1")
    session(test_it="import looking\ndef test_armed(): assert looking.is_wrapped()").assert_outcomes(passed=1)


def test_the_fixture_patches_one_test_and_restores_after_it(session: Any) -> None:
    result = session(
        test_it="""
        import looking
        from slime.backends.megatron_utils.actor import MegatronTrainRayActor
        from slime.backends.megatron_utils.loss import policy_loss_function

        BEFORE = dict(vars(MegatronTrainRayActor))

        def test_before():
            assert not looking.is_wrapped()

        def test_within(slime_instrumented):
            assert looking.is_wrapped()
            from types import SimpleNamespace
            actor = MegatronTrainRayActor()
            actor.init(SimpleNamespace(save_debug_train_data=None), "actor")
            assert actor.train_actor(0, {}) == 6
            status = slime_instrumented()
            assert status.route == "pytest fixture slime_instrumented"
            assert status["train-actor"].calls == status["micro-batches"].calls == 1

        def test_after():
            assert not looking.is_wrapped()
            assert dict(vars(MegatronTrainRayActor)) == BEFORE
        """
    )
    result.assert_outcomes(passed=3)


def test_the_fixture_restores_after_a_test_that_fails_or_errors(session: Any) -> None:
    result = session(
        test_it="""
        import looking, pytest

        def test_fails(slime_instrumented):
            assert looking.is_wrapped()
            assert False

        def test_after_a_failure():
            assert not looking.is_wrapped()

        @pytest.fixture
        def broken(slime_instrumented):
            raise RuntimeError("in set-up")

        def test_errors(broken):
            pass

        def test_after_an_error():
            assert not looking.is_wrapped()
        """
    )
    result.assert_outcomes(passed=2, failed=1, errors=1)


def test_the_fixture_is_before_the_first_import_of_slime_too(session: Any) -> None:
    result = session(
        test_it="""
        import sys

        def test_within(slime_instrumented):
            assert "slime" not in sys.modules
            import looking
            assert looking.is_wrapped()

        def test_after():
            import looking
            assert not looking.is_wrapped()
        """
    )
    result.assert_outcomes(passed=2)


def test_the_option_arms_a_whole_session_before_any_conftest(session: Any) -> None:
    result = session(
        "--slime-instrument",
        conftest="""
        import looking
        assert looking.is_wrapped()
        """,
        test_it="""
        import looking, slime_instrument

        def test_one(slime_instrumented):
            assert looking.is_wrapped()

        def test_the_fixture_took_nothing_away():
            assert looking.is_wrapped()
            assert slime_instrument.status().route == "pytest --slime-instrument"
        """,
    )
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["slime_instrument: armed by pytest --slime-instrument for the whole session"])


def test_the_option_refuses_a_bad_setting_by_name(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_INSTRUMENT_EVERY", "never")
    result = session("--slime-instrument", test_it="def test_nothing(): pass")
    assert result.ret != 0
    assert "SLIME_INSTRUMENT_EVERY: expected a whole number above 0, found 'never'" in (
        result.stdout.str() + result.stderr.str()
    )


@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="pytest-xdist is not installed")
def test_the_option_reaches_the_workers_of_xdist(session: Any) -> None:
    result = session(
        "--slime-instrument", "-n", "1", test_it="import looking\ndef test_armed(): assert looking.is_wrapped()"
    )
    result.assert_outcomes(passed=1)


@pytest.mark.lab
def test_the_dumps_fixture_trains_the_miniature_once_and_a_plug_in_of_the_users_runs_in_training(session: Any) -> None:
    result = session(
        test_it="""
        import torch

        def test_dumps(slime_train_dumps):
            (path,) = slime_train_dumps
            dump = torch.load(path, weights_only=True)
            assert dump["format_version"] == 2
            assert [sample["rollout_position"] for sample in dump["samples"]] == list(range(8))
            assert all(sample["log_probs"].shape == (sample["response_lengths"],) for sample in dump["samples"])
            provenance = dump["dp_shards"][0]["provenance"]
            assert (provenance["data_parallel"], provenance["context_parallel"]) == (2, 2)

        def test_again(slime_train_dumps, request):
            assert len(list(slime_train_dumps[0].parents[2].glob("slime_miniature[0-9]*"))) == 1, "trained once"

        def test_my_plug_in(train_slime_miniature, tmp_path):
            plugin = tmp_path / "plugin.py"
            plugin.write_text("import os\\nopen(os.environ['PROOF'], 'w').write('ran')\\n")
            result = train_slime_miniature(plugin=plugin, environment={"PROOF": str(tmp_path / "proof")})
            assert (tmp_path / "proof").read_text() == "ran"
            assert result.target == "miniature"
            assert {patch["name"]: patch["calls"] for patch in result.patches}["train-dump"] == 1
        """
    )
    result.assert_outcomes(passed=3)


def test_the_plugin_module_imports_nothing_of_ours_but_the_package(installed: Any) -> None:
    code = """
        import os, sys, pytest, _pytest.config
        os.environ["PYTEST_VERSION"] = pytest.__version__
        before = set(sys.modules)
        import slime_instrument._activation.pytest_plugin
        answer = sorted(set(sys.modules) - before)
    """
    assert installed.answer(code) == [
        "slime_instrument",
        "slime_instrument._activation",
        "slime_instrument._activation.boot",
        "slime_instrument._activation.pytest_plugin",
        "slime_instrument._switch",
    ]
