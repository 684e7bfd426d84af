"""The pytest plugin: one option and three fixtures, for people who test their own slime plug-ins.

pytest imports this module in every session of an environment where the package is installed. So it imports nothing
of ours, or heavy, until an option or a fixture asks for it; and importing the package does not arm under pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from slime_instrument._patching.patch import Status
    from slime_instrument.lab import LabResult

OPTION_ROUTE = "pytest --slime-instrument"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("slime_instrument").addoption(
        "--slime-instrument",
        action="store_true",
        default=False,
        help="arm slime_instrument for the whole session, before any conftest imports slime",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    if early_config.known_args_namespace.slime_instrument:
        from slime_instrument import _runtime as runtime

        runtime.instrument(OPTION_ROUTE)
        early_config.add_cleanup(runtime.uninstrument)


def pytest_report_header(config: pytest.Config) -> str | None:
    if not config.getoption("--slime-instrument"):
        return None
    from slime_instrument import _runtime as runtime

    return f"slime_instrument: armed by {runtime.status().route} for the whole session"


@pytest.fixture
def slime_instrumented() -> Iterator[Callable[[], Status]]:
    """slime is patched during this test, and as it was before after it, also when the test fails.

    The value is a function that returns the status so far: ``slime_instrumented()["train-actor"].calls``.
    """
    from slime_instrument import _runtime as runtime

    with runtime.instrumented("pytest fixture slime_instrumented"):
        yield runtime.status


@pytest.fixture(scope="session")
def train_slime_miniature(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LabResult]:
    """A function that trains the bundled miniature of slime on CPU processes and returns what was written.

    Its arguments are those of :class:`slime_instrument.lab.LabOptions`, ``out`` excepted: sizes ``tp``, ``pp``, ``cp``,
    ``dp``; ``rollouts``; ``steps``; ``instrumented``; ``overrides`` of slime arguments; ``plugin``, a Python file that
    is executed before slime is imported. The test is skipped where megatron-core is not installed.
    """
    import importlib.util

    if importlib.util.find_spec("megatron") is None:
        pytest.skip("training the miniature needs megatron-core: install slime-instrument[lab]")

    def train(**options: Any) -> LabResult:
        from slime_instrument import lab

        return lab.train(lab.LabOptions(out=tmp_path_factory.mktemp("slime_miniature"), **options))

    return train


@pytest.fixture(scope="session")
def slime_train_dumps(train_slime_miniature: Callable[..., LabResult]) -> list[Path]:
    """Train dumps of one rollout of the miniature, trained once per session with two data-parallel and two
    context-parallel ranks: one v2 file. Do not change the files."""
    return list(train_slime_miniature(dp=2, cp=2).train_dumps)
