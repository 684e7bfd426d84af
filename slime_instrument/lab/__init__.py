"""Trains real slime, or the bundled miniature, on this machine's CPU: one forked gloo process per rank.

For tests of code that works on slime's dumps or is called by slime, and for the demonstration. Needs the
extra ``slime-instrument[lab]``. What is not named here is internal.

Nothing heavy is imported here, and nothing is armed or patched in the calling process: putting the CPU in the place of
CUDA changes torch for the whole process, so training runs in processes of its own.
"""

from slime_instrument.lab._extras import EXTRAS
from slime_instrument.lab._faults import FAULTS
from slime_instrument.lab._logprobs import rollout_log_probs_from
from slime_instrument.lab._options import LabError, LabOptions, LabResult
from slime_instrument.lab._samples import EDGE_KINDS
from slime_instrument.lab._sources import default_source, find_sources, source_version
from slime_instrument.lab._training import train, train_all

__all__ = [
    "EDGE_KINDS",
    "EXTRAS",
    "FAULTS",
    "LabError",
    "LabOptions",
    "LabResult",
    "default_source",
    "find_sources",
    "rollout_log_probs_from",
    "source_version",
    "train",
    "train_all",
]
