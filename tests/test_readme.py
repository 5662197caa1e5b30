"""The README is run: its pipelines, its tutorial, its commands, its picture and its lists of names."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from flowdflash import stages
from flowdflash.cli import COMMANDS
from flowdflash.config.check import load
from flowdflash.items import StepRecord
from flowdflash.plugin.loader import load_plugins
from flowdflash.render import render

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


def after(mark: str) -> str:
    return README.split(f"<!-- {mark} -->")[1].split("```bash\n")[1].split("```")[0]


def test_nothing_is_left_to_fill_in() -> None:
    for path in (ROOT / "README.md", ROOT / "data" / "README.md"):
        assert "@@" not in path.read_text(encoding="utf-8"), path


def test_the_first_pipeline_and_the_tutorial_work_as_printed(tmp_path: Path) -> None:
    first, second = blocks("yaml")[:2]
    (tmp_path / "example.yaml").write_text(first, encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(second, encoding="utf-8")
    (tutorial,) = [b for b in blocks("bash") if "plugins new" in b]
    for line in tutorial.strip().splitlines():
        words = shlex.split(line)
        words[:1] = [sys.executable, "-m", "flowdflash.cli"] if words[0] == "flowdflash" else [sys.executable]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
    pipeline = load(tmp_path / "mine.yaml", load_plugins(builtin=[stages]))
    assert pipeline.graph.nodes["order"].type == "my_order"
    assert pipeline.graph.nodes["drafter"].config.accumulate == 4


def test_every_command_and_option_in_the_text_exists() -> None:
    lines = re.findall(r"flowdflash ([a-z]+)([^`\n]*)", README)
    used = {(name, rest) for name, rest in lines if name in COMMANDS}
    assert {name for name, _ in used} >= {"run", "eval", "validate", "graph", "stages", "plugins", "schema"}
    for name, rest in used:
        command = importlib.import_module(f"flowdflash.cli.{name}_command").command
        known = {o for p in command.params for o in p.opts}
        for sub in getattr(command, "commands", {}).values():
            known |= {o for p in sub.params for o in p.opts}
        wrong = [word for word in rest.split() if word.startswith("--") and word not in known]
        assert not wrong, f"flowdflash {name}{rest}"


@pytest.mark.parametrize("mark", ["main command", "test command"])
def test_both_set_up_commands_start_from_nothing_and_name_files_that_exist(mark: str) -> None:
    text = after(mark)
    assert text.startswith("python3 -m venv .venv && . .venv/bin/activate\n")
    assert "-c constraints.txt" in text and (ROOT / "constraints.txt").is_file()
    for pipeline in re.findall(r"pipelines/\S+\.yaml", README):
        assert (ROOT / pipeline).is_file(), pipeline


def test_the_picture_is_the_default_pipeline_as_it_is() -> None:
    pipeline = load(ROOT / "pipelines" / "dflash.yaml", load_plugins(builtin=[stages]))
    drawn = render(pipeline.graph, "svg", name=pipeline.name)
    assert (ROOT / "docs" / "dflash.svg").read_text(encoding="utf-8").strip() == drawn.strip()


def test_all_names_of_a_record_are_listed() -> None:
    text = README.split("A record in `metrics.jsonl`")[1].split("Ctrl-C")[0]
    assert set(re.findall(r"`([a-z_]+)`", text)) == {f.name for f in fields(StepRecord)}


def test_every_stage_type_in_the_table_exists_and_none_is_missing() -> None:
    table = README.split("| kind | types |")[1].split("\n\n")[0]
    listed = {
        (kind, name)
        for kind, names in re.findall(r"^\| ([a-z-]+) \| ([^|]+) \|", table, re.M)
        for name in re.findall(r"`(\w+)`", names)
    }
    there = {(s.kind, s.type) for s in load_plugins(builtin=[stages]).registry.types()}
    assert listed == there
