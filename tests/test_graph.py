"""Order, cycles and edges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_fakes import PIPELINE, FakePlugins
from ruamel.yaml import YAML

from flowdflash.config.check import load_mapping
from flowdflash.errors import PipelineInvalid
from flowdflash.graph import Graph, topological


def demo(tmp_path: Path, **stages: Any) -> Graph:
    tree = YAML(typ="safe").load(PIPELINE)
    tree["stages"] |= stages
    return load_mapping(tree, FakePlugins(), tmp_path).graph


def test_cycle_starts_with_the_stage_that_is_written_first() -> None:
    order, cycles = topological(["s", "b", "a", "c", "t"], [("a", "b"), ("b", "c"), ("c", "a"), ("s", "a"), ("c", "t")])
    assert cycles == [["b", "c", "a"]] and order == ["s", "t"]


def test_every_cycle_is_told_and_loops_on_oneself_too() -> None:
    _, cycles = topological(list("abcd"), [("a", "a"), ("b", "c"), ("c", "b"), ("c", "d"), ("d", "c")])
    assert cycles == [["a"], ["b", "c"], ["c", "d"]]


@pytest.mark.timeout(20)
def test_tangle_of_many_stages_is_told_in_part_and_quickly() -> None:
    names = [f"s{i}" for i in range(40)]
    order, cycles = topological(names, [(a, b) for a in names for b in names])
    assert order == [] and len(cycles) == 20


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_order_respects_every_wire_and_ties_follow_the_file(data: st.DataObject) -> None:
    names = data.draw(st.permutations([f"s{i}" for i in range(8)]))
    index = st.integers(0, 7)
    pairs = data.draw(st.lists(st.tuples(index, index).filter(lambda p: p[0] < p[1]), max_size=12))
    wires = [(f"s{a}", f"s{b}") for a, b in pairs]
    order, cycles = topological(names, wires)
    assert not cycles and sorted(order) == sorted(names)
    assert all(order.index(a) < order.index(b) for a, b in wires)
    if not wires:
        assert order == list(names)


def test_outputs_and_kinds(tmp_path: Path) -> None:
    graph = demo(tmp_path)
    assert [edge.name for edge in graph.outputs("drafter")] == [
        "drafter.records->metrics",
        "drafter.records->board",
        "drafter.checkpoints->save",
        "drafter.checkpoints->evaluate",
    ]
    assert [node.name for node in graph.of_kind("sink")] == ["metrics", "board", "save", "evaluate"]


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"inputs": "drafter.records"}, "between them"),
        (
            {"inputs": "corpus"},
            "between them belongs bucketer -> interleaver -> dispatcher -> target-forward -> drafter",
        ),
        ({"inputs": ["drafter.records", "metrics"]}, "sink 'metrics' has no output"),
        ({"inputs": []}, "needs an input (Checkpoint)"),
    ],
)
def test_wrong_wiring_of_a_sink_names_both_ends(stage: dict[str, Any], message: str, tmp_path: Path) -> None:
    if message == "between them":
        with pytest.raises(PipelineInvalid, match=r"writes StepRecord, but sink 'extra' reads Checkpoint") as caught:
            demo(tmp_path, extra={"kind": "sink", "type": "checkpoint", **stage})
        assert message not in str(caught.value) and "drafter.checkpoints would fit" in str(caught.value)
        return
    with pytest.raises(PipelineInvalid) as caught:
        demo(tmp_path, extra={"kind": "sink", "type": "checkpoint", **stage})
    assert message in str(caught.value)
