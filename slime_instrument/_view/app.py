"""The terminal viewer: a table of samples, and the tokens of the chosen one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Header, Input, Static
from textual.worker import get_current_worker

from slime_instrument._errors import InstrumentError, five_parts
from slime_instrument._view.heat import MODES, PAGE, Tokens, printable
from slime_instrument._view.source import Row, Source, choose_files

# --- what stands in the sample table ---


COLUMNS = (
    ("sample", "position"), ("mean |δ|", "mean_abs"), ("max |δ|", "max_abs"), ("compared", "n_tokens"),
    ("length", "length"), ("reward", "reward"), ("findings", "findings"), ("status", "status"), ("index", "index"),
)  # fmt: skip
_ASCENDING = ("position", "index", "status", "findings")
_WIDEST = 32  # characters of a cell


def value_of(row: Row, name: str) -> Any:
    value = getattr(row, name)
    return ", ".join(value) or None if isinstance(value, list) else value


def ordered(rows: Iterable[Row], by: str) -> list[Row]:
    """Numbers from the largest, everything else from the first; rows without a value come last."""
    every = list(rows)
    known = [row for row in every if value_of(row, by) is not None]
    known.sort(key=lambda row: value_of(row, by), reverse=by not in _ASCENDING)
    return known + [row for row in every if value_of(row, by) is None]


def cell(value: Any) -> Text:
    """Never markup: what stands in a dump must not style the table."""
    if value is None:
        return Text("–", justify="right")
    if isinstance(value, str):
        text = printable(value)
        return Text(text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…")
    return Text(f"{value:.4g}" if isinstance(value, float) else str(value), justify="right")


_REFRESH_S = 2.0  # between redraws of the table while samples are measured
_BREATH_S = 0.005  # after each sample, so that keys are answered while the others are measured


def view_dumps(
    given: Sequence[Path], *, rollout: int | None = None, tokenizer: Path | None = None, allow_pickle: bool = False
) -> None:
    """Open the viewer on dumps and return when the user leaves it. Errors as of the readers, before it opens;
    InstrumentError where there is no terminal to show it on."""
    files, at = choose_files(given, rollout, allow_pickle=allow_pickle)
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise InstrumentError(
            five_parts(
                "slime-instrument view",
                expected="a terminal",
                found="a pipe or a file",
                follows="Nothing is shown.",
                next_step="slime-instrument report writes a page, compare --json a document.",
            )
        )
    decode = None
    if tokenizer is not None:
        from slime_instrument._report.samples import decoder

        decode = decoder(tokenizer)
    by: int | None = 0
    while by is not None:
        at = min(max(at + by, 0), len(files) - 1)
        by = Viewer(Source(*files[at], allow_pickle=allow_pickle), decode).run()


class Viewer(App[int]):
    """Shows one train dump; ends with how many rollouts further the user wants to look, or None."""

    CSS = """
    DataTable { height: 45%; }
    #search { display: none; height: 3; }
    #search.shown { display: block; }
    #note, #detail { height: auto; max-height: 4; padding: 0 1; color: $text-muted; }
    #detail { color: $text; background: $panel; }
    #scroll { height: 1fr; padding: 0 1; }
    """
    ENABLE_COMMAND_PALETTE = False  # its key would push ours off a narrow terminal
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "worst_token(1)", "Token", key_display="n/p"),
        Binding("p", "worst_token(-1)", show=False),
        Binding("j", "worst_sample(1)", "Sample", key_display="j/k"),
        Binding("k", "worst_sample(-1)", show=False),
        Binding("right_square_bracket", "exit(1)", "Rollout", key_display="[/]"),
        Binding("left_square_bracket", "exit(-1)", show=False),
        Binding("s", "sort", "Sort"),
        Binding("slash", "search", "Search", key_display="/"),
        Binding("c", "colour", "Colour"),
        Binding("right", "neighbour(1)", show=False),
        Binding("left", "neighbour(-1)", show=False),
        Binding("escape", "leave_search", show=False),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, source: Source, decode: Callable[[int], str] | None = None) -> None:
        super().__init__()
        self.source, self.decode = source, decode
        self.sorted_by, self.wanted, self.mode = "max_abs", "", MODES[0]
        self.shown: list[Row] = []
        self.tokens: Tokens | None = None
        self.chosen: Row | None = None
        self.token: int | None = None
        self._followed = False  # until the user chooses a sample, the first row is shown
        self._worst: list[int] = []
        self._rank: dict[int, int] = {}
        self._findings: list[str] = []
        self._measured = 0
        self._reading = source.rollout_path is not None

    @property
    def busy(self) -> bool:
        """Whether samples are still being measured, or the rollout dump read."""
        return self._reading or self._measured < len(self.source.rows)

    def compose(self) -> ComposeResult:
        yield Header()
        yield Static(id="note", markup=False)
        yield Input(placeholder="position, index, status or finding", id="search")
        yield DataTable(cursor_type="row", zebra_stripes=True)
        yield Static(id="detail", markup=False)
        with VerticalScroll(id="scroll"):
            yield Static(id="tokens", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.title = f"{self.source.train_path.name}: rollout {self.source.dump.rollout_id}"
        table = self.query_one(DataTable)
        for title, name in COLUMNS:
            table.add_column(title, key=name)
        self.refill()
        table.focus()
        self.call_after_refresh(self.begin)

    def begin(self) -> None:
        """Start what takes longer, once the first screen is there."""
        self.measure_all()
        if self._reading:
            self.read_rollout()

    @work(thread=True, group="measure")
    def measure_all(self) -> None:
        """Fill in every sample's mismatch, in the background."""
        worker, last = get_current_worker(), time.monotonic()
        for place in range(len(self.source.rows)):
            if worker.is_cancelled:
                return
            self.source.measure(place)
            self._measured = place + 1
            time.sleep(_BREATH_S)
            if time.monotonic() - last > _REFRESH_S:
                self.call_from_thread(self.refill)
                last = time.monotonic()
        self.call_from_thread(self.refill)

    @work(thread=True, group="rollout")
    def read_rollout(self) -> None:
        """Rewards, status, text and findings, in the background."""
        try:
            findings = self.source.read_rollout()
        except Exception as error:  # whatever is wrong with that file, the train dump can still be looked at
            findings = [f"The rollout dump cannot be used: {error}"]
        self._findings, self._reading = findings, False
        self.call_from_thread(self.refill)

    def refill(self) -> None:
        """Put the samples that fit the search into the table, sorted."""
        table = self.query_one(DataTable)
        self.shown = ordered((row for row in self.source.rows if row.matches(self.wanted)), self.sorted_by)
        # Refilling moves the cursor about; only where it ends is a choice.
        with self.prevent(DataTable.RowHighlighted):
            table.clear()
            for row in self.shown:
                table.add_row(*(cell(value_of(row, name)) for _, name in COLUMNS), key=str(row.place))
            if self._followed and self.chosen in self.shown:
                table.move_cursor(row=self.shown.index(self.chosen))
        if self.shown and not (self._followed and self.chosen in self.shown):
            self.show_sample(self.shown[0])
        self.say()

    def say(self) -> None:
        n = len(self.source.rows)
        title = next(title for title, name in COLUMNS if name == self.sorted_by)
        parts = [f"{len(self.shown)} of {n} samples, by {title}"]
        if self._measured < n:
            parts.append(f"measuring, {self._measured} of {n}")
        if self._reading:
            parts.append("reading the rollout dump")
        parts.append(f"colour: {self.mode}")
        self.query_one("#note", Static).update(
            Text("   ".join(parts) + "".join(f"\n{one}" for one in self._findings[:3]))
        )

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        if event.row_key.value is None:
            return
        row = self.source.rows[int(event.row_key.value)]
        if row is not self.chosen:
            self._followed = True
            self.show_sample(row)

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        self.sorted_by = str(event.column_key.value)
        self.refill()

    def show_sample(self, row: Row) -> None:
        """Show one sample at its worst token."""
        self.chosen = row
        self.tokens = Tokens(self.source.table(row.place), self.source.dump.samples[row.place], self.decode)
        self._worst = self.tokens.worst()
        self._rank = {token: rank for rank, token in enumerate(self._worst)}
        self.show_token(self._worst[0] if self._worst else None)

    def show_token(self, token: int | None) -> None:
        if self.tokens is None or self.chosen is None:
            return
        self.token = token
        page = (token or 0) // PAGE
        self.query_one("#tokens", Static).update(self.tokens.render(page, self.mode, token))
        self.call_after_refresh(
            self._scroll, ((token or 0) - page * PAGE) / max(1, min(PAGE, self.tokens.n - page * PAGE))
        )
        head = f"sample {self.chosen.position if self.chosen.position is not None else '–'}"
        if self.tokens.n > PAGE:
            head += f", tokens {page * PAGE} to {min((page + 1) * PAGE, self.tokens.n) - 1} of {self.tokens.n}"
        if token is None:
            line = f"{head}   no comparable token differs"
        else:
            rank = f"   rank {self._rank[token] + 1} of {len(self._worst)}" if token in self._rank else ""
            line = f"{head}   {self.tokens.describe(token)}{rank}"
        self.query_one("#detail", Static).update(Text(line))

    def _scroll(self, share: float) -> None:
        """Bring the token into view that stands at this share of the page. Lines wrap, so the place is estimated."""
        box = self.query_one("#scroll", VerticalScroll)
        box.scroll_to(y=share * box.virtual_size.height - box.size.height / 2, animate=False)

    def action_worst_token(self, by: int) -> None:
        if self._worst:
            at = self._rank[self.token] + by if self.token in self._rank else 0
            self.show_token(self._worst[min(max(at, 0), len(self._worst) - 1)])

    def action_neighbour(self, by: int) -> None:
        if self.tokens is not None and self.tokens.n:
            self.show_token(min(max((self.token if self.token is not None else -by) + by, 0), self.tokens.n - 1))

    def action_worst_sample(self, by: int) -> None:
        order = sorted((r for r in self.shown if r.max_abs is not None), key=lambda row: -(row.max_abs or 0.0))
        if order:
            at = order.index(self.chosen) + by if self.chosen in order else 0
            row = order[min(max(at, 0), len(order) - 1)]
            self.query_one(DataTable).move_cursor(row=self.shown.index(row))

    def action_exit(self, by: int) -> None:
        """Look at another rollout of the folder."""
        self.exit(by)

    def action_sort(self) -> None:
        names = [name for _, name in COLUMNS]
        self.sorted_by = names[(names.index(self.sorted_by) + 1) % len(names)]
        self.refill()

    def action_colour(self) -> None:
        self.mode = MODES[(MODES.index(self.mode) + 1) % len(MODES)]
        self.show_token(self.token)
        self.say()

    def action_search(self) -> None:
        search = self.query_one("#search", Input)
        search.add_class("shown")
        search.focus()

    def action_leave_search(self) -> None:
        search = self.query_one("#search", Input)
        search.value = ""
        search.remove_class("shown")
        self.query_one(DataTable).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self.wanted = event.value
        self.refill()

    def on_input_submitted(self) -> None:
        self.query_one(DataTable).focus()
