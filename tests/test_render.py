"""Drawings: what they say, that names cannot break them, and that lines and labels keep off the boxes."""

from __future__ import annotations

import itertools
import json
import re
import time
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from pipeline_fakes import PIPELINE, FakePlugins
from ruamel.yaml import YAML

from flowdflash.config.check import load_mapping
from flowdflash.graph import Edge, Graph, Node
from flowdflash.items import SampleTable
from flowdflash.render import FORMATS, render
from flowdflash.render.labels import brief, size
from flowdflash.render.layout import Layout, label_room, layout
from flowdflash.stage import Bucketer

ODD_NAMES = [
    "a",
    "end",
    "x y",
    '"q"',
    "p-->q",
    "größe",
    "<b>&amp;",
    "大" * 30,
    "subgraph",
    "]]>",
    "`tick`",
    "a|b",
]
SVG = "{http://www.w3.org/2000/svg}"


def demo(**stages: Any) -> Graph:
    tree = YAML(typ="safe").load(PIPELINE)
    tree["stages"] |= stages
    return load_mapping(tree, FakePlugins(), Path("/somewhere")).graph


def odd() -> Graph:
    names = {name: {"kind": "sink", "type": "jsonl", "inputs": "drafter.records"} for name in ODD_NAMES}
    return demo(
        **names,
        both={"kind": "sink", "type": "jsonl", "inputs": ["drafter.records", "drafter2.records", "drafter3.records"]},
        target2={"kind": "target-forward", "type": "toy", "inputs": "dispatch2", "replicas": 8},
        dispatch2={"kind": "dispatcher", "type": "pull", "inputs": "order2"},
        order2={"kind": "interleaver", "type": "stratified", "inputs": "buckets2"},
        buckets2={"kind": "bucketer", "type": "merged", "inputs": "corpus", "token_budget": 4096},
        drafter2={"kind": "drafter", "type": "dflash", "inputs": "target2"},
        drafter3={"kind": "drafter", "type": "dflash", "inputs": "target2"},
        features={"kind": "sink", "type": "features", "inputs": ["target", "target2"]},
    )


def many(count: int) -> Graph:
    """A long chain with an edge from each stage to the one after next: lines that pass columns."""
    nodes, edges = {}, []
    for i in range(count):
        inputs = tuple(Edge(f"s{j}", "", f"s{i}", SampleTable) for j in (i - 2, i - 1) if j >= 0)
        edges += inputs
        nodes[f"s{i}"] = Node(f"s{i}", "bucketer", "chain", Bucketer, Bucketer.Config(), inputs)
    return Graph(nodes, tuple(edges))


def wide(count: int) -> Graph:
    tree = YAML(typ="safe").load(PIPELINE)
    for i in range((count - 10) // 7):
        again = {"corpus": f"corpus{i}", "buckets": f"buckets{i}", "order": f"order{i}", "dispatch": f"dispatch{i}"}
        again |= {"target": f"target{i}", "drafter": f"drafter{i}"}
        for name, new in again.items():
            stage = dict(tree["stages"][name])
            if isinstance(stage.get("inputs"), str):
                stage["inputs"] += str(i)
            elif "inputs" in stage:
                stage["inputs"] = {**stage["inputs"], "from": f"target{i}"}
            tree["stages"][new] = stage
        tree["stages"][f"save{i}"] = {"kind": "sink", "type": "checkpoint", "inputs": f"drafter{i}.checkpoints"}
    return load_mapping(tree, FakePlugins(), Path("/somewhere")).graph


EMPTY = Graph({}, ())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "graph", [demo(), odd(), many(80), wide(80), EMPTY], ids=["demo", "odd", "many", "wide", "empty"]
)
def test_every_format_draws_every_graph_quickly_and_the_same_twice(format: str, graph: Graph) -> None:
    started = time.process_time()
    first = render(graph, format, name='a "name" <of> --> it')
    assert time.process_time() - started < 2
    assert first == render(graph, format, name='a "name" <of> --> it') and first.endswith("\n")
    assert "http" not in first.replace("http://www.w3.org/2000/svg", "")


def test_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="choose one of text, mermaid, dot, svg, html, json"):
        render(demo(), "png")


@pytest.mark.parametrize("format", ["text", "mermaid", "dot", "svg", "html"])
def test_labels_carry_names_types_facts_payloads_and_capacities(format: str) -> None:
    drawn = render(demo(), format, name="demo")
    for said in (
        "demo",
        "corpus",
        "source/rows",
        "token_budget 8192",
        "block_size 8",
        "SampleTable",
        "records: StepRecord",
        "queue 4, 4 GiB",
        "×2",
    ):
        assert said in drawn, said


def test_text_goes_straight_down_and_branches_are_indented() -> None:
    lines = render(demo(), "text", name="demo").splitlines()
    assert lines[0] == "demo: 10 stages, 9 edges"
    assert lines[2].startswith("corpus  source/rows") and lines[3] == "│ SampleTable (queue 2)"
    assert lines[-1].startswith("└─ checkpoints: Checkpoint (queue 2) → evaluate  sink/acceptance")


def test_text_refers_to_a_stage_that_is_drawn_already() -> None:
    drawn = render(odd(), "text", name="odd")
    assert drawn.count("both  sink/jsonl") == 1 and drawn.count("both (above)") == 2


def test_mermaid_keeps_names_out_of_its_grammar() -> None:
    drawn = render(odd(), "mermaid", name="odd")
    inner = re.compile(r'  (?:n\d+\["[^"`|<>\[\]]*(?:<br/>[^"`|<>\[\]]*)*"\]:::\w+|n\d+ -\.?->\|"[^"`|<>]*"\| n\d+)')
    for line in drawn.splitlines()[4:-2]:
        fits = inner.fullmatch(line.removeprefix("  ") if line.startswith("    ") else line)
        assert fits or re.fullmatch(r'  (end|subgraph \w+\["[\w :]+"\])', line), line
    assert "#34;q#34;" in drawn and "p#45;#45;#62;q" in drawn and "größe" in drawn and "target-forward" in drawn


def test_dot_quotes_every_name() -> None:
    drawn = render(odd(), "dot", name='a"b\\')
    assert drawn.startswith('digraph "a\\"b\\\\" {\n')
    for line in drawn.splitlines():
        assert re.fullmatch(r'(?:[^"\\]|"(?:[^"\\]|\\.)*")*', line), line
    assert '"\\"q\\"\\nsink/jsonl' in drawn


def test_json_is_complete() -> None:
    tree = json.loads(render(demo(), "json", name="demo"))
    assert [node["name"] for node in tree["nodes"]] == list(demo().nodes)
    drafter = next(node for node in tree["nodes"] if node["name"] == "drafter")
    assert drafter["options"]["optimizer"]["lr"] == 6e-4 and drafter["facts"]["hidden_size"] == 64
    assert tree["edges"][4] == {
        "from": "target",
        "port": "",
        "to": "drafter",
        "payload": "FeatureBatch",
        "capacity": 4,
        "capacity_bytes": 4 << 30,
    }


def test_svg_is_well_formed_and_says_every_name() -> None:
    root = ET.fromstring(render(odd(), "svg", name="<odd> & \x00"))
    titles = [node.text or "" for node in root.iter(f"{SVG}title")]
    for name in odd().nodes:
        assert any(title.startswith(name) for title in titles), name


def test_svg_tells_the_planes_apart_and_stacks_copies() -> None:
    root = ET.fromstring(render(demo(), "svg", name="demo"))
    lines = [node.get("class") for node in root.iter(f"{SVG}path") if "line" in (node.get("class") or "").split()]
    assert lines.count("line planning") == 3 and lines.count("line") == 6
    groups = {g[0].text.split("\n")[0]: g for g in root.iter(f"{SVG}g")}  # type: ignore[union-attr]
    boxes = {name: sum(r.get("class") == "box" for r in group) for name, group in groups.items()}
    assert boxes["target"] == 2 and boxes["drafter"] == 1


def test_svg_has_its_own_light_and_dark_looks() -> None:
    drawn = render(demo(), "svg", name="demo")
    assert "prefers-color-scheme:dark" in drawn and 'class="page"' in drawn and "var(" not in drawn


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for key, value in attrs if key in ("src", "href")]
        if tag not in ("meta", "path", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("meta", "path", "rect"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


def test_html_is_one_page_with_every_option() -> None:
    page = _Page()
    page.feed(render(odd(), "html", name="<odd>"))
    assert page.open == [] and page.links == []
    for said in ("token_budget", "8192", "Padded tokens per batch.", "optimizer"):
        assert said in page.cells


def _points(path: str) -> list[tuple[float, float]]:
    """Points along a path, close enough together to notice a box."""
    numbers = [(kind, [float(n) for n in rest.split()]) for kind, rest in re.findall(r"([MLCQ])([^MLCQ]*)", path)]
    points = [tuple(numbers[0][1])]
    for _, values in numbers[1:]:
        corners = [points[-1], *zip(values[::2], values[1::2], strict=True)]
        for step in range(1, 41):
            row = list(corners)
            while len(row) > 1:
                t = step / 40
                row = [(a + (c - a) * t, b + (d - b) * t) for (a, b), (c, d) in itertools.pairwise(row)]
            points.append(row[0])
    return points  # type: ignore[return-value]


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@pytest.mark.parametrize("graph", [demo(), odd(), many(30), wide(80)], ids=["demo", "odd", "many", "wide"])
def test_boxes_lines_and_labels_keep_off_one_another(graph: Graph) -> None:
    plan: Layout = layout(graph)
    boxes = {name: (b.x, b.y, b.x + b.width, b.y + b.height) for name, b in plan.boxes.items()}
    names = list(boxes)
    for i, one in enumerate(names):
        assert boxes[one][0] > 0 and boxes[one][2] < plan.width and boxes[one][1] > 0 and boxes[one][3] < plan.height
        assert not any(_overlap(boxes[one], boxes[other]) for other in names[i + 1 :])
    labels = []
    for route in plan.routes:
        for x, y in _points(route.path):
            inside = [n for n, b in boxes.items() if b[0] + 0.5 < x < b[2] - 0.5 and b[1] + 0.5 < y < b[3] - 0.5]
            assert not inside, (route.edge.name, inside)
            assert 0 < x < plan.width and 0 < y < plan.height
        assert route.room >= label_room(route.edge)
        label = (route.x - label_room(route.edge), route.y - 15, route.x - 10, route.y + 14)
        assert not any(_overlap(label, box) for box in boxes.values()), route.edge.name
        labels.append(label)
    assert not any(_overlap(a, b) for i, a in enumerate(labels) for b in labels[i + 1 :])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "yes"),
        (1e-4, "0.0001"),
        ((1, 3, 5), "1 3 5"),
        (list(range(20)), "0 1 2 … 17 18 19"),
        (Path("/a/b.jsonl"), "b.jsonl"),
        ("a\nb", "a b"),
        ({"x": 1}, ""),
        (None, ""),
    ],
)
def test_facts_are_put_briefly(value: Any, text: str) -> None:
    assert brief(value) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (3 << 29, "1.5 GiB"), (512_000_000, "488.3 MiB")]
)
def test_sizes_are_put_in_units(count: int, text: str) -> None:
    assert size(count) == text
