"""The fresh interpreter of one layout: imports the target once, forks ranks for each batch of scenarios, and relays.

Reads a JSON document from standard input, writes one JSON line per scenario to the given descriptor. A scenario that
does not end in time is reported as a hang, with the stack of every rank, and the rest is played by new ranks.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.faults.scenarios import ROLLOUTS, SAMPLES, Layout, Scenario
from tests.faults.sites import ALL

PATIENCE_S = 30.0
BATCH = 60


def main() -> int:
    spec = json.loads(sys.stdin.read())
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    layout = Layout(**spec["layout"])
    scenarios = [(number, Scenario.of(values)) for number, values in spec["scenarios"]]
    from slime_instrument.lab import LabOptions, _target

    options = LabOptions(
        out=Path(spec["out"]),
        slime=Path(spec["slime"]) if spec["slime"] else None,
        rollouts=ROLLOUTS,
        timeout=36000.0,
        overrides={"rollout_batch_size": SAMPLES // 2, "n_samples_per_prompt": 2},
        rank_hook=f"{Path(__file__).with_name('stage.py')}:install",
        **spec["layout"],
    )
    options.out.mkdir(parents=True, exist_ok=True)
    actor_module = _target.prepare(options)
    together = [(number, scenario) for number, scenario in scenarios if not scenario.alone]
    batches = [together[start : start + BATCH] for start in range(0, len(together), BATCH)]
    batches += [[(number, scenario)] for number, scenario in scenarios if scenario.alone]
    while batches:
        batch = batches.pop(0)
        left = _play(options, actor_module, layout.world, batch, answers)
        if left:
            batches.insert(0, left)
    return 0


def _play(options: Any, actor_module: Any, world: int, batch: list[Any], answers: Any) -> list[Any]:
    """Play a batch with new ranks. Returns what is left after a scenario that hung or killed a rank."""
    from slime_instrument.lab._ranks import rank_main
    from tests.faults.player import Player, folder_of

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("fork")
    processes: list[Any] = []
    readers: dict[Connection, int] = {}
    lab_readers: list[Connection] = []
    for rank in range(world):
        reader, writer = context.Pipe(duplex=False)
        lab_reader, lab_writer = context.Pipe(duplex=False)
        lab_readers.append(lab_reader)

        def run(rank: int = rank, writer: Connection = writer, lab_writer: Connection = lab_writer) -> None:
            global _player
            _player = Player(batch, options.out, options.rollouts, lambda *told: writer.send(told))
            sys.modules["tests.faults.stage"]._player = _player  # type: ignore[attr-defined]
            try:
                rank_main(options, actor_module, rank, port, lab_writer)
            except BaseException:
                traceback.print_exc()
            os._exit(0)

        process = context.Process(target=run, daemon=True)
        process.start()
        writer.close()
        lab_writer.close()
        processes.append(process)
        readers[reader] = rank
    told: dict[int, dict[int, Any]] = {number: {} for number, _ in batch}
    pending = list(batch)
    deadline = time.monotonic() + PATIENCE_S + 30  # building the model comes first
    outcome = "finished"
    while pending:
        number, scenario = pending[0]
        killed = scenario.rank if ALL[scenario.site].action == "kill" else None
        enough = {scenario.rank} if scenario.alone and scenario.rank >= 0 else set(range(world))
        if killed is not None:
            enough = set(range(world)) - {killed}
        elif scenario.alone and any(_raised(report) for report in told[number].values()):
            enough = set(told[number])
        if enough <= set(told[number]) and told[number]:
            folder = folder_of(options.out, scenario, number)
            if scenario.alone:
                _end(processes)
            found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
            files = [name for name in found if name != "instrument.jsonl"]
            contents = {}
            if scenario.alone:
                from tests.faults.player import _digest

                contents = {name: _digest((folder / name).read_bytes()) for name in files}
            shutil.rmtree(folder, ignore_errors=True)
            _answer(answers, number, outcome, told[number], contents=contents)
            pending.pop(0)
            deadline = time.monotonic() + PATIENCE_S
            continue
        ready: list[Any] = wait(list(readers), max(0.0, deadline - time.monotonic()))
        if not ready:
            stacks = _stacks(options.out, processes)
            shutil.rmtree(folder_of(options.out, scenario, number), ignore_errors=True)
            _answer(answers, number, "hung", told[number], stacks=stacks)
            pending.pop(0)
            break
        for reader in ready:
            try:
                which, rank, report = reader.recv()
                told[which][rank] = report
            except EOFError:
                rank = readers.pop(reader)
                if rank == killed or rank in told[number]:
                    continue  # killed on purpose, or it has said all that it had to say
                died = [text for kind, text in _drain(lab_readers[rank]) if kind == "failed"]
                _answer(answers, number, "died", told[number], stacks={rank: "\n".join(died)[-3000:]})
                shutil.rmtree(folder_of(options.out, scenario, number), ignore_errors=True)
                pending.pop(0)
                _end(processes)
                return pending
    _end(processes)
    return pending


def _raised(report: dict[str, Any]) -> bool:
    return any(seen["error"] is not None for seen in report["rollouts"])


def _drain(connection: Connection) -> list[tuple[str, Any]]:
    found = []
    try:
        while connection.poll():
            found.append(connection.recv())
    except (EOFError, OSError):
        pass
    return found


def _answer(answers: Any, number: int, outcome: str, reports: Any, **more: Any) -> None:
    answers.write(json.dumps({"number": number, "outcome": outcome, "reports": reports, **more}) + "\n")


def _stacks(out: Path, processes: list[Any]) -> dict[int, str]:
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.5)
    return {rank: (out / f"stacks_{rank}.txt").read_text()[-3000:] for rank in range(len(processes))}


def _end(processes: list[Any]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


_player: Any = None


def install(rank: int, actor_module: Any, args: Any) -> None:
    """The lab's rank hook. The lab executes this file a second time; the player is in the first."""
    sys.modules["tests.faults.stage"]._player.install(rank, actor_module, args)


if __name__ == "__main__":
    sys.modules["tests.faults.stage"] = sys.modules["__main__"]
    sys.exit(main())
