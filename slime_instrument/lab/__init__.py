"""Trains real slime, or the bundled miniature, on this machine's CPU: one forked gloo process per rank.

Nothing heavy is imported here: the training itself runs in an interpreter of its own (``lab._worker``), because putting
the CPU in the place of CUDA changes torch for the whole process.
"""

from slime_instrument.lab._logprobs import rollout_log_probs_from
from slime_instrument.lab._options import LabError, LabOptions, LabResult
from slime_instrument.lab._sources import default_source, find_sources, source_version
from slime_instrument.lab._training import train, train_all

__all__ = [
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
