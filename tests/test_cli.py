"""The command line: what each command prints and where, and its exit codes 0, 1, 2, 78, 130 and 143."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runs import SHORT, TINY, invoke, json_lines, overrides

from flowdflash.cli import COMMANDS
from flowdflash.stages.synthetic_lengths import SyntheticLengths

FIVE_MISTAKES = f"""\
version: 1
extends: {TINY}
stages:
  corpus: {{samples: many}}
  buckets: {{token_budgett: 256}}
  order: {{type: stratifyed}}
  drafter: {{inputs: targt}}
  metrics: {{inputs: drafter.recordz}}
"""

WARNED = f"version: 1\nextends: {TINY}\nvars: {{unused: 1}}\n"

BREAKS = '''\
"""A toy target that fails at its third batch."""
from flowdflash.errors import ModelInvalid
from flowdflash.plugin import hookimpl
from flowdflash.stage import TargetForward
from flowdflash.stages.toy_target import ToyTarget


class Breaks(TargetForward):
    """Fails at its third batch."""

    type = "breaks"
    Config = ToyTarget.Config

    def __init__(self, config):
        super().__init__(config)
        self.inner = ToyTarget(config)

    def check(self, check):
        return self.inner.check(check)

    def open(self, ctx):
        self.inner.open(ctx)

    def forward(self, batch):
        if batch.info.seq == 2:
            raise ERROR(f"no more, ids {list(batch.info.sample_ids)}")
        return self.inner.forward(batch)


@hookimpl
def flowdflash_register(registry):
    """Adds the target ``breaks``."""
    registry.register(Breaks)
'''

TELLS = '''\
"""Tells the test that a step has been taken."""
import os
from flowdflash.plugin import hookimpl


@hookimpl
def flowdflash_step(record):
    """Writes a byte at the third step."""
    if record.step == 3:
        os.write(int(os.environ["STEP_PIPE"]), b"3")
'''


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def script(code: str, *arguments: object, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


LOADED = """
import sys
from click.testing import CliRunner
from flowdflash.cli import main
for arguments in {commands!r}:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0 and result.output, (arguments, result.output, result.exception)
    found = [m for m in {modules!r} if m in sys.modules]
    assert not found, (arguments, found)
print("clean")
"""


def test_help_imports_nothing_heavy() -> None:
    heavy = ["torch", "pydantic", "transformers", "numpy", "networkx", "rich", "ruamel.yaml", "pluggy"]
    done = script(LOADED.format(commands=[["--help"], ["--version"], ["-h"]], modules=heavy))
    assert done.stdout.strip() == "clean", done.stderr


def test_what_only_checks_or_lists_never_imports_torch() -> None:
    commands = [
        ["validate", str(TINY)],
        ["graph", str(TINY)],
        ["graph", str(TINY), "--format", "svg"],
        ["schema"],
        ["stages"],
        ["stages", "drafter"],
        ["plugins", "list"],
        ["plugins", "show", "checkpoint"],
    ]
    done = script(LOADED.format(commands=commands, modules=["torch", "transformers", "wandb"]))
    assert done.stdout.strip() == "clean", done.stderr


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_is_listed_and_explains_itself(command: str) -> None:
    assert re.search(rf"^  {command} +{re.escape(COMMANDS[command][:20])}", invoke("--help").stdout, re.MULTILINE)
    told = invoke(command, "--help")
    assert told.exit_code == 0 and told.stdout.startswith("Usage: ")
    summary = " ".join(told.stdout.split())
    assert COMMANDS[command].split(",")[0].split(".")[0][:30] in summary


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["rnu"], "there is no command 'rnu'; did you mean 'run'?"),
        (["validate"], "Missing argument 'FILE'"),
        (["validate", str(TINY), "--format", "xml"], "'xml' is not one of"),
        (["run", str(TINY), "--fast"], "No such option"),
        (["stages", "drafters"], "there is no kind 'drafters'; kinds are source, bucketer"),
        (["plugins", "show", "nothing"], "no plugin is called 'nothing'"),
        (["plugins", "new", "mine", "--kind", "drafter"], "'drafter' is not one of"),
        (["eval", "/nowhere/at/all"], "does not exist"),
        (["eval", ".", "--num-prompts", "0"], "0 is not in the range"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(arguments: list[str], told: str) -> None:
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in " ".join(result.stderr.split())


def test_a_valid_pipeline_is_said_to_be_valid() -> None:
    result = invoke("validate", TINY)
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{TINY}: valid, 9 stages\n", "")
    as_json = invoke("validate", TINY, "--format", "json")
    assert (as_json.exit_code, json.loads(as_json.stdout)) == (0, [])
    assert invoke("validate", TINY, "--format", "github").stdout == ""


MISTAKES = ("samples", "token_budgett", "stratifyed", "targt", "recordz")


def test_five_mistakes_are_told_at_once_with_places_and_hints(tmp_path: Path) -> None:
    file = written(tmp_path / "five.yaml", FIVE_MISTAKES)
    result = invoke("validate", file)
    assert (result.exit_code, result.stderr) == (78, "")
    lines = result.stdout.splitlines()
    heads = [line for line in lines if line.startswith(f"{file}:")]
    assert [int(line.removeprefix(f"{file}:").split(":")[0]) for line in heads] == [4, 5, 6, 7, 8]
    for mistake, head in zip(MISTAKES, heads, strict=True):
        assert mistake in head or mistake in lines[lines.index(head) + 1]
    assert "^" in lines[lines.index(heads[0]) + 2]
    for hint in ("token_budget", "stratified", "target", "drafter.records"):
        assert hint in result.stdout


def test_problems_for_programs_and_for_github_go_to_stdout_too(tmp_path: Path) -> None:
    file = written(tmp_path / "five.yaml", FIVE_MISTAKES)
    as_json = invoke("validate", file, "--format", "json")
    problems = json.loads(as_json.stdout)
    assert (as_json.exit_code, as_json.stderr) == (78, "")
    assert [(p["line"], p["severity"]) for p in problems] == [(line, "error") for line in (4, 5, 6, 7, 8)]
    assert all(p["file"] == str(file) and p["column"] > 0 and p["message"] for p in problems)
    github = invoke("validate", file, "--format", "github")
    assert (github.exit_code, github.stderr) == (78, "")
    lines = github.stdout.splitlines()
    assert len(lines) == 5 and all(re.match(r"::error file=.*five\.yaml,line=\d,col=\d+::", line) for line in lines)


def test_a_warning_does_not_stop_unless_it_is_asked_to(tmp_path: Path) -> None:
    file = written(tmp_path / "warned.yaml", WARNED)
    relaxed = invoke("validate", file)
    assert relaxed.exit_code == 0 and "warning: vars.unused: var 'unused' is never used" in relaxed.stdout
    assert relaxed.stdout.splitlines()[-1] == f"{file}: valid, 9 stages"
    assert [p["severity"] for p in json.loads(invoke("validate", file, "--format", "json").stdout)] == ["warning"]
    strict = invoke("validate", file, "--strict")
    assert strict.exit_code == 78 and "vars.unused" in strict.stdout and "warning:" not in strict.stdout


def test_warnings_of_other_commands_go_to_stderr(tmp_path: Path) -> None:
    result = invoke("graph", written(tmp_path / "warned.yaml", WARNED))
    assert result.exit_code == 0 and "vars.unused" in result.stderr and "unused" not in result.stdout


@pytest.mark.parametrize("command", ["validate", "graph", "run"])
def test_a_file_that_is_not_there_is_an_invalid_pipeline(command: str, tmp_path: Path) -> None:
    result = invoke(command, tmp_path / "none.yaml")
    told = result.stdout if command == "validate" else result.stderr
    assert result.exit_code == 78 and "none.yaml" in told and "Traceback" not in told


@pytest.mark.parametrize("command", ["graph", "run"])
def test_problems_of_commands_that_print_something_else_go_to_stderr(command: str, tmp_path: Path) -> None:
    result = invoke(command, written(tmp_path / "five.yaml", FIVE_MISTAKES))
    assert (result.exit_code, result.stdout) == (78, "")
    assert all(mistake in result.stderr for mistake in MISTAKES)


def test_set_is_obeyed_and_its_mistakes_are_told(tmp_path: Path) -> None:
    assert json.loads(invoke("graph", TINY, "--format", "json", "--set", "name=renamed").stdout)["name"] == "renamed"
    wrong = invoke("validate", TINY, "--set", "stages.drafer.lr=1e-3", "--set", "stages.drafter.lr=-1")
    assert wrong.exit_code == 78
    assert "did you mean" in wrong.stdout and "drafter" in wrong.stdout and "stages.drafter.lr" in wrong.stdout


@pytest.mark.parametrize("style", ["text", "mermaid", "dot", "svg", "html", "json"])
def test_the_graph_is_drawn_in_every_format_to_stdout_or_to_a_file(style: str, tmp_path: Path) -> None:
    printed = invoke("graph", TINY, "--format", style)
    assert printed.exit_code == 0 and "drafter" in printed.stdout and printed.stderr == ""
    silent = invoke("graph", TINY, "--format", style, "-o", tmp_path / "graph")
    assert (silent.exit_code, silent.stdout) == (0, "")
    assert (tmp_path / "graph").read_text().rstrip("\n") == printed.stdout.rstrip("\n")


def test_a_graph_that_cannot_be_written_is_a_failure_in_a_line(tmp_path: Path) -> None:
    result = invoke("graph", TINY, "-o", tmp_path / "none" / "graph.svg")
    assert (result.exit_code, result.stdout) == (1, "") and "graph.svg" in result.stderr
    assert "No such file or directory" in result.stderr and "Traceback" not in result.stderr


def test_stages_lists_all_and_the_options_of_a_kind() -> None:
    everything = invoke("stages").stdout.splitlines()
    names = {" ".join(line.split()[:2]) for line in everything}
    wanted = {"source chat_jsonl", "drafter dflash", "interleaver stratified", "sink wandb", "sink checkpoint"}
    assert wanted <= names and not any(line.startswith(" ") for line in everything)
    drafters = invoke("stages", "drafter").stdout
    assert "\ndrafter dflash" in drafters
    assert all(line.startswith(("drafter ", " ")) for line in drafters.splitlines() if line)
    assert "    block_size (default 16): Slots of a block" in drafters
    sources = invoke("stages", "source").stdout
    assert "    path (required): " in sources and "PydanticUndefined" not in sources


def test_the_schema_is_a_json_schema_that_knows_the_stages() -> None:
    result = invoke("schema")
    schema = json.loads(result.stdout)
    assert result.exit_code == 0 and schema["$schema"].startswith("https://json-schema.org/")
    assert "stratified" in result.stdout and "token_budget" in result.stdout


def test_plugins_are_listed_and_shown() -> None:
    listed = invoke("plugins", "list")
    line = next(line for line in listed.stdout.splitlines() if line.startswith("checkpoint "))
    assert re.fullmatch(r"checkpoint \S+ \(distribution flowdflash, \d+ ms\): sink checkpoint", line)
    shown = invoke("plugins", "show", "checkpoint").stdout
    assert "hooks: flowdflash_check, flowdflash_register" in shown and "    keep (default 3): " in shown


def test_a_broken_plugin_warns_and_stops_only_who_needs_it(tmp_path: Path) -> None:
    folder = tmp_path / "plugins"
    written(folder / "missing.py", "import a_module_that_is_not_there\n")
    listed = invoke("--plugins-dir", folder, "plugins", "list")
    assert listed.exit_code == 0 and "broken" in listed.stdout and "a_module_that_is_not_there" in listed.stdout
    assert re.search(r"^warning: plugin 'missing' .* is left out: .*a_module_that_is_not_there", listed.stderr)
    assert invoke("--plugins-dir", folder, "validate", TINY).exit_code == 0
    needed = invoke("--plugins-dir", folder, "validate", TINY, "--set", "stages.order.type=missing")
    assert needed.exit_code == 78 and "a_module_that_is_not_there" in needed.stdout


def test_a_plugin_that_is_disabled_is_named_where_it_is_needed() -> None:
    result = invoke("--disable-plugin", "checkpoint", "validate", TINY)
    assert result.exit_code == 78 and "disabled" in result.stdout and "checkpoint" in result.stdout
    assert "disabled" in invoke("--disable-plugin", "checkpoint", "plugins", "list").stdout


def test_a_plugins_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    result = invoke("--plugins-dir", tmp_path / "none", "stages")
    assert (result.exit_code, result.stdout) == (78, "") and "no such folder" in result.stderr


@pytest.mark.timeout(60)
def test_a_run_prints_the_plan_the_progress_and_the_account(tmp_path: Path, cache: Path) -> None:
    file, run = written(tmp_path / "warned.yaml", WARNED), tmp_path / "run"
    result = invoke("run", file, "--run-dir", run, *overrides(SHORT), "--set", "name=short", cache=cache)
    assert result.exit_code == 0, result.stderr
    out, err = result.stdout.splitlines(), result.stderr.splitlines()
    assert out[0].startswith("finished: 2 optimizer steps, 6 batches, 24 samples")
    assert out[-1] == f"run folder: {run}" and any(line.startswith("bottleneck: ") for line in out)
    assert any("vars.unused" in line for line in err)
    assert f"run folder: {run}" in err
    assert any(line.startswith("plan: 1 epochs, 2 optimizer steps of 4 batches") for line in err)
    progress = [line for line in err if line.startswith("training: ")]
    assert [line.split("  ")[0] for line in progress] == ["training: 1 of 2", "training: 2 of 2"]
    assert not [line for line in err if "%|" in line or "it/s" in line], "a library's progress bar in a log file"
    assert len(json_lines(run / "metrics.jsonl")) == 2
    text = (run / "pipeline.yaml").read_text()
    assert "name: short" in text and "samples: 24" in text
    record = json.loads((run / "run.json").read_text())
    assert record["name"] == "short" and record["pipeline_folder"] == str(tmp_path)
    assert json.loads((run / "outcome.json").read_text())["status"] == "finished"
    assert not (run / ".lock").exists()


def test_a_folder_with_something_in_it_is_refused_and_left_alone(tmp_path: Path, cache: Path) -> None:
    written(tmp_path / "run" / "precious.txt", "mine")
    result = invoke("run", TINY, "--run-dir", tmp_path / "run", cache=cache)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "not empty" in result.stderr and "precious.txt" in result.stderr and "Traceback" not in result.stderr
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["precious.txt"]


def test_a_run_folder_that_cannot_be_made_is_told(tmp_path: Path, cache: Path) -> None:
    written(tmp_path / "file", "not a folder")
    result = invoke("run", TINY, "--run-dir", tmp_path / "file" / "run", cache=cache)
    assert result.exit_code == 1 and "Not a directory" in result.stderr and "Traceback" not in result.stderr


def broken_run(tmp_path: Path, cache: Path, error: str) -> Any:
    written(tmp_path / "plugins" / "breaks.py", BREAKS.replace("ERROR", error))
    arguments = ["--set", "stages.target.type=breaks", "--run-dir", tmp_path / "run", *overrides(SHORT)]
    result = invoke("--plugins-dir", tmp_path / "plugins", "run", TINY, *arguments, cache=cache)
    assert result.exit_code == 1
    assert json.loads((tmp_path / "run" / "outcome.json").read_text())["status"] == "failed"
    return result


@pytest.mark.timeout(60)
def test_a_stage_that_fails_is_told_with_batch_samples_and_its_own_traceback(tmp_path: Path, cache: Path) -> None:
    result = broken_run(tmp_path, cache, "ZeroDivisionError")
    last = result.stderr.splitlines()[-1]
    found = re.fullmatch(
        r"error: stage 'target' failed in run: ZeroDivisionError: no more, ids \[(.*)\] \[batch 2, samples (.*)\]", last
    )
    assert found is not None, result.stderr
    ids, shown = found[1].split(", "), found[2].split(", ")
    assert shown == (ids if len(ids) <= 8 else [*ids[:8], "..."])
    assert "Traceback (most recent call last):" in result.stderr
    assert re.search(r'breaks\.py", line \d+, in forward\n', result.stderr)
    assert "ZeroDivisionError: no more" in result.stderr


@pytest.mark.timeout(60)
def test_an_error_that_was_raised_on_purpose_needs_no_traceback(tmp_path: Path, cache: Path) -> None:
    result = broken_run(tmp_path, cache, "ModelInvalid")
    assert "Traceback" not in result.stderr and "line " not in result.stderr.splitlines()[-1]
    assert result.stderr.splitlines()[-1].startswith("error: stage 'target' failed in run: ModelInvalid: no more")


def test_ctrl_c_where_nothing_runs_yet_is_an_interruption_not_a_failure(tmp_path: Path) -> None:
    written(tmp_path / "plugins" / "slow.py", "raise KeyboardInterrupt\n")
    result = invoke("--plugins-dir", tmp_path / "plugins", "validate", TINY)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_ctrl_c_while_a_plan_reads_its_data_is_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Any, ctx: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SyntheticLengths, "open", interrupted)
    result = invoke("plan", TINY, cache=tmp_path)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_at_a_step_boundary_with_one_checkpoint(
    tmp_path: Path, cache: Path, number: signal.Signals, code: int
) -> None:
    written(tmp_path / "plugins" / "tells.py", TELLS)
    run = tmp_path / "run"
    endless = {"stages.corpus.epochs": 400, "stages.save.every_steps": 0, "stages.acceptance.at_start": "false"}
    command = [sys.executable, "-m", "flowdflash.cli", "--plugins-dir", str(tmp_path / "plugins"), "run", str(TINY)]
    reading, writing = os.pipe()
    environment = {**os.environ, "FLOWDFLASH_CACHE_DIR": str(cache), "STEP_PIPE": str(writing)}
    child = subprocess.Popen(
        [*command, "--run-dir", str(run), *overrides(endless)],
        env=environment,
        pass_fds=[writing],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read(1)  # nothing, at once, if the process ends before its third step
        child.send_signal(number)
        out, err = child.communicate(timeout=60)
    assert told == b"3", err
    assert child.returncode == code, err
    assert "Traceback" not in err and out.splitlines()[0].startswith("interrupted: ")
    assert f"run folder: {run}" in out.splitlines()
    records = json_lines(run / "metrics.jsonl")
    assert len(records) >= 3
    (folder,) = (run / "checkpoints").glob("step-*")
    manifest = json.loads((folder / "checkpoint.json").read_text())
    assert (run / "checkpoints" / "latest").read_text().strip() == folder.name
    assert (manifest["reason"], manifest["step"]) == ("interrupted", records[-1]["step"])
    assert manifest["ledger"] == {"prefix": sum(r["batches"] for r in records), "extras": []}
    assert not (run / "evaluations.jsonl").exists(), "who interrupts is not kept waiting for an evaluation"
    assert json.loads((run / "outcome.json").read_text())["status"] == "interrupted"


@pytest.mark.timeout(90)
def test_a_new_plugin_passes_its_test_and_runs_by_name(tmp_path: Path, cache: Path) -> None:
    made = invoke("plugins", "new", "my_order", "--kind", "interleaver", "--into", tmp_path)
    assert made.exit_code == 0 and str(tmp_path / "my_order" / "my_order.py") in made.stdout.splitlines()
    again = invoke("plugins", "new", "my_order", "--into", tmp_path)
    assert again.exit_code == 1 and "exists already" in again.stderr
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "my_order",
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert tested.returncode == 0 and "2 passed" in tested.stdout, tested.stdout + tested.stderr
    text = f"version: 1\nextends: {TINY}\nplugins: [my_order/my_order.py]\n"
    text += "stages:\n  order: {type: my_order, first: long}\n"
    file, run = written(tmp_path / "mine.yaml", text), tmp_path / "run"
    result = invoke("run", file, "--run-dir", run, *overrides(SHORT), cache=cache)
    assert result.exit_code == 0, result.stderr
    assert "type: my_order" in (run / "pipeline.yaml").read_text()
    assert json.loads((run / "outcome.json").read_text())["batches"] == 6


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_full_disk_is_told_in_a_line_with_what_can_be_done(
    command: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, ctx: Any) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / "tokens"))

    monkeypatch.setattr(SyntheticLengths, "open", full)
    folder = ["--run-dir", tmp_path / "run"] if command == "run" else []
    result = invoke(command, TINY, *folder, cache=tmp_path)
    assert result.exit_code == 1 and "Traceback" not in result.stderr
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: ") and os.strerror(number) in line and str(tmp_path / "tokens") in line
    assert "FLOWDFLASH_CACHE_DIR" in line


def test_another_error_of_the_system_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, ctx: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(SyntheticLengths, "open", broken)
    result = invoke("run", TINY, "--run-dir", tmp_path / "run", cache=tmp_path)
    assert result.exit_code == 1 and "Traceback" in result.stderr
