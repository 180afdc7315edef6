"""Every entry of docs/found.md reproduces on the installed release; one that is gone is news for that page."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from impls.peers import found

PAGE = Path(__file__).parent.parent.parent / "docs" / "found.md"


@pytest.mark.parametrize("name", sorted(found.FOUND))
def test_the_finding_reproduces(name: str) -> None:
    finding = found.FOUND[name]
    missing = [package for package in finding.packages if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install 'paritree[peers]'")
    there, lines = finding.run()
    assert there, f"{name} is gone: {lines}"


def test_the_page_lists_every_finding_and_no_other() -> None:
    headings = {line.split("`")[1] for line in PAGE.read_text("utf-8").splitlines() if line.startswith("### `")}
    assert headings == set(found.FOUND)


def test_an_unknown_name_is_answered_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert found.main(["nothing"]) == 2
    assert "llama-flash-attention" in capsys.readouterr().out
