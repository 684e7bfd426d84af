"""From files to the page's content, without a browser."""

from __future__ import annotations

import base64
import html
import json
import math
import re
import struct
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_instrument._analysis.corrections import parse_sweep
from slime_instrument._errors import DumpFormatError
from slime_instrument._report.build import write_report
from slime_instrument._report.page import json_in_html

from .dumps import HOSTILE, one_bad_token, ragged, shifted, write_run

pytest.importorskip("jinja2")


class Elements(HTMLParser):
    """What a browser's parser makes of a page. ``text`` is the text of the paragraphs, lists and headings."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def blob(page: Path, name: str) -> bytes:
    match = re.search(rf'<script type="text/plain" id="{name}">([^<]*)</script>', page.read_text())
    assert match is not None, name
    return zlib.decompress(base64.b64decode(match[1]))


def tokens(page: Path, name: str) -> dict[str, Any]:
    """A sample's block, read by its own description."""
    content = blob(page, name)
    (length,) = struct.unpack_from("<I", content)
    head = json.loads(content[4 : 4 + length])
    for array, (kind, at, n) in head["arrays"].items():
        dtype = getattr(torch, kind)
        values = (
            torch.frombuffer(bytearray(content), dtype=dtype, count=n, offset=4 + length + at) if n else torch.empty(0)
        )
        head[array] = values
    return head


def data(page: Path) -> Any:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert match is not None
    return json.loads(match[1])


def test_a_small_page_holds_every_token_bit_for_bit(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", samples=4, change=None)
    written = write_report([run], tmp_path / "out" / "report.html")
    train = torch.load(run / "train_data" / "0.pt", weights_only=True)["samples"]
    for i, sample in enumerate(train):
        shown = tokens(written.path, f"t-0-{i}")
        assert torch.equal(shown["train"], sample["log_probs"])
        assert torch.equal(shown["rollout"], sample["rollout_log_probs"])
        assert shown["ids"].tolist() == sample["tokens"][-40:].tolist()
        assert (shown["kind"] >> 7).tolist() == sample["loss_masks"].tolist()
        assert shown["constants"]["advantage"] == sample["advantages"][0]
        assert (shown["n"], shown["first"], shown["prompt_length"]) == (40, 0, 10)
        # 50 tokens on CP 2: chunks of 13; the response begins at 10, so logits positions 9..48.
        assert shown["chunks"] == [[0, 0], [4, 1], [30, 0]] or shown["chunks"] == [[0, 0], [4, 1], [17, 1], [30, 0]]
        assert shown["turns"] == [0, 20]
    assert written.left_out == []
    assert written.size == written.path.stat().st_size < 3_000_000


def test_what_the_page_lacks_for_its_size_is_stated_and_the_worst_samples_stay(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", samples=60, length=3000, change=one_bad_token)
    whole = write_report([run], tmp_path / "whole.html")
    limit = 3.0
    cut = write_report([run], tmp_path / "cut.html", limit_mb=limit)
    assert cut.size <= limit * 1e6 < whole.size
    held = data(cut.path)["held"][0]
    assert 5 in held
    assert 1 <= len(held) < 60
    assert f"{60 - len(held)} of 60 samples" in cut.left_out[0]
    assert cut.left_out[0] in cut.path.read_text()
    assert len(json.loads(blob(cut.path, "rows-0"))) == 60
    largest = {row["position"]: row["max_abs"] for row in _rows(whole.path)}
    assert max(largest, key=largest.__getitem__) == 5


def test_sample_tables_that_do_not_fit_keep_the_samples_that_differ_most(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rollouts=3, samples=400, length=3, change=shifted, changed_from=2)
    written = write_report([run], tmp_path / "report.html", limit_mb=2.75)
    sizes = [len(json.loads(blob(written.path, f"rows-{i}"))) for i in range(3)]
    assert sizes[2] == 400
    assert sizes[0] < 400
    assert any("Sample tables" in text for text in written.left_out)


def test_a_huge_response_is_cut_around_its_worst_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_instrument._report.samples.LONGEST", 50)

    def change(train: list[dict[str, Any]], _source: list[dict[str, Any]]) -> None:
        train[0]["log_probs"][170] -= 1.0

    run = write_run(tmp_path / "run", samples=1, length=200, change=change)
    shown = tokens(write_report([run], tmp_path / "report.html").path, "t-0-0")
    assert (shown["first"], shown["n"], shown["total"]) == (145, 50, 200)
    delta = (shown["train"] - shown["rollout"]).abs()
    assert int(delta.argmax()) + shown["first"] == 170


def test_missing_values_are_null_in_the_table_and_nan_in_the_tokens(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", change=ragged)
    page = write_report([run], tmp_path / "report.html").path
    rows = _rows(page)
    assert [row["left_out"] for row in rows] == [
        None, None, None, "no-response", "tokens-differ", "train only: tokens-differ", None, "masked", "removed",
    ]  # fmt: skip
    by_position = {row["position"]: row for row in rows if row["left_out"] != "train only: tokens-differ"}
    assert [by_position[p]["mean_abs"] for p in (3, 4, 6, 7)] == [None] * 4
    assert by_position[7]["reward"] is None
    assert by_position[5]["reward"] is None
    assert by_position[5]["reward_text"].startswith('{"</script>')
    shown = tokens(page, "t-0-2")
    assert shown["rollout"][5].isnan()
    assert tokens(page, "t-0-3")["n"] == 0


def test_hostile_text_is_nowhere_markup(tmp_path: Path) -> None:
    run = write_run(tmp_path / HOSTILE.replace("/", "_"), change=ragged)
    text = write_report([run], tmp_path / "report.html").path.read_text()
    elements = Elements()
    elements.feed(text)
    assert "img" not in elements.names
    # Three scripts of ours, the data, one block of rows and one per joined sample.
    assert elements.names.count("script") == 3 + 1 + 1 + 7
    assert not [name for name in elements.attributes if name.startswith("on")]
    assert "window.pwned=1" in elements.text  # it is there to be read: the folder's name
    assert json.loads(json_in_html({"a": HOSTILE + "\u2028&"})) == {"a": HOSTILE + "\u2028&"}
    assert not set(json_in_html(HOSTILE)) & set("<>&")


def test_the_page_asks_no_one_for_anything_and_runs_only_its_own_scripts(tmp_path: Path) -> None:
    text = write_report([write_run(tmp_path / "run")], tmp_path / "report.html").path.read_text()
    assert "default-src 'none'; script-src 'sha256-" in html.unescape(text[:2000])
    assert "sourceMappingURL" not in text
    assert not re.search(r"<(?:script|img|iframe|source)[^>]*\ssrc=", text[: text.index("<script>")])
    assert re.findall(r"<link[^>]*>", text) == ['<link rel="icon" href="data:,">']


def test_no_pair_at_all_is_an_error_that_says_why(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "train_data" / "0.pt").unlink()
    with pytest.raises(DumpFormatError, match=r"found rollout dumps of rollout 0 and no train dump") as caught:
        write_report([run], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
    assert "No report was written" in str(caught.value)


@pytest.mark.parametrize("name", ["train_data/0.pt", "other.pt"])
def test_a_dump_is_never_overwritten_by_the_report(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run")
    before = (run / "train_data" / "0.pt").read_bytes()
    with pytest.raises(DumpFormatError, match=r"the name of an HTML file"):
        write_report([run], run / name)
    assert (run / "train_data" / "0.pt").read_bytes() == before


def test_a_pair_that_cannot_be_compared_is_skipped_and_the_others_are_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rollouts=2)
    payload = torch.load(run / "train_data" / "1.pt", weights_only=True)
    payload["format_version"] = 9
    torch.save(payload, run / "train_data" / "1.pt")
    written = write_report([run], tmp_path / "report.html")
    assert [pair.rollout_id for pair in written.pairs] == [0]
    assert any("format_version 9" in one.reason for one in written.skipped)
    assert "not used" in written.path.read_text()


def test_tokens_are_shown_as_text_with_a_local_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(1000)}
    words["<script>"] = 1000
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    (tmp_path / "tokenizer").mkdir()
    model.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    run = write_run(tmp_path / "run", samples=2)
    page = write_report([run], tmp_path / "report.html", tokenizer=tmp_path / "tokenizer").path
    ids = {int(i) for name in ("t-0-0", "t-0-1") for i in tokens(page, name)["ids"]}
    assert json.loads(blob(page, "words")) == {str(i): f"w{i}" for i in sorted(ids)}
    with pytest.raises(ValueError, match=r"a local folder with a tokenizer"):
        write_report([run], tmp_path / "report.html", tokenizer=tmp_path / "nothing")


def _rows(page: Path) -> list[dict[str, Any]]:
    columns = data(page)["columns"]
    return [dict(zip(columns, row, strict=True)) for row in json.loads(blob(page, "rows-0"))]


def test_a_sweep_of_a_correction_is_a_curve_over_all_rollouts(tmp_path: Path) -> None:
    def far(train: list[dict[str, Any]], _source: list[dict[str, Any]]) -> None:
        for one in train:
            one["log_probs"][::4] += math.log(3.0)

    run = write_run(tmp_path / "run", rollouts=2, change=far)
    sweep = parse_sweep("slime-tis:tis_clip=1.5,2,4")
    curve = data(write_report([run], tmp_path / "report.html", sweep=sweep).path)["sweep"]
    assert (curve["policy"], curve["parameter"], curve["values"]) == ("slime-tis", "tis_clip", [1.5, 2.0, 4.0])
    assert curve["touched"][0] == curve["touched"][1] > 0.1
    assert curve["touched"][2] == 0
    assert curve["mean_weight"] == sorted(curve["mean_weight"])
    assert all(value is not None for value in (*curve["ess"], *curve["advantage_kept"]))
    assert data(write_report([run], tmp_path / "report.html").path)["sweep"] is None
