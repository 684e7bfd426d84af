"""Arms slime_instrument from PYTHONPATH, for images where nothing can be installed in site-packages.

    export PYTHONPATH=<this folder>:<folder that holds the slime_instrument package>:$PYTHONPATH
    export SLIME_INSTRUMENT=1

Python imports the first ``sitecustomize`` on its path and no other. This one therefore runs the next one too, whether
armed or not: yours keeps working. Nothing of slime_instrument is imported while the variable is off.
"""

import os
import sys


def _run_next_sitecustomize():
    """Hand over to the ``sitecustomize`` that Python would have found without this folder, if there is one."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))
    path = [os.path.abspath(entry or os.curdir) for entry in sys.path]
    # Only what comes later: two copies of this folder on the path must not call each other for ever.
    further = path[path.index(here) + 1 :] if here in path else []
    spec = PathFinder.find_spec("sitecustomize", [entry for entry in further if entry != here])
    # Without a loader it is a folder that merely has the name.
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    # Under its own name, so that whoever imports sitecustomize later gets theirs.
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _arm():
    if os.environ.get("SLIME_INSTRUMENT", "").strip().lower() in ("", "0", "false", "no", "off"):
        return
    try:
        from slime_instrument._activation.boot import boot
    except Exception:
        # The package is not on the path, or broken: the interpreter must start all the same.
        return
    boot("sitecustomize on PYTHONPATH")


_arm()
# Last, and unguarded: an error in your own sitecustomize is reported by Python as it always was.
_run_next_sitecustomize()
