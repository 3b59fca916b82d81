"""The page shows what statistics.json says, needs nothing else, and a browser shows it whole."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from log_lines import run_folder, spec

from dcpbench import report
from dcpbench.analysis.pipeline import analyze_run

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PICTURES = {"launches.png", "iterations.png", "loss.png", "lengths.png", "cp_sizes.png", "packing.png"}


class Page(HTMLParser):
    """Text by `data-figure`, cells of tables, and every attribute that may load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.keyed: dict[str, str] = {}
        self.cells: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self._key: str | None = None
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        self._key = values.get("data-figure")
        names = ("src", "href", "xlink:href", "action", "data")
        self.loads += [v for n in names if (v := values.get(n)) and not v.startswith("#")]
        if tag in ("td", "th"):
            self.cells.append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._key = None
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._key:
            self.keyed[self._key] = data
        if self._in_cell:
            self.cells[-1] += data


def at(document: Any, path: str) -> Any:
    for part in path.split("."):
        document = document[part]
    return document


@pytest.fixture
def written(tmp_path: Path) -> Path:
    steady = [1.0 + 0.01 * (i % 5) for i in range(12)]
    times = {}
    for pair in range(1, 5):
        times[f"{pair:02d}-baseline"] = [t * (1 + 0.002 * pair) for t in steady]
        times[f"{pair:02d}-dcp"] = [0.8 * t for t in steady]
    folder = run_folder(tmp_path / "run", times, spec(4, 12, 2))
    report.write(analyze_run(folder), folder / "analysis")
    return folder / "analysis"


def check(page: Page, statistics: Any) -> None:
    assert set(page.keyed) == {"verdict", "speedup.verdict", "speedup.total", "speedup.interval.low",
                               "speedup.interval.high"}  # fmt: skip
    for key, shown in page.keyed.items():
        value = at(statistics, key)
        assert shown.lower() == (value if isinstance(value, str) else f"{value:.3f}"), key
    for case in statistics["cases"].values():
        assert f"{case['mean_ms']:,.1f}" in page.cells
        assert f"{case['tokens_per_second']:,.0f}" in page.cells
    for gate in statistics["parity"]["gates"]:
        assert f"{gate['name']} {gate['title']}" in page.cells
    for ratio in statistics["speedup"]["by_pair"]:
        assert f"{ratio:.3f}" in page.cells


def test_the_page_shows_what_the_statistics_say(written: Path) -> None:
    statistics = json.loads((written / "statistics.json").read_text())
    text = (written / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    check(page, statistics)
    assert page.tags.count("svg") == len(PICTURES)
    assert {path.name for path in written.glob("*.png")} == PICTURES


def test_the_page_needs_nothing_else(written: Path) -> None:
    text = (written / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.loads == []
    assert "script" not in page.tags
    assert not re.search(r"url\((?!#)|@import", text)
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", text))
    assert {address.split("/")[2] for address in addresses} <= {"www.w3.org"}, "names of XML, never loaded"


def test_one_pair_and_faults_have_a_page_too(tmp_path: Path) -> None:
    times = {"01-baseline": [1.0] * 6, "01-dcp": [0.5] * 6}
    folder = run_folder(tmp_path / "a", times)
    report.write(analyze_run(folder), folder / "analysis")
    text = (folder / "analysis" / "report.html").read_text(encoding="utf-8")
    assert "one pair of launches: no interval" in text
    assert Page(text).keyed["speedup.verdict"] == "indicative"
    broken = run_folder(tmp_path / "b", times, changes={"01-dcp": {3: {"loss": None}}})
    report.write(analyze_run(broken), broken / "analysis")
    text = (broken / "analysis" / "report.html").read_text(encoding="utf-8")
    assert Page(text).keyed == {"verdict": "FAILED"}
    assert "loss missing" in text
    assert "<svg" not in text
    assert not list((broken / "analysis").glob("*.png"))


def test_text_cannot_become_markup(tmp_path: Path) -> None:
    from dataclasses import replace

    from dcpbench.report import html

    analysis = analyze_run(run_folder(tmp_path, {"01-baseline": [1.0] * 6, "01-dcp": [0.5] * 6}))
    page = html.write(replace(analysis, name="<b>x</b>", cautions=("<script>alert(1)</script> & more",)))
    assert "script" not in Page(page).tags
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in page


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
@pytest.mark.parametrize("width", [1280, 500])
def test_a_browser_shows_it_whole(written: Path, tmp_path: Path, width: int) -> None:
    """Rendered by a real browser: the same figures, and nothing wider than the window but what scrolls."""
    page = tmp_path / "page.html"
    text = (written / "report.html").read_text(encoding="utf-8")
    # The page itself allows no script; the copy for this test reports its width and nothing more.
    text = re.sub(r"<meta http-equiv=[^>]*>", "", text)
    probe = "<script>document.body.dataset.wide = document.documentElement.scrollWidth - window.innerWidth</script>"
    page.write_text(text.replace("</body>", probe + "</body>"), encoding="utf-8")
    done = subprocess.run(
        [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--hide-scrollbars", f"--window-size={width},900", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    check(Page(done.stdout), json.loads((written / "statistics.json").read_text()))
    found = re.search(r'data-wide="(-?\d+)"', done.stdout)
    assert found is not None
    assert int(found[1]) <= 0
