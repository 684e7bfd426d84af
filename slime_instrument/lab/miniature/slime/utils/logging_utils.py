"""Where metrics go. Called through the module, so that a tracker can be put in its place."""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

logger = logging.getLogger(__name__)


def log(args: Namespace, metrics: dict[str, Any], step_key: str) -> None:
    logger.info("%s %s: %s", step_key, metrics[step_key], metrics)
