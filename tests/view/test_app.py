"""The viewer, driven by Textual's pilot."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import DataTable, Footer, Static
from textual.widgets._footer import FooterKey

from slime_instrument._errors import InstrumentError
from slime_instrument._view import app as view_app
from slime_instrument._view.app import Viewer, view_dumps
from slime_instrument._view.source import Source, choose_files


def drive(folder: Path, act: Callable[[Viewer, Any], Awaitable[None]], size: tuple[int, int] = (120, 40)) -> Viewer:
    async def session() -> Viewer:
        files, at = choose_files([folder], None)
        app = Viewer(Source(*files[at]))
        async with app.run_test(size=size) as pilot:
            while app.busy:
                await pilot.pause(0.02)
            await app.workers.wait_for_complete()
            await pilot.pause()
            await act(app, pilot)
        return app

    return asyncio.run(session())


def positions(app: Viewer) -> list[int | None]:
    return [row.position for row in app.shown]


def text(app: Viewer, name: str) -> str:
    return str(app.query_one(f"#{name}", Static).render())


def test_the_worst_sample_comes_first_and_is_open_at_its_worst_token(write_dumps: Callable[..., Path]) -> None:
    def edit(train: list[dict[str, Any]], _source: list[dict[str, Any]]) -> None:
        train[2]["log_probs"][7] -= 2.0

    async def act(app: Viewer, _pilot: Any) -> None:
        assert positions(app)[0] == 2
        assert app.query_one(DataTable).row_count == 6

    async def worst(app: Viewer, pilot: Any) -> None:
        await pilot.press("j")
        await pilot.press("k", "k", "k", "k", "k", "k")
        assert app.chosen is not None
        assert app.chosen.position == 2
        assert app.token == 7
        assert "token 7" in text(app, "detail")
        assert "id 51" in text(app, "detail")  # prompt 4, so response token 7 is token 11 of 40..55

    folder = write_dumps(edit)
    drive(folder, act)
    drive(folder, worst)


def test_n_and_p_step_through_the_tokens_by_their_difference(write_dumps: Callable[..., Path]) -> None:
    def edit(train: list[dict[str, Any]], _source: list[dict[str, Any]]) -> None:
        train[5]["log_probs"][[3, 9]] -= 1.0
        train[5]["log_probs"][9] -= 1.0

    async def act(app: Viewer, pilot: Any) -> None:
        await pilot.press("k", "k", "k", "k", "k", "k")
        visited = [app.token]
        for key in ("n", "p", "p", "right", "left"):
            await pilot.press(key)
            visited.append(app.token)
        assert visited == [9, 3, 9, 9, 10, 9]

    drive(write_dumps(edit), act)


def test_search_keeps_what_fits_and_escape_brings_all_back(write_dumps: Callable[..., Path]) -> None:
    async def act(app: Viewer, pilot: Any) -> None:
        await pilot.press("slash", *"trunc")
        assert positions(app) == [4]
        await pilot.press("escape")
        assert len(positions(app)) == 6
        await pilot.press("slash", *"53", "enter")
        assert positions(app) == [3]

    drive(write_dumps(), act)


def test_s_sorts_by_the_next_column(write_dumps: Callable[..., Path]) -> None:
    async def act(app: Viewer, pilot: Any) -> None:
        assert app.sorted_by == "max_abs"
        assert positions(app) == [5, 4, 3, 2, 1, 0]
        for _ in range(7):
            await pilot.press("s")
        assert app.sorted_by == "position"
        assert positions(app) == [0, 1, 2, 3, 4, 5]

    drive(write_dumps(), act)


def test_reward_and_status_are_the_rollout_dumps_and_a_dash_without_it(write_dumps: Callable[..., Path]) -> None:
    folder = write_dumps()

    async def both(app: Viewer, _pilot: Any) -> None:
        row = next(row for row in app.shown if row.position == 3)
        assert (row.reward, row.status) == (1.0, "completed")

    async def alone(app: Viewer, _pilot: Any) -> None:
        assert {row.status for row in app.shown} == {None}
        assert {row.reward for row in app.shown} == {0.5}
        assert "–" in str(app.query_one(DataTable).get_row_at(0)[7])

    drive(folder, both)
    (folder / "rollout_data" / "3.pt").unlink()
    drive(folder, alone)


def test_a_damaged_rollout_dump_is_named_and_the_train_dump_is_shown(write_dumps: Callable[..., Path]) -> None:
    folder = write_dumps()
    (folder / "rollout_data" / "3.pt").write_bytes(b"not a dump")

    async def act(app: Viewer, _pilot: Any) -> None:
        assert len(app.shown) == 6
        assert "The rollout dump cannot be used" in text(app, "note")

    drive(folder, act)


def test_findings_stand_above_the_table_and_at_their_samples(write_dumps: Callable[..., Path]) -> None:
    def edit(train: list[dict[str, Any]], _source: list[dict[str, Any]]) -> None:
        train[1]["log_probs"][5] = float("nan")

    async def act(app: Viewer, _pilot: Any) -> None:
        assert "non-finite" in text(app, "note")
        assert next(row for row in app.shown if row.position == 1).findings == ["non-finite"]

    drive(write_dumps(edit), act)


@pytest.mark.parametrize("length", [0, 1])
def test_empty_responses_and_empty_dumps_open(write_dumps: Callable[..., Path], length: int) -> None:
    def edit(train: list[dict[str, Any]], source: list[dict[str, Any]]) -> None:
        if length == 0:
            train.clear()
            source.clear()
            return
        for name in ("loss_masks", "rollout_log_probs", "log_probs", "advantages"):
            train[5][name] = train[5][name][:0]
        train[5]["response_lengths"], source[5]["response_length"], source[5]["rollout_log_probs"] = 0, 0, []

    async def act(app: Viewer, pilot: Any) -> None:
        for key in ("n", "p", "j", "k", "right", "left", "c", "s"):
            await pilot.press(key)
        assert len(app.shown) == 6 * length

    drive(write_dumps(edit), act)


def test_what_stands_in_a_dump_is_no_markup_and_steers_no_terminal(write_dumps: Callable[..., Path]) -> None:
    def edit(_train: list[dict[str, Any]], source: list[dict[str, Any]]) -> None:
        source[5]["status"] = "[bold red]x[/] \x1b[2J\u202e"

    async def act(app: Viewer, _pilot: Any) -> None:
        cell = app.query_one(DataTable).get_row_at(0)[7]
        assert str(cell) == "[bold red]x[/] ·[2J·"

    drive(write_dumps(edit), act)


def test_every_key_is_seen_in_a_terminal_of_80_columns(write_dumps: Callable[..., Path]) -> None:
    async def act(app: Viewer, _pilot: Any) -> None:
        keys = app.query_one(Footer).query(FooterKey)
        assert [key.description for key in keys] == ["Token", "Sample", "Rollout", "Sort", "Search", "Colour", "Quit"]
        assert all(key.region.x >= 0 and key.region.right <= 80 for key in keys)

    drive(write_dumps(), act, size=(80, 24))


def test_brackets_go_to_the_next_and_the_previous_rollout(
    write_dumps: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def further(_app: Viewer, pilot: Any) -> None:
        await pilot.press("right_square_bracket")

    folder = write_dumps()
    assert drive(folder, further).return_value == 1
    for rollout_id in (4, 5):
        write_dumps(rollout_id=rollout_id)
    ends, seen = iter([-1, -1, -1, 1, None]), []

    class Ends(Viewer):
        def run(self, *_: Any, **__: Any) -> int | None:
            seen.append(self.source.dump.rollout_id)
            return next(ends)

    monkeypatch.setattr(view_app, "Viewer", Ends)
    for stream in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    view_dumps([folder])
    assert seen == [5, 4, 3, 3, 4]


def test_without_a_terminal_it_says_what_to_use_instead(write_dumps: Callable[..., Path]) -> None:
    with pytest.raises(InstrumentError, match="expected a terminal, found a pipe or a file"):
        view_dumps([write_dumps()])
