"""The page as a reader meets it, in a real headless Chromium."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .dumps import HOSTILE, one_bad_token, ragged, shifted

Page = Callable[..., Path]


def test_it_opens_without_a_console_error_and_without_a_request(page: Page, browser: Any) -> None:
    browser.open(page(rollouts=3, change=shifted, changed_from=1))
    assert browser.complaints() == []
    assert browser.requests() == []
    for chart in ("trend", "histogram", "density", "decile", "turn"):
        assert browser.js(f"document.querySelectorAll('#{chart} svg path').length") > 3, chart


def test_the_verdict_names_the_worst_token_and_its_link_opens_it(page: Page, browser: Any) -> None:
    browser.open(page(change=one_bad_token))
    verdict = browser.text("#verdict")
    assert "Unexplained: differs more than kernels do" in verdict
    assert "Sample 5, token 7" in verdict
    browser.js("document.querySelector('#verdict a[href*=\"t=7\"]').click()")
    browser.until("document.querySelector('.tok.now')?.dataset.i === '7'")
    assert browser.text("#sample-title") == "Sample 5"
    assert "δ −3" in browser.text("#detail").replace("\n", " ")


def test_a_link_with_a_view_reopens_it(page: Page, browser: Any) -> None:
    path = page(rollouts=2)
    browser.open(path, "#r=0&s=2&t=11&c=mask")
    browser.until("document.querySelector('.tok.now')?.dataset.i === '11'")
    assert browser.text("#sample-title") == "Sample 2"
    assert browser.js("document.getElementById('colour').value") == "mask"
    assert browser.js("document.getElementById('rollout').value") == "0"
    assert browser.js("location.hash") == "#r=0&s=2&t=11&c=mask"


def test_the_table_sorts_by_number_with_what_is_missing_last_and_filters(page: Page, browser: Any) -> None:
    browser.open(page(change=ragged))
    largest = browser.cells("max_abs")
    known = [float(text) for text in largest if text != "–"]
    assert known == sorted(known, reverse=True)
    assert len(known) == 4
    assert largest[4:] == ["–"] * 5
    browser.js("document.querySelector('.tabulator-col[tabulator-field=max_abs] .tabulator-col-title').click()")
    browser.until("document.querySelectorAll('.tabulator-row').length === 9")
    rising = browser.cells("max_abs")
    assert rising == [*reversed(largest[:4]), *largest[4:]]
    browser.js(
        "(() => { const box = document.querySelector('.tabulator-col[tabulator-field=position] input');"
        " box.value = '>=6'; box.dispatchEvent(new Event('keyup')); box.dispatchEvent(new Event('input')); })()"
    )
    browser.until("document.querySelectorAll('.tabulator-row').length === 2")
    assert sorted(browser.cells("position")) == ["6", "7"]
    assert browser.text("#sample-count") == "2 of 9"


def test_keys_step_to_the_next_worst_token_and_sample(page: Page, browser: Any) -> None:
    browser.open(page(change=one_bad_token))
    browser.press("n")
    browser.until("document.querySelector('.tok.now')?.dataset.i === '7'")
    assert browser.text("#sample-title") == "Sample 5"
    first = abs(_delta(browser))
    browser.press("n")
    second = abs(_delta(browser))
    assert second < first == 3
    browser.press("p")
    assert abs(_delta(browser)) == first
    order = browser.cells("position")
    browser.press("j")
    browser.until(f"document.getElementById('sample-title').innerText === 'Sample {order[1]}'")
    browser.press("k")
    browser.until("document.getElementById('sample-title').innerText === 'Sample 5'")


def test_choosing_another_rollout_shows_its_verdict_and_samples(page: Page, browser: Any) -> None:
    browser.open(page(rollouts=3, samples=6, length=60, change=shifted, changed_from=2))
    assert browser.js("document.getElementById('rollout').value") == "2"  # the worst one comes first
    assert "Fault: token-shift" in browser.text("#one")
    assert browser.js("document.querySelectorAll('#findings button').length") == 6
    browser.js(
        "(() => { const box = document.getElementById('rollout');"
        " box.value = '0'; box.dispatchEvent(new Event('change')); })()"
    )
    browser.until("document.getElementById('one').innerText.includes('Ok: no finding')")
    assert browser.js("document.querySelectorAll('#findings button').length") == 0
    browser.until("document.querySelectorAll('.tabulator-row').length === 6")
    assert all(float(text) < 0.02 for text in browser.cells("max_abs"))
    assert browser.js("location.hash") == "#r=0"


def test_a_missing_value_is_a_dash_and_never_a_zero(page: Page, browser: Any) -> None:
    path = page(change=ragged)
    browser.open(path, "#r=0&s=2&t=5")
    browser.until("document.querySelector('.tok.now')?.dataset.i === '5'")
    detail = browser.text("#detail")
    assert "log μ missing" in detail
    assert "δ –" in detail
    browser.open(path, "#r=0&s=0&t=3")
    browser.until("document.querySelector('.tok.now')?.dataset.i === '3'")
    assert "log π NaN" in browser.text("#detail")
    rows = dict(zip(browser.cells("position"), browser.cells("mean_abs"), strict=True))
    assert [rows[position] for position in ("3", "4", "6", "7")] == ["–"] * 4


def test_hostile_text_is_shown_and_never_runs(page: Page, browser: Any) -> None:
    browser.open(page(change=ragged), "#r=0&s=5")
    browser.until("document.getElementById('sample-title').innerText === 'Sample 5'")
    assert browser.js("window.pwned") is None
    assert browser.js("document.querySelectorAll('img').length") == 0
    assert HOSTILE in browser.text("#sample-facts")
    shown = browser.js("[...document.querySelectorAll('#texts pre')].map((box) => box.textContent)")
    assert shown[0] == HOSTILE
    assert HOSTILE in shown[2]
    assert browser.complaints() == []


@pytest.mark.parametrize("run", [{"samples": 0}, {"length": 0}, {"length": 1}, {"samples": 1, "noise": 0.0}])
def test_dumps_with_little_or_nothing_in_them_open(page: Page, browser: Any, run: dict[str, Any]) -> None:
    browser.open(page(**run))
    assert browser.complaints() == []
    assert "NaN" not in browser.text("body")
    browser.press("n", "j", "k")
    assert browser.complaints() == []


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_overflows_and_text_has_contrast(page: Page, browser: Any, width: int, dark: bool) -> None:
    browser.open(page(rollouts=2, change=ragged), "#r=0&s=5", width=width, dark=dark)
    assert browser.js("document.documentElement.scrollWidth") == width
    for selector in ("#verdict dd", "#verdict dt", ".quiet", ".number b", ".tabulator-cell", "#detail b", ".tok", "a"):
        assert browser.js(_CONTRAST.replace("SELECTOR", selector)) >= 4.5, selector


def test_the_theme_button_goes_through_its_three_choices(page: Page, browser: Any) -> None:
    browser.open(page())
    seen = []
    for _ in range(3):
        browser.js("document.getElementById('theme').click()")
        seen.append((browser.text("#theme"), browser.js("document.documentElement.dataset.theme")))
    assert seen == [("Theme: light", "light"), ("Theme: dark", "dark"), ("Theme: system", "light")]


def test_printing_shows_every_chart_in_the_light_theme(page: Page, browser: Any) -> None:
    browser.open(page(), "#r=0&s=1", dark=True)
    browser.js("(() => { window.dispatchEvent(new Event('beforeprint')); })()")
    assert browser.js("document.documentElement.dataset.theme") == "light"
    assert browser.js("document.querySelectorAll('#histogram svg path').length") > 3
    browser.js("(() => { window.dispatchEvent(new Event('afterprint')); })()")
    assert browser.js("document.documentElement.dataset.theme") == "dark"
    assert len(browser.driver.print_page()) > 10_000


def test_a_thousand_long_samples_stay_in_20_mb_and_paint_within_3_seconds(page: Page, browser: Any) -> None:
    path = page(samples=1000, length=4096, prompt=200, tensors=True, change=one_bad_token)
    assert path.stat().st_size <= 20_000_000
    browser.open(path)
    paints = browser.js("performance.getEntriesByType('paint').map((entry) => entry.startTime)")
    assert len(paints) == 2
    assert max(paints) < 3000
    assert browser.complaints() == []
    assert "samples: the" in browser.text("#origin")  # what was left out is stated
    browser.press("n")  # the worst token of the worst sample is never left out
    browser.until("document.querySelector('.tok.now')?.dataset.i === '7'")
    assert browser.text("#sample-title") == "Sample 5"
    assert browser.js("document.querySelectorAll('#tokens .tok').length") <= 2000
    browser.js("[...document.querySelectorAll('#pager button')].at(-1).click()")
    browser.until("document.querySelector('.tok.now')?.dataset.i === '2000'")


def _delta(browser: Any) -> float:
    pairs = browser.js("[...document.querySelectorAll('#detail .pair')].map((pair) => pair.innerText)")
    return float(next(text for text in pairs if text.startswith("δ")).split()[-1].replace("−", "-"))


# Contrast of the first match, as WCAG computes it: text colour over the nearest background that is opaque.
_CONTRAST = """(() => {
  const one = document.querySelector("SELECTOR");
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = (c) => c.slice(0, 3).map((v) => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  let box = one, back = [0, 0, 0, 0];
  while (box && back.length === 4 && back[3] < 1) {
    back = parts(getComputedStyle(box).backgroundColor);
    box = box.parentElement;
  }
  const [a, b] = [light(parts(getComputedStyle(one).color)), light(back)];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
})()"""


def test_a_sweep_is_drawn_and_is_not_there_unasked(page: Page, browser: Any) -> None:
    browser.open(page(rollouts=2))
    assert browser.js("document.getElementById('sweep-box').hidden")
    browser.open(page(rollouts=2, sweep="slime-tis:tis_clip=0.9,1,1.1"))
    assert browser.complaints() == []
    assert browser.js("document.querySelectorAll('#sweep svg path').length") > 8
    assert "slime-tis (slime) with other values of tis_clip" in browser.text("#sweep-note")


def test_a_bar_of_one_token_can_be_seen(page: Page, browser: Any) -> None:
    browser.open(page(change=one_bad_token))
    counts = browser.js("JSON.parse(document.getElementById('data').textContent).rollouts[0].histogram.counts")
    assert counts.count(1) > 1
    boxes = "[...document.querySelectorAll('#histogram svg path')].map((path) => path.getBBox())"
    assert browser.js(f"{boxes}.filter((box) => box.height > 3 && box.width > 1).length") >= sum(
        count > 0 for count in counts
    )


def test_a_heading_that_is_jumped_to_is_not_under_the_bar_above_it(page: Page, browser: Any) -> None:
    browser.open(page(rollouts=2))
    browser.js("document.getElementById('trend-box').scrollIntoView()")
    top, below = "document.getElementById('trend-box')", "document.querySelector('.picker')"
    assert browser.js(f"{top}.getBoundingClientRect().top >= {below}.getBoundingClientRect().bottom")
