"""Arming before anything heavy is imported. Standard library only: the ``.pth`` calls this at interpreter start.

Nothing of slime, torch or wrapt is loaded here: ``_switch`` arms just before the first import of slime.
"""

from __future__ import annotations

import os
import sys

from slime_instrument._switch import ROUTE_VARIABLE, is_on, wait_or_arm, watch

IMPORT_ROUTE = "import slime_instrument"


def boot(how: str) -> None:
    """What the ``.pth``, the ``.start`` file and ``sitecustomize`` call. Arms if ``SLIME_INSTRUMENT`` says so."""
    if is_on():
        _arm_as(how)


def worker_process_setup_hook() -> None:
    """For Ray's option of that name: arms each worker of a job, unless ``SLIME_INSTRUMENT=0``.

    For nodes where the package can be imported and is not installed, so that no ``.pth`` is there. Never raises: a
    hook that does kills the worker.
    """
    if is_on() is not False:
        _arm_as("worker_process_setup_hook")


def _arm_as(how: str) -> None:
    how = os.environ.get(ROUTE_VARIABLE, how)
    waits = watch()
    if waits is not None and waits.route == IMPORT_ROUTE:
        # Calling this function imported the package, which waits by itself; what called is the true route.
        waits.route = how
    else:
        wait_or_arm(how, _arm)


def arm_on_import() -> None:
    """What ``import slime_instrument`` does: arms unless switched off, and not by itself under pytest."""
    switch = is_on()
    if switch is False or (switch is None and _under_pytest()):
        return
    wait_or_arm(os.environ.get(ROUTE_VARIABLE, IMPORT_ROUTE), _arm)


def _arm(how: str) -> None:
    """Arm now. Nothing may leave: this runs inside somebody's import of slime."""
    try:
        from slime_instrument._runtime import arm_quietly

        arm_quietly(how)
    except Exception as error:
        import logging

        from slime_instrument._errors import InstrumentError, log, not_ours, traceback_text

        if not_ours(error):
            raise
        text = str(error) if isinstance(error, InstrumentError) else traceback_text(error)
        log(logging.ERROR, "slime_instrument: could not arm; training goes on without instrumentation\n%s", text)


def _under_pytest() -> bool:
    # The variable alone is inherited by everything that a test starts; the module alone may be a library's import.
    return "PYTEST_VERSION" in os.environ and "_pytest.config" in sys.modules
