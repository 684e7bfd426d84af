"""The dumps of one process: which rollouts are due, what the other ranks are told, and what was written."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_instrument._dump.agreement import Agreement, announce, default_store, withdraw
from slime_instrument._dump.background import BackgroundWriter, Report
from slime_instrument._dump.contribute import Seen, read_topology
from slime_instrument._dump.rotation import Rotation, is_due
from slime_instrument._dump.template import check_template, check_writable
from slime_instrument._errors import not_ours
from slime_instrument._live.watch import LiveMetrics
from slime_instrument._log import log
from slime_instrument._settings import Settings

# Kept over re-arming: the store still holds the decisions of dumps that were given up.
_attempts: dict[int, int] = {}


class Dumper:
    """The dump side of one armed process. ``report``: how a failure that concerns no call is dealt with."""

    def __init__(self, settings: Settings, report: Report) -> None:
        self.settings = settings
        self.rotation = Rotation(settings)
        self.background = BackgroundWriter(report)
        self.live = LiveMetrics(settings)
        self.dumps_written = 0
        self._announced_in: Any = None
        self._announced_rank = -1
        self._step_began: float | None = None

    def due(self, rollout_id: int) -> bool:
        """Whether this rollout is dumped, as far as the settings say."""
        return is_due(self.settings, rollout_id)

    def check(self, args: Any) -> None:
        """Before slime's init. Raises TrainingPathError for a path that cannot work."""
        check_template(args)

    def start(self, args: Any, lines: Sequence[tuple[str, str, str]]) -> None:
        """Megatron is up: tell the others that this rank is armed, and see that the folder takes files."""
        self._announce()
        topology = read_topology()
        if topology.is_writer:
            check_writable(check_template(args), topology.rank)
        log(logging.INFO, "slime_instrument: one train dump per rollout goes to %s", check_template(args))

    def begin(self, rollout_id: int) -> None:
        """A ``train_actor`` call that is to end in a dump begins."""
        self._step_began = time.monotonic()
        _attempts[rollout_id] = _attempts.get(rollout_id, -1) + 1
        self._announce()

    def give_up(self, rollout_id: int, reason: str) -> None:
        """Tell the others not to wait for this rank in this dump, unless it has no part in it."""
        try:
            has_part = read_topology().takes_part
        except Exception as error:
            if not_ours(error):
                raise
            has_part = True  # not known, and a rank that waits in vain is worse than a dump less
        if has_part and self._announced_in is not None:
            Agreement(self._announced_in, self.dump_key(rollout_id), self._announced_rank, (), 0.0).give_up(reason)

    def step_out(self, reason: str) -> None:
        """This rank will not dump any more: no rank waits for it. Never raises."""
        if self._announced_in is not None:
            try:
                withdraw(self._announced_in, self._announced_rank)
            except Exception as error:
                if not_ours(error):
                    raise
                log(logging.DEBUG, "slime_instrument: could not withdraw from the store")

    def dump(self, args: Any, rollout_id: int, rollout_data: dict[str, Any], seen: Seen) -> None:
        """Take part in the dump of one rollout; on the writer, write it. Raises DumpError when it is given up."""
        from slime_instrument._dump.pipeline import dump

        dump(self, args, rollout_id, rollout_data, seen)

    def _announce(self) -> None:
        import torch.distributed as dist

        store = default_store()
        if store is not self._announced_in:
            self._announced_rank = dist.get_rank()
            announce(store, self._announced_rank)
            self._announced_in = store

    def dump_key(self, rollout_id: int) -> str:
        """What identifies this dump among the ranks: the rollout, and how often it was trained before."""
        return f"{rollout_id}/{_attempts.get(rollout_id, 0)}"

    def wrote(self, rollout_id: int, path: Path, size: int, seconds: float) -> None:
        """A dump is in place: say so once with what it cost, then rotate."""
        self.dumps_written += 1
        share = ""
        if self._step_began is not None:
            share = f", {100 * seconds / max(time.monotonic() - self._step_began, 1e-9):.1f} % of the train step"
        level = logging.INFO if self.dumps_written == 1 else logging.DEBUG
        log(level, "slime_instrument: wrote %s, %.1f MB in %.2f s%s", path, size / 1e6, seconds, share)
        for removed in self.rotation.wrote(rollout_id, path):
            log(logging.DEBUG, "slime_instrument: rotation removed %s", removed)
