"""Loading and checking pipelines: goldens of every kind of mistake, facts, strictness, and hostile files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pipeline_fakes import PIPELINE, FakePlugins, FakeRegistry, Order
from ruamel.yaml import YAML

from flowdflash import stages
from flowdflash.config.check import load, load_mapping, load_text
from flowdflash.config.problems import as_text
from flowdflash.errors import PipelineInvalid, PluginBroken, Problem
from flowdflash.plugin.loader import load_plugins
from flowdflash.stage import Check, Interleaver

INVALID = Path(__file__).parent / "data" / "invalid"
"""Pipelines of made-up stages."""
INVALID_STAGES = Path(__file__).resolve().parent / "data" / "invalid_stages"
"""Pipelines of the stages that there are."""


def write(tmp_path: Path, text: str = PIPELINE, name: str = "demo.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def problems_of(path: Path, plugins: FakePlugins | None = None, **options: Any) -> tuple[Problem, ...]:
    with pytest.raises(PipelineInvalid) as caught:
        load(path, plugins or FakePlugins(), **options)
    return caught.value.problems


def as_dict(text: str = PIPELINE) -> dict[str, Any]:
    tree: dict[str, Any] = YAML(typ="safe").load(text)
    return tree


@pytest.mark.parametrize("name", sorted(path.stem for path in INVALID.glob("*.yaml")))
def test_invalid_pipeline_is_told_as_in_its_golden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(INVALID)
    monkeypatch.delenv("FLOWDFLASH_TEST_UNSET", raising=False)
    told = as_text(problems_of(Path(f"{name}.yaml"))) + "\n"
    assert told == (INVALID / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(path.stem for path in INVALID_STAGES.glob("*.yaml")))
def test_wrong_option_of_a_stage_is_told_as_in_its_golden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(INVALID_STAGES)
    with pytest.raises(PipelineInvalid) as caught:
        load(Path(f"{name}.yaml"), load_plugins(builtin=[stages]))
    told = as_text(problem for problem in caught.value.problems if problem.file == f"{name}.yaml") + "\n"
    golden = (INVALID_STAGES / f"{name}.txt").read_text(encoding="utf-8")
    assert told.replace(str(INVALID_STAGES), "FOLDER") == golden


def test_every_golden_has_its_pipeline() -> None:
    for folder, least in ((INVALID, 62), (INVALID_STAGES, 30)):
        assert len(list(folder.glob("*.yaml"))) >= least
        assert {p.stem for p in folder.glob("*.txt")} == {p.stem for p in folder.glob("*.yaml")}


def test_valid_pipeline_loads_in_topological_order(tmp_path: Path) -> None:
    pipeline = load(write(tmp_path), FakePlugins())
    assert (pipeline.name, pipeline.seed, pipeline.ordering, pipeline.warnings) == ("demo", 7, "plan", ())
    assert list(pipeline.graph.nodes) == list(as_dict()["stages"])
    edge = pipeline.graph.nodes["drafter"].inputs[0]
    assert (edge.source, edge.capacity, edge.capacity_bytes, edge.payload.__name__) == (
        "target",
        4,
        4 << 30,
        "FeatureBatch",
    )
    assert pipeline.graph.nodes["drafter"].config.accumulate == 8
    assert pipeline.graph.nodes["corpus"].config.path == tmp_path.resolve() / "data/train.jsonl"


def test_file_written_back_to_front_gives_the_same_order(tmp_path: Path) -> None:
    tree = as_dict()
    tree["stages"] = dict(reversed(tree["stages"].items()))
    pipeline = load_mapping(tree, FakePlugins(), tmp_path)
    assert list(pipeline.graph.nodes)[:6] == ["corpus", "buckets", "order", "dispatch", "target", "drafter"]


@pytest.mark.parametrize("spelling", ["1e-4", "1E-4", "0.0001", ".0001", "1_0e-5", '"1e-4"', "'0.0001'", "+1e-4"])
@pytest.mark.parametrize("way", ["file", "environment", "override"])
def test_number_means_the_same_however_and_wherever_it_is_written(
    spelling: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWDFLASH_TEST_LR", spelling.strip("'\""))
    value = '"${env:FLOWDFLASH_TEST_LR}"' if way == "environment" else spelling if way == "file" else "9"
    text = PIPELINE.replace("block_size: 8", f"block_size: 8, optimizer: {{lr: {value}}}")
    overrides = [f"stages.drafter.optimizer.lr={spelling}"] if way == "override" else []
    config = load(write(tmp_path, text), FakePlugins(), overrides=overrides).graph.nodes["drafter"].config
    assert config.optimizer.lr == 1e-4


def test_text_and_truth_values_follow_the_declared_type(tmp_path: Path) -> None:
    text = PIPELINE.replace("block_size: 8", "tag: 1.10, resume: no, warmup_steps: 1_000, block_size: 010")
    config = load(write(tmp_path, text), FakePlugins()).graph.nodes["drafter"].config
    assert (config.tag, config.resume, config.warmup_steps, config.block_size) == ("1.10", False, 1000, 10)
    text = PIPELINE.replace("block_size: 8", "tag: no, resume: on, clip: null")
    config = load(write(tmp_path, text), FakePlugins()).graph.nodes["drafter"].config
    assert (config.tag, config.resume, config.clip) == ("no", True, None)


def test_literal_of_numbers_takes_a_number_and_refuses_another(tmp_path: Path) -> None:
    assert load(write(tmp_path), FakePlugins()).graph.nodes["target"].config.replicas == 2
    (problem,) = problems_of(write(tmp_path, PIPELINE.replace("replicas: 2", "replicas: 3")))
    assert problem.message == "input should be 1, 2, 4 or 8"


def test_unread_checkpoints_warn_and_are_an_error_when_strict(tmp_path: Path) -> None:
    lines = [line for line in PIPELINE.splitlines(keepends=True) if "drafter.checkpoints" not in line]
    path = write(tmp_path, "".join(lines))
    (warning,) = load(path, FakePlugins()).warnings
    assert "never written" in warning.message and warning.severity == "warning" and warning.path == "stages.drafter"
    (problem,) = problems_of(path, strict=True)
    assert problem.severity == "error"


def test_unread_records_do_not_warn_where_checkpoints_are_read(tmp_path: Path) -> None:
    lines = [line for line in PIPELINE.splitlines(keepends=True) if "drafter.records" not in line]
    assert load(write(tmp_path, "".join(lines)), FakePlugins(), strict=True).warnings == ()


def test_branch_that_nobody_reads_warns(tmp_path: Path) -> None:
    path = write(tmp_path, PIPELINE + "  spare: {kind: interleaver, type: stratified, inputs: buckets}\n")
    (warning,) = load(path, FakePlugins()).warnings
    assert "nothing reads interleaver 'spare'" in warning.message
    assert warning.line == path.read_text().count("\n")


def test_mistyped_port_is_not_also_told_as_unread(tmp_path: Path) -> None:
    lines = [line for line in PIPELINE.splitlines(keepends=True) if "drafter.records" not in line]
    text = "".join(lines).replace("drafter.checkpoints", "drafter.checkpoint")
    assert [p.severity for p in problems_of(write(tmp_path, text))] == ["error", "error"]


def test_facts_flow_down(tmp_path: Path) -> None:
    graph = load(write(tmp_path), FakePlugins()).graph
    assert graph.nodes["corpus"].facts == {}
    assert graph.nodes["save"].facts["hidden_size"] == 64 and graph.nodes["save"].facts["max_length"] == 1024
    assert graph.returned["drafter"] == {"window": 8, "block_size": 8}


def test_facts_on_which_inputs_disagree_are_left_out(tmp_path: Path) -> None:
    tree = as_dict()
    tree["stages"] |= {
        "drafter2": {"kind": "drafter", "type": "dflash", "inputs": "target", "accumulate": 2},
        "save2": {"kind": "sink", "type": "checkpoint", "inputs": ["drafter.checkpoints", "drafter2.checkpoints"]},
    }
    facts = load_mapping(tree, FakePlugins(), tmp_path).graph.nodes["save2"].facts
    assert "window" not in facts and facts["block_size"] == 8 and facts["hidden_size"] == 64


def test_check_of_a_stage_places_problems_at_its_options(tmp_path: Path) -> None:
    class Picky(Interleaver):
        """Says no."""

        type = "picky"

        def check(self, check: Check) -> Mapping[str, Any]:
            check.refuse("inputs", "not this one", "another")
            check.warn("", "hm")
            check.warn("nowhere.at.all", "hm again")
            return {}

    path = write(tmp_path, PIPELINE.replace("type: stratified", "type: picky"))
    told = problems_of(path, FakePlugins(FakeRegistry((*FakeRegistry().stages.values(), Picky))))
    places = {p.path: (p.severity, path.read_text().splitlines()[p.line - 1][p.column - 1 :][:7]) for p in told}
    assert places == {
        "stages.order": ("warning", "order: "),
        "stages.order.nowhere.at.all": ("warning", "{kind: "),
        "stages.order.inputs": ("error", "buckets"),
    }


def test_check_that_raises_names_stage_and_plugin(tmp_path: Path) -> None:
    (problem,) = problems_of(write(tmp_path, PIPELINE.replace("type: stratified", "type: crash")))
    assert "interleaver/crash (plugin 'fakes') failed: SystemExit: no reason" in problem.message
    assert problem.path == "stages.order"


def test_plugins_are_asked_about_a_sound_graph_only(tmp_path: Path) -> None:
    plugins = FakePlugins(problems=[Problem("too many buckets", path="stages.buckets.buckets", hint="fewer")])
    (problem,) = problems_of(write(tmp_path), plugins)
    assert (problem.message, problem.line, problem.column) == ("too many buckets", 7, 89)
    assert len(plugins.graphs) == 1
    plugins = FakePlugins(problems=[Problem("not told")])
    told = problems_of(write(tmp_path, PIPELINE.replace("seed: 7", "sede: 7")), plugins)
    assert plugins.graphs == [] and [p.path for p in told] == ["sede"]


def test_plugin_file_is_loaded_before_stages_are_looked_up(tmp_path: Path) -> None:
    class Late(FakePlugins):
        def load_file(self, path: Path) -> None:
            super().load_file(path)
            self.registry.stages["interleaver", "stratified"] = Order

    (tmp_path / "mine.py").write_text("")
    plugins = Late(FakeRegistry([c for c in FakeRegistry().stages.values() if c is not Order]))
    load(write(tmp_path, PIPELINE.replace("seed: 7", "plugins: [./mine.py]")), plugins)
    assert plugins.loaded == [tmp_path.resolve() / "mine.py"]


def test_reason_of_a_missing_type_comes_from_the_plugin_layer(tmp_path: Path) -> None:
    plugins = FakePlugins(missing={("interleaver", "mixing"): "comes from plugin 'mixing', which is disabled"})
    (problem,) = problems_of(write(tmp_path, PIPELINE.replace("type: stratified", "type: mixing")), plugins)
    assert problem.message == "comes from plugin 'mixing', which is disabled" and not problem.hint


def test_plugin_that_fails_to_load_in_any_way_is_a_problem(tmp_path: Path) -> None:
    class Odd(FakePlugins):
        def load_file(self, path: Path) -> None:
            raise PluginBroken("odd", "no") if path.name == "a.py" else KeyError("x")

    path = write(tmp_path, PIPELINE.replace("seed: 7", "plugins: [a.py, b.py]"))
    assert [(p.path, p.column) for p in problems_of(path, Odd())] == [("plugins.0", 11), ("plugins.1", 17)]


def test_mapping_needs_no_version_and_names_no_file(tmp_path: Path) -> None:
    tree = as_dict()
    del tree["version"], tree["name"]
    pipeline = load_mapping(tree, FakePlugins(), tmp_path)
    assert pipeline.name == "pipeline"
    assert pipeline.graph.nodes["metrics"].config.path == tmp_path.resolve() / "metrics.jsonl"
    tree["stages"]["order"]["typo"] = 1
    with pytest.raises(PipelineInvalid) as caught:
        load_mapping(tree, FakePlugins(), tmp_path)
    assert str(caught.value).startswith("stages.order.typo: unknown option 'typo'")


def test_resolved_text_loads_again_to_the_same(tmp_path: Path) -> None:
    text = PIPELINE.replace("block_size: 8", 'tag: "a: $${b} \\"q\\" \\u00fc \\U0001F600\\n", clip: ~')
    first = load(write(tmp_path, text), FakePlugins(), overrides=["seed=9"])
    again = load(write(tmp_path, first.text, "again.yaml"), FakePlugins())
    assert again.resolved == first.resolved and again.text == first.text and again.seed == 9
    assert again.graph.nodes["drafter"].config == first.graph.nodes["drafter"].config
    assert first.graph.nodes["drafter"].config.tag == 'a: ${b} "q" ü 😀\n'
    assert load_mapping(first.resolved, FakePlugins(), tmp_path).resolved == first.resolved
    assert load_text(first.text, FakePlugins(), tmp_path).resolved == first.resolved


@pytest.mark.parametrize(
    "tag",
    ["1.10", "010", "1_000", "0x1F", "1e-4", "1e5", "no", "True", "true", "null", "2024-01-01", "12", "-3", "0.5"],
)
def test_text_of_a_pipeline_keeps_its_spelling_in_any_yaml_reader(tag: str, tmp_path: Path) -> None:
    first = load(write(tmp_path, PIPELINE.replace("block_size: 8", f"tag: '{tag}'")), FakePlugins())
    assert load_text(first.text, FakePlugins(), tmp_path).graph.nodes["drafter"].config.tag == tag
    typed = YAML(typ="safe", pure=True).load(first.text)
    again = load_mapping(typed, FakePlugins(), tmp_path)
    assert again.graph.nodes["drafter"].config.tag == tag
    assert again.path.parent == tmp_path


def test_name_is_that_of_the_file_if_none_is_given(tmp_path: Path) -> None:
    assert load(write(tmp_path, PIPELINE.replace("name: demo\n", "")), FakePlugins()).name == "demo"


def test_config_never_imports_torch_or_what_runs() -> None:
    code = (
        "import sys, flowdflash.config.check, flowdflash.config.schema, flowdflash.config.problems, flowdflash.render\n"
        "heavy = {'torch', 'transformers', 'wandb', 'flowdflash.runtime', 'flowdflash.stages', 'flowdflash.dflash'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_pipeline_of_eighty_stages_is_checked_in_a_second(tmp_path: Path) -> None:
    tree = as_dict()
    for i in range(70):
        tree["stages"][f"metrics{i}"] = {"kind": "sink", "type": "jsonl", "inputs": "drafter.records"}
    text = "version: 1\nstages:\n" + "".join(f"  {name}: {stage}\n" for name, stage in tree["stages"].items())
    path = write(tmp_path, text.replace("'", "").replace("${vars.accumulate}", "8"))
    started = time.thread_time()
    assert len(load(path, FakePlugins()).graph.nodes) == 80
    assert time.thread_time() - started < 2


SINKS = "".join(f"  s{i}: {{kind: sink, type: jsonl, inputs: nowhere{i}}}\n" for i in range(590))
CHAIN = "".join(f"  s{i}: {{kind: interleaver, type: stratified, inputs: s{(i + 1) % 590}}}\n" for i in range(590))
HOSTILE = {
    "a text of 50 MB": ("name: " + "x" * 50_000_000, "larger than 256 KiB"),
    "a long text": ("version: 1\nname: " + "x" * 200_000, "more than 10,000 characters"),
    "100,000 keys": ("".join(f"k{i}: 1\n" for i in range(100_000)), "larger than 256 KiB"),
    "many keys": (PIPELINE + "".join(f"k{i}: 1\n" for i in range(9000)), "more than 5000 values"),
    "unknown keys": (PIPELINE + "".join(f"k{i}: 1\n" for i in range(2300)), "more than 100 problems"),
    "unknown inputs": (PIPELINE + SINKS, "more than 100 problems"),
    "a long cycle": (PIPELINE + CHAIN, "more than 100 problems"),
    "a key many times": (PIPELINE + "seed: 7\n" * 9000, "more than 100 problems"),
    "references": (PIPELINE + 'plugins: ["' + "${vars.x}" * 1000 + '"]', "more than 100 problems"),
    "references in references": (PIPELINE.replace("demo", '"' + "${env:A:-" * 1000 + '"'), "more than 100 problems"),
    "a large variable": (
        PIPELINE.replace("demo", '"${env:FLOWDFLASH_BOMB}${env:FLOWDFLASH_BOMB}"'),
        "10,000 characters",
    ),
    "a var of vars": (
        PIPELINE.replace("vars: {", "vars: {a: '" + "${env:FLOWDFLASH_HALF}" * 400 + "', ").replace(
            "demo", '"' + "${vars.a}" * 900 + '"'
        ),
        "10,000 characters",
    ),
    "a home of nobody": (PIPELINE + "plugins: ['~nobody-here/x.py']\n", "there is no such user"),
    "a link to itself": (PIPELINE + "plugins: [loop/x.py]\n", "Symlink loop"),
    "a base behind a link to itself": ("extends: loop\n", "cannot read the base 'loop'"),
    "a base of nobody": ("extends: ~nobody-here/x.yaml\n", "cannot read the base"),
    "a chain of bases": ("extends: base0.yaml\n", "more than 8 files"),
    "a merge of itself": (PIPELINE + "x: &a\n  <<: *a\n", "alias *a has no anchor before it"),
    "an object": (PIPELINE + "x: !!python/object/apply:os.system [echo]\n", "are not used in pipelines"),
    "a deep override": (PIPELINE, "nested deeper than 24 levels"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_refused_quickly(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWDFLASH_BOMB", "x" * 9_000)
    monkeypatch.setenv("FLOWDFLASH_HALF", "x" * 20)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for number in range(12):
        write(tmp_path, f"extends: base{number + 1}.yaml\n", f"base{number}.yaml")
    text, message = HOSTILE[name]
    path = write(tmp_path, text)
    overrides = ["stages.drafter." + ".".join("a" * 3000) + "=1"] if name == "a deep override" else []
    began = time.thread_time()
    problems = problems_of(path, overrides=overrides)
    told = as_text(problems)
    assert time.thread_time() - began < 1.5
    assert message in told and len(problems) <= 102 and len(told) < 200_000


def test_environment_is_read_when_loading(tmp_path: Path) -> None:
    path = write(tmp_path, PIPELINE.replace("seed: 7", "seed: ${env:FLOWDFLASH_TEST_SEED:-5}"))
    os.environ.pop("FLOWDFLASH_TEST_SEED", None)
    assert load(path, FakePlugins()).seed == 5
