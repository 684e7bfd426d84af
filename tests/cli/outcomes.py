"""What the tests of several commands share."""

from __future__ import annotations

import json
from typing import Any

PATCH = {"target": "slime.utils.data.process_rollout_data", "state": "ACTIVE", "reason": "", "calls": 2}


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)
