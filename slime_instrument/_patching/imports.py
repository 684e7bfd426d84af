"""Run something once a module has been imported, now or later, without ever failing that import.

wrapt's post-import hooks do the work. Two things are added: a hook for a module that is half imported waits for the
end of its import, and a hook can be cancelled.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import wrapt

from slime_instrument._errors import not_ours, traceback_text
from slime_instrument._log import log


class ImportWatch:
    """A registered wish; ``cancel()`` makes it inert. Each wish fires at most once."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self.name = name
        self._action: Callable[[ModuleType], None] | None = action

    def cancel(self) -> None:
        self._action = None

    def fire(self, module: ModuleType) -> None:
        """Run the action. An exception here would make the target's import fail once, so none leaves."""
        action, self._action = self._action, None
        if action is None:
            return
        try:
            action(module)
        except Exception as error:
            if not_ours(error):
                raise
            text = traceback_text(error)
            log(logging.ERROR, "slime_instrument: a hook for %s failed; the import goes on\n%s", self.name, text)


class _WatchedSpec(ModuleSpec):
    """A module spec that tells when its import has ended.

    The import system clears ``_initializing`` as its last step, on success and on failure. A hook registered while
    the module is half imported has nothing else to wait for.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            watches = self.__dict__.pop("_slime_instrument_watches", [])
            self.__class__ = ModuleSpec  # type: ignore[assignment]  # back to what it was
            module = sys.modules.get(self.name)
            for watch in watches:
                if module is not None:
                    watch.fire(module)
                else:  # that import failed; wait for the next one
                    wrapt.register_post_import_hook(watch.fire, watch.name)


def on_import(name: str, action: Callable[[ModuleType], None]) -> ImportWatch:
    """Call ``action(module)`` once ``name`` is imported: at once if it is, at the end if it is being imported."""
    watch = ImportWatch(name, action)
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is not None and getattr(spec, "_initializing", False) and type(spec) in (ModuleSpec, _WatchedSpec):
        if type(spec) is ModuleSpec:
            spec.__class__ = _WatchedSpec
        spec.__dict__.setdefault("_slime_instrument_watches", []).append(watch)
    else:
        wrapt.register_post_import_hook(watch.fire, name)
    return watch
