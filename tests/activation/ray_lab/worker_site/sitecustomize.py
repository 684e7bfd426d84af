"""Makes each Ray worker of ``job.py`` a CPU stand-in for a GPU node: found through the PYTHONPATH of its workers.

Imports nothing of the package under test before slime is imported, so that only the route under test arms.
"""

import os
import sys


class _BeforeSlime:
    """Finds nothing; prepares torch before slime's modules see it."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "slime":
            sys.meta_path.remove(self)
            _prepare()


def _prepare():
    import torch

    torch.set_num_threads(1)
    import wrapt

    from slime_instrument.lab import _cpu

    _cpu.install()
    if os.environ["LAB_REAL"]:
        from slime_instrument.lab import _sglang

        _sglang.install()
    wrapt.register_post_import_hook(_after_actor, "slime.backends.megatron_utils.actor")


def _after_actor(module):
    import gc
    import types

    from slime_instrument.lab import _cpu

    _cpu.after_megatron_import()
    if os.environ["LAB_REAL"]:
        from slime_instrument.lab import _releases

        _releases.after_import()
        module.AutoConfig.from_pretrained = staticmethod(lambda *_, **__: types.SimpleNamespace(vocab_size=64))
        module.AutoTokenizer.from_pretrained = staticmethod(lambda *_, **__: None)
    gc.collect()
    gc.freeze()


def _log_to_file():
    import logging

    handler = logging.FileHandler(os.path.join(os.environ["LAB_LOGS"], f"{os.getpid()}.log"))
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger = logging.getLogger("slime_instrument")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


if os.environ.get("LAB_LOGS") and "default_worker.py" in " ".join(getattr(sys, "orig_argv", [])):
    sys.meta_path.insert(0, _BeforeSlime())
    _log_to_file()
