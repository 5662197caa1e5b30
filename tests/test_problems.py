"""Problems as text, JSON and GitHub annotations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowdflash.config.problems import as_github, as_json, as_text
from flowdflash.errors import Problem


def test_text_has_the_line_and_a_caret_under_the_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pipelines").mkdir()
    Path("pipelines/dflash.yaml").write_text("\n" * 6 + "    edges: [512, 1k]\n")
    problem = Problem(
        "input should be a valid integer", "stages.buckets.edges.1", "pipelines/dflash.yaml", 7, 18, "write 1024"
    )
    assert as_text([problem]) == (
        "pipelines/dflash.yaml:7:18: stages.buckets.edges.1: input should be a valid integer\n"
        "     7 |     edges: [512, 1k]\n"
        "       |                  ^\n"
        "       hint: write 1024"
    )


@pytest.mark.parametrize(
    ("line", "column", "caret"),
    [("\ta: 1", 2, "\t^"), ("größe: 1", 8, "       ^"), ("大: 1", 4, "    ^"), ("a\u0301: 1", 5, "   ^")],
)
def test_caret_stands_under_tabs_and_wide_and_combining_signs(
    line: str, column: int, caret: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("\ufeff" + line + "\r\nb: 2\r\n", encoding="utf-8")
    assert as_text([Problem("m", "p", str(path), 1, column)]).splitlines()[-1] == f"       | {caret}"


def test_long_line_is_shown_around_the_column(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: [" + "1, " * 2000 + "X" + ", 1" * 2000 + "]\n")
    _, line, caret = as_text([Problem("m", "p", str(path), 1, 6005)]).splitlines()
    assert len(line) < 200 and line[caret.index("^")] == "X"


def test_warning_says_so_and_a_place_outside_files_shows_no_line() -> None:
    problems = [
        Problem("m", "a", severity="warning"),
        Problem("n", "b", "--set b"),
        Problem("o", "", "gone.yaml", 3, 4),
    ]
    assert as_text(problems) == "warning: a: m\n--set b: b: n\ngone.yaml:3:4: o"


def test_nothing_in_a_message_breaks_a_line_or_moves_the_cursor() -> None:
    assert as_text([Problem("a\nb\x1b[2J\udc80", hint="c\nd")]) == "a b\ufffd[2J\ufffd\n       hint: c d"


def test_json_holds_every_field() -> None:
    problem = Problem("größe", "a.b", "x.yaml", 1, 2, "h", "warning")
    (told,) = json.loads(as_json([problem]))
    assert Problem(**told) == problem and as_json([]) == "[]"


def test_github_annotations_are_escaped() -> None:
    problems = [
        Problem("100%\nsure", "a", "x,y:z.yaml", 1, 2, "h"),
        Problem("n", "b", "--set b", severity="warning"),
        Problem("o"),
    ]
    assert as_github(problems).splitlines() == [
        "::error file=x%2Cy%3Az.yaml,line=1,col=2::a: 100%25%0Asure (h)",
        "::warning::--set b: b: n",
        "::error::o",
    ]
