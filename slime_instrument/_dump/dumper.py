"""One dump, from ``rollout_data`` on every rank to one file.

Each rank describes its part, the ranks agree, the parts go to the writer, which restores whole fields and writes the
file. Read the folder in the order :mod:`agree`, :mod:`contribute`, :mod:`exchange`, :mod:`payload` with
:mod:`zigzag`, :mod:`file`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from slime_instrument._dump import agree, exchange
from slime_instrument._dump.agree import Agreement, CallId, NotAgreed, Presence, Seen, Topology, read_topology
from slime_instrument._dump.contribute import Contribution, contribute, undisturbed
from slime_instrument._dump.file import (
    BackgroundWriter,
    Disk,
    Report,
    Rotation,
    check_template,
    check_writable,
    clean_leftovers,
    dump_folder,
    dump_path,
    dump_template,
    is_special,
    keep_references,
    remove_references,
    write_dump,
)
from slime_instrument._dump.payload import build_payload, left_out, provenance, put_together
from slime_instrument._dump.zigzag import shard_lengths
from slime_instrument._errors import DumpError, contained, describe, log, not_ours
from slime_instrument._format import journal
from slime_instrument._format.schema import SHARDED_FIELDS
from slime_instrument._installation import versions
from slime_instrument._settings import Settings, is_due

_HIDDEN = "_slime_instrument"
"""Keys of rollout_data that start with this are ours and travel no further."""


class Dumper:
    """All that one process knows of its dumps. ``report`` deals with a failure of a background write;
    ``after_dump(args, rollout_id, payload, path)`` is called on the writer once a payload is built."""

    def __init__(
        self,
        settings: Settings,
        report: Report,
        after_dump: Callable[[Any, int, dict[str, Any], Path], None] = lambda *_: None,
        earlier: Dumper | None = None,
    ) -> None:
        self._settings, self._report, self._after_dump = settings, report, after_dump
        self._presence = Presence(settings.every, settings.pin)
        self._rotation = Rotation(settings, self._note)
        self._disk = Disk(self._note)
        self._background = BackgroundWriter(report, settings.timeout_s)
        self._began = False
        self._journal: journal.Writer | None = None
        self._journal_failed = False
        self._written = 0
        self._settled: CallId | None = None
        """The call whose file was put in place, or handed to the background writer, last."""
        self._announced_before_training = False
        self._step_began: float | None = None
        self._missed: dict[tuple[int, int], CallId] = {}
        self._topology: Topology | None = None  # as it was read last
        self._told: int | None = None
        """The rollout whose dump failed here last, where the other ranks know of it."""
        # Kept over re-arming: the store still holds the decisions of dumps that were given up.
        self._attempts: dict[int, int] = earlier._attempts if earlier is not None else {}
        self._calls: dict[int, int] = earlier._calls if earlier is not None else {}

    # -- What the hooks call, in the order in which they do

    def due(self, rollout_id: int) -> bool:
        """Whether this rollout is dumped, as far as the settings say."""
        return is_due(self._settings, rollout_id)

    def check(self, args: Any) -> None:
        """Refuse what cannot work, before anything is loaded: raises ``TrainingPathError``."""
        check_template(args)

    def start(self, args: Any, patches: Sequence[tuple[str, str, str]], route: str = "") -> str:
        """Training is about to begin and Megatron is up: announce this rank; on the writer check the folder and begin
        the journal. ``patches``: name, state and reason of each. Returns the path template of the dumps; raises
        ``TrainingPathError``."""
        with contained(_not_told):  # a store that does not answer now may do so at the dump
            self._presence.connect()
        self._topology = topology = read_topology()
        template, first_rollout = dump_template(args), int(getattr(args, "start_rollout_id", None) or 0)
        if not topology.is_writer:
            return template
        check_writable(template, topology.rank, self._disk, first_rollout)
        self._begin_journal(template, topology, patches, route)
        return template

    def begin(self, rollout_id: int, args: Any = None, route: str = "") -> None:
        """A ``train_actor`` call that is to end in a dump begins on this rank. ``args``: slime's; with them the writer
        begins the journal where :meth:`start` has not, because it was armed later."""
        self._step_began = time.monotonic()
        self._attempts[rollout_id] = self._attempts.get(rollout_id, -1) + 1
        self._calls[rollout_id] = 0
        self._told = None
        self._announced_before_training = False
        with contained(_not_told):  # a store that does not answer now may do so at the dump
            self._presence.connect()
            self._announced_before_training = True
        topology = self._topology_if_known()
        if args is not None and not self._began and topology is not None and topology.is_writer:
            self._begin_journal(dump_template(args), topology, (), route)

    def give_up(self, rollout_id: int, reason: str) -> None:
        """This rank failed before it came to the dump of ``rollout_id``: the others must not wait for it. Never raises;
        does nothing where :meth:`dump` has told them already."""
        if self._told == rollout_id:
            return
        self._told = rollout_id
        with contained(_not_told):
            topology = self._topology_if_known()
            if topology is None or topology.takes_part:
                store = self._presence.store or self._presence.connect()
                agree.give_up(store, self._next_call(rollout_id), self._presence.rank, reason)
            if topology is not None and topology.is_writer:
                self._say("lost", rollout_id=rollout_id, reason=reason)

    def ended(self, rollout_id: int, error: str | None = None) -> None:
        """The training step of ``rollout_id`` ended on this rank, with ``error`` if so. Where it called no dump, the
        others are told not to wait for it. Never raises."""
        if self._calls.get(rollout_id):
            return
        if error is not None:
            self.give_up(rollout_id, error)
            return
        with contained(_not_told):
            topology = self._topology_if_known()
            if topology is not None and topology.takes_part and len(topology.participants) > 1:
                self._agreement(CallId(rollout_id, self._attempts.get(rollout_id, 0), 0), topology).pass_by()

    def step_out(self, reason: str) -> None:
        """This rank dumps no more; the others are told why. Never raises."""
        self._presence.step_out(reason)
        self._say("stepped-out", reason=reason)

    def dump(self, args: Any, rollout_id: int, rollout_data: dict[str, Any], seen: Seen) -> None:
        """Take part in the dump of one rollout; on the writer, write it. Raises :class:`DumpError` where it is lost."""
        self._topology = topology = read_topology()
        if not topology.takes_part:
            return
        began = time.monotonic()
        self._told = None
        call = self._next_call(rollout_id)
        path = _absolute(dump_path(dump_template(args), rollout_id, topology.rank))
        if topology.is_writer and not self._began:  # armed after the start of training, or a trainer of another kind
            self._begin_journal(dump_template(args), topology, (), seen.route)
        try:
            with undisturbed(), torch.no_grad():
                self._dump(args, call, rollout_data, seen, topology, path, began)
        except BaseException as error:
            self._told = rollout_id
            if topology.is_writer and self._settled != call:
                spent = round(time.monotonic() - began, 4)
                self._say("lost", rollout_id=rollout_id, path=str(path), reason=_why(error), blocked_s=spent)
            if not not_ours(error) and not isinstance(error, DumpError) and _is_shortage(error):
                raise DumpError(f"the dump failed: {describe(error)}") from error
            raise

    # -- The dump

    def _dump(
        self,
        args: Any,
        call: CallId,
        rollout_data: dict[str, Any],
        seen: Seen,
        topology: Topology,
        path: Path,
        began: float,
    ) -> None:
        cp_fields = tuple(dict.fromkeys((*SHARDED_FIELDS, *self._settings.cp_fields)))
        if len(topology.participants) == 1:
            self._refuse_if_busy(topology)
            contributions = [self._contribution(args, rollout_data, seen, topology, cp_fields)]
        else:
            agreement = self._agreement(call, topology)
            try:
                self._refuse_if_absent(topology, call.rollout_id)
                self._refuse_if_busy(topology)
                contribution = self._contribution(args, rollout_data, seen, topology, cp_fields)
                contributions = self._exchange(args, agreement, contribution)
            except NotAgreed as error:
                raise NotAgreed(f"the dump was given up: {error}") from None  # one text, so that it is logged once
            except BaseException as error:
                agreement.give_up(_why(error))
                raise
        if not topology.is_writer:
            return  # sent; another rank writes
        absent = sorted(set(topology.participants) - {part.description.rank for part in contributions})
        parts = put_together(contributions, topology.context_parallel, cp_fields)
        payload = build_payload(parts, rollout_id=call.rollout_id, writer_rank=topology.rank)
        del contributions, parts
        self._write(args, call, payload, path, began, absent)

    def _contribution(
        self, args: Any, rollout_data: dict[str, Any], seen: Seen, topology: Topology, cp_fields: tuple[str, ...]
    ) -> Contribution:
        """This rank's part. The trainer's own dict is left as it is."""
        if seen.failure is not None:
            raise DumpError(f"a dump without a part would be wrong: {seen.failure}")
        data = {k: v for k, v in rollout_data.items() if not (isinstance(k, str) and k.startswith(_HIDDEN))}
        padded = data.get("max_seq_lens") if getattr(args, "qkv_format", "thd") == "bshd" else None
        padded = None if padded is None else [int(length) for length in padded]
        if seen.log_probs is not None:
            lengths = shard_lengths(
                [int(length) for length in data["total_lengths"]],
                [int(length) for length in data["response_lengths"]],
                topology.context_parallel,
                topology.context_rank,
                padded,
            )
            data["log_probs"] = _without_holes(seen.log_probs, lengths)
        described = provenance(data, args, topology, seen, cp_fields)
        return contribute(data, topology, cp_fields, padded=padded, provenance=described)

    def _exchange(self, args: Any, agreement: Agreement, contribution: Contribution) -> list[Contribution]:
        """The parts of all ranks, on the writer; nothing on the others, once their part is sent."""
        template = agree.storable(dump_template(args))
        agreement.arrive(template)
        if not agreement.topology.is_writer:
            exchange.send(contribution, agreement.wait_for_go(), agreement, self._settings.bucket_bytes)
            return []
        templates = agreement.wait_for_all()
        other = {rank: text for rank, text in templates.items() if Path(text).name != Path(template).name}
        if other:
            writer = agreement.topology.rank
            raise DumpError(f"the ranks dump to different paths: rank {writer} to {template}, others to {other}")
        try:
            with exchange.Receiver(agreement, templates) as receiver:
                agreement.go(receiver.address)
                contributions = receiver.receive(contribution)
        except OSError as error:
            raise DumpError(f"receiving ended early: {describe(error)}") from error
        agreement.forget()
        return contributions

    def _write(
        self, args: Any, call: CallId, payload: dict[str, Any], path: Path, began: float, absent: Sequence[int]
    ) -> None:
        rollout_id = call.rollout_id
        if not self._written:
            for leftover in clean_leftovers(path.parent):
                log(logging.INFO, "slime_instrument: removed %s, left by a run that was killed", leftover)

        # Also of a dump that is written later: slime may clean up meanwhile.
        references = keep_references(payload, path)

        def write(blocked_s: float | None = None) -> None:
            try:
                size = write_dump(payload, path, self._disk)
            except BaseException:
                if references is not None:
                    remove_references(references)
                raise
            if blocked_s is None:
                self._settled = call
            spent = time.monotonic() - began
            lacking = left_out(payload)
            if absent:
                lacking[f"rank(s) {absent}"] = "which ended their train_actor without calling the dump"
            self._wrote(call, path, size, spent if blocked_s is None else blocked_s, lacking, references)

        def write_later() -> None:
            try:
                write(blocked_s)
            except BaseException as error:
                self._say("lost", rollout_id=rollout_id, path=str(path), reason=_why(error))
                raise

        if self._settings.async_write:
            self._background.flush()  # the ranks that sent are on their way; at most one file is pending
            blocked_s = time.monotonic() - began
            self._say("pending", rollout_id=rollout_id, path=str(path), blocked_s=round(blocked_s, 4))
            lost = f"Rollout {rollout_id} has no train dump."
            self._background.submit(write_later, lost, lambda: self._disk.writes)
            self._settled = call
        else:
            write()
        self._after_dump(args, rollout_id, payload, path)

    def _wrote(
        self,
        call: CallId,
        path: Path,
        size: int,
        seconds: float,
        lacking: dict[str, str],
        references: Path | None,
    ) -> None:
        """A dump is in place: say so with what it cost, then rotate."""
        self._written += 1
        rollout_id, share = call.rollout_id, ""
        if self._step_began is not None:
            share = f", {100 * seconds / max(time.monotonic() - self._step_began, 1e-9):.1f} % of the train step"
        level = logging.INFO if self._written == 1 else logging.DEBUG
        log(level, "slime_instrument: wrote %s, %.1f MB in %.2f s%s", path, size / 1e6, seconds, share)
        self._say("written", rollout_id=rollout_id, path=str(path), bytes=size, blocked_s=round(seconds, 4))
        for name, why in lacking.items():
            log(logging.WARNING, "slime_instrument: %s lacks %s: %s", path, name, why)
            self._say("left-out", rollout_id=rollout_id, path=str(path), field=name, reason=why)
        try:
            rotated = self._rotation.wrote(rollout_id, path, references)
        except Exception as error:
            if not_ours(error):
                raise
            self._report("rotation", error, "Older dumps stay.")
            return
        for removed_id, removed in rotated:
            log(logging.DEBUG, "slime_instrument: rotation removed %s", removed)
            self._say("removed", rollout_id=removed_id, path=str(removed))

    def _refuse_if_busy(self, topology: Topology) -> None:
        """With ASYNC_BUSY=skip, a dump that comes while a file is still being written is skipped; nobody waits."""
        if topology.is_writer and self._settings.async_busy == "skip" and self._background.pending:
            raise DumpError("the file of an earlier rollout is still being written (SLIME_INSTRUMENT_ASYNC_BUSY=skip)")

    # -- Among the ranks

    def _next_call(self, rollout_id: int) -> CallId:
        """The call that comes now; every rank counts alike."""
        call = self._calls.get(rollout_id, 0)
        self._calls[rollout_id] = call + 1
        return CallId(rollout_id, self._attempts.get(rollout_id, 0), call)

    def _topology_if_known(self) -> Topology | None:
        found = self._topology
        if found is None:
            with contained():
                found = read_topology()
        return found

    def _agreement(self, call: CallId, topology: Topology) -> Agreement:
        """How this rank and the others agree on ``call``. Raises :class:`DumpError` where the store does not answer."""
        return Agreement(
            self._presence.connect(), call, topology, self._settings.timeout_s, self._missed, self._waiting
        )

    def _refuse_if_absent(self, topology: Topology, rollout_id: int) -> None:
        """Where a rank is known not to take part, nobody waits for it."""
        # Without a train_actor call that all ranks went through, a rank may only be about to announce itself.
        if self._announced_before_training:
            absent = self._presence.absent(topology.participants)
            if absent is not None:
                raise NotAgreed(f"{absent}; a dump needs all of ranks {list(topology.participants)}")
            # The writer looks at everybody; the others would wait for the writer alone.
            skips = self._presence.skips(topology.participants if topology.is_writer else [topology.writer], rollout_id)
            if skips:
                raise NotAgreed(f"on rank(s) {skips} SLIME_INSTRUMENT_EVERY or _PIN leaves this rollout out")

    # -- Saying it

    def _begin_journal(
        self, template: str, topology: Topology, patches: Sequence[tuple[str, str, str]], route: str
    ) -> None:
        self._began = True
        folder = _absolute(dump_folder(template, topology.rank))
        first = dump_path(template, 0, topology.rank)
        if first.is_symlink() or is_special(first):
            log(logging.INFO, "slime_instrument: %s is no regular file; no journal is kept beside it", template)
            return
        self._journal = journal.Writer(folder)
        self._say(
            "start",
            **journal.process(),
            versions=versions(),
            layout=topology.sizes(),
            route=route,
            settings=self._settings.as_dict(),
            patches=[{"name": name, "state": state, "reason": reason} for name, state, reason in patches],
            template=template,
        )

    def _waiting(self, what: str) -> None:
        log(logging.WARNING, "slime_instrument: the dump is %s", what)
        self._say("waiting", what=what)

    def _note(self, text: str) -> None:
        log(logging.WARNING, "slime_instrument: %s", text)
        self._say("note", text=text)

    def _say(self, event: str, **values: Any) -> None:
        """A line in the journal, where this process keeps one. One that cannot be written costs nothing else."""
        if self._journal is not None:
            with contained(self._journal_fails):
                self._journal.append(event, **values)

    def _journal_fails(self, why: str) -> None:
        if not self._journal_failed:
            self._journal_failed = True
            log(logging.WARNING, "slime_instrument: the journal cannot be written: %s", why)


def _not_told(why: str) -> None:
    log(logging.DEBUG, "slime_instrument: could not tell the other ranks: %s", why)


def _without_holes(values: Sequence[torch.Tensor | None], lengths: Sequence[int]) -> list[torch.Tensor]:
    """NaN for samples that the loss never saw: they have no value, and 0.0 would be a log-prob."""
    like = next(value for value in values if value is not None)
    return [
        torch.full((length,), float("nan"), dtype=like.dtype, device=like.device) if value is None else value
        for value, length in zip(values, lengths, strict=True)
    ]


def _absolute(path: Path) -> Path:
    """``path`` as it is meant now; training may change its folder before a file is written or removed."""
    try:
        return path.absolute()
    except OSError:  # the current folder is gone
        return path


def _is_shortage(error: BaseException) -> bool:
    """Whether the machine lacked something: memory, file descriptors, a working disk."""
    if isinstance(error, (OSError, MemoryError)) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _why(error: BaseException) -> str:
    return str(error) if isinstance(error, DumpError) else describe(error)
