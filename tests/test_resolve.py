"""``extends``, ``--set`` and ``${...}``: what they may do, and where their mistakes are placed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pipeline_fakes import PIPELINE, FakePlugins

from flowdflash.config.check import Pipeline, load
from flowdflash.config.document import parse
from flowdflash.config.resolve import fill, override
from flowdflash.config.tree import Place, Table, plain
from flowdflash.errors import PipelineInvalid, Problem


def filled(text: str, **environ: str) -> tuple[Any, list[Problem]]:
    problems: list[Problem] = []
    root = parse(text, Place("a.yaml"), problems)
    assert isinstance(root, Table)
    return plain(fill(root, problems, environ).root), problems


def over(tmp_path: Path, *overrides: str, text: str = PIPELINE) -> Pipeline:
    path = tmp_path / "demo.yaml"
    path.write_text(text)
    return load(path, FakePlugins(), overrides=overrides)


def refused(tmp_path: Path, *overrides: str, text: str = PIPELINE) -> Problem:
    with pytest.raises(PipelineInvalid) as caught:
        over(tmp_path, *overrides, text=text)
    (problem,) = caught.value.problems
    return problem


def test_references_are_filled_in_leaves_only() -> None:
    tree, problems = filled("vars: {n: 4}\na: x${vars.n}y${env:A:-b}\n'${vars.n}': ['$${vars.n}', '$', '$x']\n", A="")
    assert tree == {"vars": {"n": "4"}, "a": "x4yb", "${vars.n}": ["${vars.n}", "$", "$x"]} and not problems


def test_what_is_filled_in_is_not_looked_at_again() -> None:
    tree, problems = filled("vars: {n: '${env:A}'}\na: ${vars.n}", A="${env:B} $${vars.n}")
    assert tree["a"] == "${env:B} $${vars.n}" and not problems


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("${vars.m}", "there is no var 'm'"),
        ("${env:NOWHERE}", "environment variable NOWHERE is not set"),
        ("${env:A:-${vars.n}}", "a reference is not closed, or holds another"),
        ("${nothing}", "unknown reference"),
        ("${}", "unknown reference"),
        ("${env:1A}", "unknown reference"),
        ("${vars.n", "a reference is not closed"),
        ("${env:BAD}", "environment variable BAD holds half of a surrogate pair"),
    ],
)
def test_bad_reference_is_placed_and_the_leaf_left_alone(value: str, message: str) -> None:
    tree, (problem,) = filled(f'vars: {{n: 4}}\nb: "${{vars.n}}"\na: "{value}"', BAD="\udcff")
    assert problem.message.startswith(message) and (problem.line, problem.column, problem.path) == (3, 4, "a")
    assert tree["a"] == value


def test_var_takes_the_environment_and_no_other_var() -> None:
    _, problems = filled('vars: {n: 4, m: "${vars.n}"}\na: ${vars.m}')
    assert [p.message for p in problems if p.severity == "error"] == ["a var cannot use another var"]


def test_var_is_a_scalar_and_an_unused_one_warns() -> None:
    _, problems = filled("vars: {n: [4], m: 1}\na: ${vars.n}")
    assert [(p.path, p.severity) for p in problems] == [("vars.n", "error"), ("vars.m", "warning")]


def test_override_of_a_var_reaches_every_use(tmp_path: Path) -> None:
    assert over(tmp_path, "vars.accumulate=3").graph.nodes["drafter"].config.accumulate == 3


def test_override_may_add_an_option_and_a_group(tmp_path: Path) -> None:
    config = over(tmp_path, "stages.drafter.optimizer.lr=1e-4", "stages.drafter.warmup_steps=1_000").graph.nodes
    assert config["drafter"].config.optimizer.lr == 1e-4 and config["drafter"].config.warmup_steps == 1000


def test_override_may_hold_yaml_and_a_reference(tmp_path: Path) -> None:
    pipeline = over(
        tmp_path, "stages.buckets.edges=[512, 1024]", "stages.buckets.edges.1=2048", "seed=${vars.accumulate}"
    )
    assert pipeline.graph.nodes["buckets"].config.edges == (512, 2048) and pipeline.seed == 8


def test_overridden_value_need_not_be_resolvable(tmp_path: Path) -> None:
    text = PIPELINE.replace("seed: 7", "seed: ${env:FLOWDFLASH_TEST_NEVER_SET}")
    assert over(tmp_path, "seed=3", text=text).seed == 3


@pytest.mark.parametrize(
    ("setting", "file", "message", "hint"),
    [
        ("stages.draftr.lr=1", "--set stages.draftr.lr", "there is no stage 'draftr'", "did you mean 'drafter'?"),
        ("vars.acumulate=1", "--set vars.acumulate", "there is no var 'acumulate'", "did you mean 'accumulate'?"),
        ("stagse.drafter.lr=1", "--set stagse.drafter.lr", "there is no 'stagse'", "did you mean 'stages'?"),
        ("sede=1", "--set sede", "unknown option 'sede'", "did you mean 'seed'?"),
        (
            "stages.drafter.blok_size=4",
            "--set stages.drafter.blok_size",
            "unknown option",
            "did you mean 'block_size'?",
        ),
        ("stages.drafter.block_size=big", "--set stages.drafter.block_size", "input should be a valid integer", ""),
        ("stages.drafter.block_size=", "--set stages.drafter.block_size", "a value is needed here", ""),
        ("stages.drafter.block_size=null", "--set stages.drafter.block_size", "a value is needed here", ""),
        (
            "stages.metrics.inputs.capacity=4",
            "--set stages.metrics.inputs.capacity",
            "stages.metrics.inputs is",
            "--set",
        ),
        ("seed=[1", "--set seed", "not valid YAML", ""),
        ("seed", "--set 'seed'", "an override is written a.b=value", ""),
        ("=4", "--set '=4'", "an override is written a.b=value", ""),
        ("extends=x.yaml", "--set extends", "extends cannot be overridden", ""),
    ],
)
def test_bad_override_says_which_and_what_was_meant(
    setting: str, file: str, message: str, hint: str, tmp_path: Path
) -> None:
    problem = refused(tmp_path, setting)
    assert problem.file == file and problem.message.startswith(message) and hint in problem.hint and problem.line == 0


def test_override_of_a_list_item_that_is_not_there(tmp_path: Path) -> None:
    problem = refused(tmp_path, "stages.buckets.edges.2=9", text=PIPELINE.replace("buckets: 6", "edges: [1, 2]"))
    assert "has no item '2'" in problem.message


def test_last_override_of_a_place_wins() -> None:
    root = parse("a: 1", Place("a.yaml"), [])
    assert isinstance(root, Table)
    assert plain(override(root, ["a=2", "a={b: 3}", "a.b=4"], [])) == {"a": {"b": "4"}}


def chain(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "root.yaml").write_text(PIPELINE)
    (tmp_path / "base" / "mid.yaml").write_text(
        "extends: root.yaml\nname: mid\nstages:\n  buckets: {edges: [512, 1024], path_typo: 1}\n"
    )
    child = tmp_path / "child.yaml"
    child.write_text("extends: base/mid.yaml\nseed: 8\nstages:\n  buckets: {edges: [64]}\n  drafter: {block_size: 1}\n")
    return child


def test_bases_merge_mappings_replace_lists_and_keep_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PipelineInvalid) as caught:
        load(Path("child.yaml"), FakePlugins())
    assert [(p.place, p.path) for p in caught.value.problems] == [
        ("base/mid.yaml:4:33", "stages.buckets.path_typo"),
        ("child.yaml:5:25", "stages.drafter.block_size"),
    ]
    (tmp_path / "base/mid.yaml").write_text("extends: root.yaml\nname: mid\nstages: {buckets: {edges: [512, 1024]}}\n")
    (tmp_path / "child.yaml").write_text("extends: base/mid.yaml\nseed: 8\nstages:\n  buckets: {edges: [64]}\n")
    pipeline = load(Path("child.yaml"), FakePlugins())
    assert (pipeline.name, pipeline.seed) == ("mid", 8)
    assert pipeline.graph.nodes["buckets"].config.edges == (64,)
    assert pipeline.graph.nodes["buckets"].config.token_budget == 8192


def test_paths_start_from_the_folder_of_the_file_that_they_are_in(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "root.yaml").write_text(PIPELINE.replace("seed: 7", "plugins: [p.py]"))
    (tmp_path / "base" / "p.py").write_text("")
    child = tmp_path / "child.yaml"
    child.write_text("extends: base/root.yaml\nstages: {corpus: {extra_paths: [x.jsonl], tokenizer: ./tok}}\n")
    plugins, again_loaded = FakePlugins(), FakePlugins()
    pipeline = load(child, plugins)
    config, top = pipeline.graph.nodes["corpus"].config, tmp_path.resolve()
    assert config.path == top / "base/data/train.jsonl"
    assert config.extra_paths == (top / "x.jsonl",) and config.tokenizer == str(top / "tok")
    assert plugins.loaded == [top / "base/p.py"]
    assert pipeline.resolved["stages"]["corpus"]["path"] == "./base/data/train.jsonl"
    again = tmp_path / "again.yaml"
    again.write_text(pipeline.text)
    reloaded = load(again, again_loaded)
    assert reloaded.graph.nodes["corpus"].config == config and again_loaded.loaded == plugins.loaded


def test_files_that_extend_one_another_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: ./c.yaml\n")
    (tmp_path / "c.yaml").write_text("extends: b.yaml\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PipelineInvalid, match=r"in a circle: b\.yaml -> c\.yaml -> b\.yaml"):
        load(Path("a.yaml"), FakePlugins())


def test_mistake_in_the_syntax_of_a_base_is_placed_in_the_base(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("x: [\n")
    with pytest.raises(PipelineInvalid) as caught:
        load(tmp_path / "a.yaml", FakePlugins())
    assert caught.value.problems[0].file.endswith("b.yaml")
