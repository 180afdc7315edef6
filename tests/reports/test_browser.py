"""The page in a browser: its script runs under its own policy, sorts, filters and copies; nothing overflows a phone."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from reports.page import write_report
from reports.synthetic import fill

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
pytestmark = [pytest.mark.drill, pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")]

POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
STEPS = """
<script>
const out = {};
const rows = () => Array.from(document.querySelectorAll("#finding-rows > tr")).filter((r) => !r.hidden);
const head = (name) => Array.from(document.querySelectorAll(".findings-table thead th")).find((h) => h.textContent.trim() === name);
const column = (name) => { const i = head(name).cellIndex; return rows().map((r) => r.cells[i].textContent.trim()); };
out.all = rows().length;
head("Hits").querySelector("button").click();
out.first = head("Hits").getAttribute("aria-sort");
out.down = column("Hits").map(Number);
head("Hits").querySelector("button").click();
out.second = head("Hits").getAttribute("aria-sort");
out.up = column("Hits").map(Number);
head("Share").querySelector("button").click();
out.share = column("Share");
const search = document.querySelector("#finding-tools input");
search.value = "HUNG loop"; search.dispatchEvent(new Event("input"));
out.hung = column("Verdict");
out.articles = Array.from(document.querySelectorAll("article")).filter((a) => !a.hidden).length;
out.said = document.querySelector("#finding-tools [role=status]").textContent;
search.value = ""; search.dispatchEvent(new Event("input"));
const known = document.querySelector("button[data-status=known]"); known.click();
out.known = column("Status");
out.pressed = known.getAttribute("aria-pressed");
const ground = () => getComputedStyle(document.body).backgroundColor;
const before = ground(); document.getElementById("theme").click();
out.theme = before !== ground();
out.copy = Array.from(document.querySelectorAll("button.copy")).every((b) => !b.hidden);
out.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
document.title = "RESULT " + JSON.stringify(out);
</script>
"""


def dumped(path: Path, profile: Path, width: int) -> str:
    assert BROWSER is not None
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", f"--window-size={width},1200"]
    command += ["--virtual-time-budget=3000", "--dump-dom", path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    return write_report(fill(folder / "store", trials=200), folder / "report.html")


def test_the_script_runs_under_the_policy_of_the_page(page: Path, tmp_path: Path) -> None:
    assert "6 of 6 shown" in dumped(page, tmp_path, 1280)


@pytest.mark.parametrize("width", [1280, 500])
def test_sorting_filtering_and_theme(page: Path, tmp_path: Path, width: int) -> None:
    import json

    copy = tmp_path / "steps.html"
    copy.write_text(POLICY.sub("", page.read_text("utf-8")).replace("</body>", STEPS + "</body>"), "utf-8")
    found = re.search(r"<title>RESULT (.*?)</title>", dumped(copy, tmp_path / "profile", width))
    assert found
    out = json.loads(found[1])
    assert out["all"] == 6
    assert (out["first"], out["second"]) == ("descending", "ascending")
    assert out["down"] == sorted(out["down"], reverse=True) and out["up"] == out["down"][::-1]
    assert out["share"][0] == "∞" and out["share"][-1] == "–"
    assert (out["hung"], out["articles"], out["said"]) == (["HUNG"], 1, "1 of 6 shown")
    assert out["known"] == ["known", "known"] and out["pressed"] == "true"
    assert out["theme"] and out["copy"] and out["overflow"] <= 0


def test_a_phone_scrolls_inside_the_tables_only(page: Path, tmp_path: Path) -> None:
    """Chromium windows are at least 500 pixels wide, so the page sits in a frame of 400."""
    inner = tmp_path / "inner.html"
    steps = "<script>document.title = 'x'; parent.postMessage(document.documentElement.scrollWidth, '*');</script>"
    inner.write_text(POLICY.sub("", page.read_text("utf-8")).replace("</body>", steps + "</body>"), "utf-8")
    outer = tmp_path / "outer.html"
    outer.write_text(
        "<script>addEventListener('message', (e) => { document.title = 'WIDTH ' + e.data; });</script>"
        '<iframe src="inner.html" style="width:400px;height:900px;border:0"></iframe>'
    )
    found = re.search(r"<title>WIDTH (\d+)</title>", dumped(outer, tmp_path / "profile", 500))
    assert found and int(found[1]) <= 400
