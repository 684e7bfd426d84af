"""What travels from rollout to training."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

RolloutBatch = dict[str, Any]


@dataclass
class Sample:
    """One generated response with everything that training needs to know about it."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {**values, "status": self.status.value}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Sample:
        known = {entry.name for entry in fields(cls)}
        kept = {name: value for name, value in values.items() if name in known}
        return cls(**{**kept, "status": cls.Status(kept["status"])})

    def get_reward_value(self, args: Any) -> Any:
        if args.reward_key and isinstance(self.reward, dict):
            return self.reward[args.reward_key]
        return self.reward
