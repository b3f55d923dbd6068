"""What a comparison looks like: Markdown, terminal, and a page that a browser opens without a network or an error."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lockstep.cli import comparison
from lockstep.engine import report_html, report_markdown

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def page(document: dict[str, Any]) -> str:
    return report_html.render(document)


def test_markdown_begins_with_the_table_and_is_short(document: dict[str, Any]) -> None:
    lines = report_markdown.render(document).splitlines()
    assert lines[0] == "### Before (reference) and after"
    assert lines[2].startswith("| run | verdict | tokens/s | vs reference |")
    assert lines[4].startswith("| `any@1+0` | reference |")
    assert len({line.count("|") for line in lines[2 : 4 + len(document["rows"])]}) == 1
    assert "**DIVERGED**" in "\n".join(lines) and len(lines) < 2 * len(document["rows"]) + 10


def test_two_results_side_by_side(document: dict[str, Any]) -> None:
    after = copy.deepcopy(document)
    row = next(r for r in after["rows"] if r["label"] == "tp@2+0")
    row["speed"]["tokens_per_s"]["median"] *= 1.5
    row["verdict"] = "tie"
    after["rows"] = [r for r in after["rows"] if r["label"] != "tp@2+3"]
    text = report_markdown.render_changes(document, after)
    assert "identical -> tie" in text and "+50.0%" in text and "| `tp@2+3` | only before |" in text
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
    comparison.show_changes(console, document, after)
    assert "identical -> tie" in console.export_text()


def test_the_terminal_stays_within_100_columns(document: dict[str, Any]) -> None:
    wide = copy.deepcopy(document)
    for row in wide["rows"]:
        for position in row.get("acceptance", {}).get("per_position", []):
            position["rate"] = 1.0
        for found in row.get("speed", {}).values():
            found["low"], found["high"] = 0.123, 0.456
    console = Console(record=True, width=140, file=open("/dev/null", "w"))  # noqa: SIM115
    comparison.show(console, wide)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 100
    table = [line for line in lines if line.startswith("sp-late:gather-sum@2+3")]
    assert len(table) == 2 and "100% 100% 100%" in table[0] and "(0.12-0.46)" in table[0]  # each on one line


def test_the_page_needs_nothing_from_elsewhere(page: str) -> None:
    links = re.findall(r"""(?:src|href)\s*=\s*["']([^"']*)|url\(([^)]*)\)|@import\s+(\S+)""", page)
    outside = [link for group in links for link in group if link and not link.startswith(("#", "data:"))]
    assert not outside and "<script" not in page
    assert page.count("<svg") >= 6 and "#0a00" not in page and "#0b00" not in page  # every stand-in has its colour


def test_text_from_a_model_is_text_in_the_page(document: dict[str, Any]) -> None:
    row = copy.deepcopy(next(r for r in document["rows"] if r["label"] == "sp-early@2+0"))
    hostile = document | {"rows": [row]}
    row["first_difference"]["text_here"] = "<script>alert(1)</script>"
    assert "<script" not in report_html.render(hostile)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
@pytest.mark.parametrize("scheme,number", (("light", 1), ("dark", 0)))
def test_a_browser_opens_the_page(
    page: str, scheme: str, number: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The picture stays in pytest's folder of this run; numbers are Chromium's own for its preferred colour scheme."""
    folder = tmp_path_factory.getbasetemp() / "screenshots"
    folder.mkdir(exist_ok=True)
    file, picture = folder / "report.html", folder / f"report-{scheme}.png"
    probe = "<script>document.title = getComputedStyle(document.body).backgroundColor</script>"
    file.write_text(page.replace("</body>", f"{probe}</body>"))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,4200"]
    options += [f"--blink-settings=preferredColorScheme={number}", "--enable-logging=stderr", "--v=0"]
    options += [f"--user-data-dir={folder / scheme}", "--virtual-time-budget=2000"]
    shot = browse(*options, f"--screenshot={picture}", file.as_uri())
    assert picture.stat().st_size > 50_000, shot
    dumped = browse(*options, "--dump-dom", file.as_uri())
    assert "CONSOLE" not in shot + dumped  # how Chromium logs what a page writes to its console, errors above all
    background = re.search(r"<title>rgb\((\d+)", dumped)
    assert background and (int(background[1]) > 128) is (scheme == "light")


def browse(*arguments: str) -> str:
    assert CHROMIUM
    ran = subprocess.run([CHROMIUM, *arguments], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr


def test_the_browser_check_can_fail(page: str, tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("no chromium here: apt-get install chromium")
    file = tmp_path / "broken.html"
    file.write_text(page.replace("</body>", "<script>nothing.here()</script></body>"))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    assert "CONSOLE" in browse(*options, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri())
