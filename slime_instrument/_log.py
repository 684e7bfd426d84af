"""The one way to the log, for everything that runs inside somebody's training. Standard library only.

Handlers and filters of a logger are the user's code. One that raises must not end the training that it logs for.
"""

from __future__ import annotations

import logging

from slime_instrument._errors import not_ours

_logger = logging.getLogger("slime_instrument")


def log(level: int, message: str, *arguments: object) -> None:
    """Log ``message % arguments`` at ``level``. What a handler, filter or formatter of the user's raises stays here."""
    try:
        _logger.log(level, message, *arguments)
    except Exception as error:
        if not_ours(error):
            raise
