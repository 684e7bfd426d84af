"""Compares what was seen with what must be seen. One list of problems per scenario; an empty one is a pass."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from slime_instrument._dump.file import _LEFTOVER
from tests.faults.player import SENTINEL, TIMEOUT_S
from tests.faults.scenarios import Layout, Scenario
from tests.faults.sites import ALL, SLEEP_S, Site

__all__ = ["KINDS", "judge"]

KINDS = ("hang", "wait", "stale", "file", "training", "policy", "unreached")
"""hang: a rank did not come back, or died. wait: a rank ran into the bound. stale: a session, a mark or a tensor
outlives its call. file: a missing, wrong, stray or overwritten file. training: weights differ, or an exception reached
training that must not. policy: not raised, logged or counted, or logged twice. unreached: the fault did not fire."""

Problem = tuple[str, str]
"""Kind and text."""

OLD = hashlib.sha256(SENTINEL).hexdigest()[:16] + ":"


def judge(scenario: Scenario, layout: Layout, answer: dict[str, Any], reference: dict[str, Any]) -> list[Problem]:
    """Compare one answer of the stage with what it must be."""
    if answer["outcome"] != "finished":
        stacks = "\n".join(f"rank {rank}: {text}" for rank, text in answer.get("stacks", {}).items())
        return [("hang", f"{answer['outcome']}\n{stacks}")]
    reports = {int(rank): report for rank, report in answer["reports"].items()}
    expected = {int(rank): report for rank, report in reference["reports"].items()}
    problems: list[Problem] = []
    for number in range(scenario.rollouts):
        seen = {rank: r["rollouts"][number] for rank, r in reports.items() if number < len(r["rollouts"])}
        normal = {rank: report["rollouts"][number] for rank, report in expected.items()}
        problems += _rollout(scenario, layout, number, seen, normal, answer)
    problems += _log(scenario, reports)
    return problems


def _rollout(
    scenario: Scenario,
    layout: Layout,
    number: int,
    seen: dict[int, Any],
    normal: dict[int, Any],
    answer: dict[str, Any],
) -> Iterator[Problem]:
    site, live = ALL[scenario.site], number in scenario.faulty
    reach = layout.reach(site.who)
    killed = site.action == "kill"
    targets = [rank for rank in reach if scenario.rank in (-1, rank)] if live and not killed else []
    fired = [rank for rank, report in seen.items() if report["fired"]]
    if not scenario.alone and sorted(fired) != targets:
        yield "unreached", f"rollout {number}: fired on {fired}, expected on {targets}"
    if scenario.alone and live and not fired and not killed:
        yield "unreached", f"rollout {number}: fired nowhere"
    for rank, report in seen.items():
        at = f"rollout {number}, rank {rank}"
        bound = SLEEP_S - 1 if site.kind == "peer" else TIMEOUT_S / 2
        # Rank 0 holds the job's store: while it is stopped nobody is answered there, with or without us.
        without_store = site.action == "stop" and scenario.rank == 0 and live
        if (
            report["seconds"] > bound
            and not (report["fired"] and site.action in ("sleep", "stop"))
            and not without_store
        ):
            yield "wait", f"{at}: took {report['seconds']} s"
        for text in report["stale"]:
            yield "stale", f"{at}: {text}"
        yield from _error(scenario, site, at, bool(report["fired"]), live, report["error"])
        undisturbed = not live or (site.kind != "slime" and (not scenario.alone or site.kind == "peer"))
        if undisturbed and report["weights"] != normal[rank]["weights"]:
            yield "training", f"{at}: the weights differ from those of a run without the fault"
        # Processes of their own have not trained before; what training itself keeps is not the same there.
        if undisturbed and not scenario.alone and report["tensors"] != normal[rank]["tensors"]:
            yield (
                "stale",
                f"{at}: {report['tensors']} tensors and bytes alive, {normal[rank]['tensors']} without the fault",
            )
        if report["fired"] and not sum(report["failures"].values()) and site.kind not in ("slime", "peer"):
            yield "policy", f"{at}: the failure is not counted in status"
    yield from _files(scenario, layout, site, number, fired, seen, normal, answer)


def _error(
    scenario: Scenario, site: Site, at: str, fired: bool, live: bool, error: dict[str, Any] | None
) -> Iterator[Problem]:
    if site.kind == "slime" and fired:
        if error is None or error["type"] != "SlimeFault":
            yield "training", f"{at}: slime's failure became {error}"
        elif error["cause"] or error["context"] or error["frames"][-1] != "sites.py:pull":
            yield "training", f"{at}: slime's failure was altered: {error}"
    elif fired and scenario.strict and site.action == "raise":
        chained = error is not None and (error["cause"] == "InjectedFault" or "planted at" in error["text"])
        if error is None or error["type"] != "DumpError" or not chained:
            yield "policy", f"{at}: strict must raise DumpError from the fault, found {error}"
    elif error is not None:
        allowed = (scenario.strict and live and error["type"] in ("DumpError", "NotAgreed")) or (
            scenario.alone and live
        )
        if not allowed:
            yield "training", f"{at}: an exception reached training: {error}"


def _files(
    scenario: Scenario, layout: Layout, site: Site, number: int, fired: list[int], seen: Any, normal: Any, answer: Any
) -> Iterator[Problem]:
    at_the_end = scenario.alone and "files" not in seen.get(0, {})
    found = answer["contents"] if at_the_end else seen[0].get("files")
    if found is None:
        return
    names = {f"{rollout}.pt" for rollout in range(scenario.rollouts)}
    if site.action == "kill":  # what a killed writer leaves is recognised, and removed by the next run
        found = {name: content for name, content in found.items() if not _LEFTOVER.match(name)}
    if set(found) != names:
        yield "file", f"rollout {number}: files {sorted(found)}, expected {sorted(names)}"
        return
    part = layout.reach("part") if site.kind != "slime" else range(layout.world)
    lost = scenario.alone or (site.loses and any(rank in part for rank in fired))
    if site.name == "dump/topology" and fired and not lost:
        # A rank that never learned that it has no part gives the dump up, to be safe; one that did leaves it alone.
        lost = found[f"{number}.pt"] == OLD
    if scenario.alone and not fired and not (site.action == "kill" and number in scenario.faulty):
        lost = False
    good = normal[0]["files"][f"{number}.pt"]
    content = found[f"{number}.pt"]
    if site.provenance:
        good, content = (digest if digest == OLD else digest.partition(":")[2] for digest in (good, content))
    if scenario.alone and site.kind == "slime" and not site.loses and content == good:
        return  # raised behind the dump; the writer was done before the stage ended all ranks, or was not
    if site.action in ("sleep", "stop") and content == good:
        lost = False  # what was under way when it stood still may have been all
    if lost and content != OLD:
        what = "the dump itself, although a part of it failed" if content == good else "something else"
        yield "file", f"rollout {number}: the older file was overwritten by {what}"
    elif not lost and content != good:
        what = "was not written" if content == OLD else "is wrong"
        yield "file", f"rollout {number}: the dump {what}"
    said = seen[0].get("journal") if not at_the_end else None
    written = content != OLD
    if said is not None and (said[-1:] == ["written"]) != written:
        yield "file", f"rollout {number}: the dump is {'there' if written else 'lost'}, and the journal says {said}"
    # Where a rank cannot even tell whether it has a part, nobody may have known that there was one to lose.
    if said == [] and site.kind != "slime" and not written and site.name != "dump/topology":
        yield "file", f"rollout {number}: the journal says nothing of a dump that is lost"
    for later in () if at_the_end else range(number + 1, scenario.rollouts):
        if found[f"{later}.pt"] != OLD:
            yield "file", f"rollout {number}: a file of another rollout was written"


def _log(scenario: Scenario, reports: dict[int, Any]) -> Iterator[Problem]:
    ours = ALL[scenario.site].kind != "slime"
    for rank, report in reports.items():
        lines = [line for seen in report["rollouts"] for line in seen["heard"]]
        twice = {line for line in lines if lines.count(line) > 1}
        if twice:
            yield "policy", f"rank {rank}: logged more than once: {sorted(twice)}"
        fired = any(seen["fired"] for seen in report["rollouts"]) and ALL[scenario.site].action == "raise"
        if ours and fired and not scenario.strict and not any(line.startswith("ERROR") for line in lines):
            yield "policy", f"rank {rank}: nothing was logged"
        if not ours and lines:
            yield "policy", f"rank {rank}: slime's failure made us log {lines}"
