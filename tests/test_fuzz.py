"""Mutated pipelines: whatever a file holds, loading and checking it gives a pipeline or placed problems, and soon.

FLOWDFLASH_FUZZ_EXAMPLES=5000 tries as many random examples of each test instead of the same few.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from cli_runs import ROOT
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from flowdflash import stages
from flowdflash.config.check import load, load_text
from flowdflash.config.problems import FORMATS
from flowdflash.errors import PipelineInvalid
from flowdflash.plugin.loader import Plugins, load_plugins
from flowdflash.render.text import text as as_text

MORE = int(os.environ.get("FLOWDFLASH_FUZZ_EXAMPLES", "0"))
FUZZ = settings(
    max_examples=MORE or 80,
    derandomize=not MORE,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
TEXTS = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "pipelines").glob("*.yaml"))]
MOST_SECS = 2.0
"""Of processor time for one file."""

Pairs = list[tuple[Any, Any]]


class Mapping(list[Any]):
    """Pairs of keys and values: a mapping that may hold a key twice."""


def pairs(tree: Any) -> Any:
    if isinstance(tree, dict):
        return Mapping((key, pairs(value)) for key, value in tree.items())
    return [pairs(value) for value in tree] if isinstance(tree, list) else tree


TREES = [YAML(typ="safe", pure=True).load(text) for text in TEXTS]
KEYS = sorted({key for tree in TREES for stage in tree["stages"].values() for key in stage})
NAMES = sorted({name for tree in TREES for name in tree["stages"]})
TYPES = sorted({stage[key] for tree in TREES for stage in tree["stages"].values() for key in ("kind", "type")})

ODD = st.sampled_from(
    [
        *("", "~", "null", "true", "no", "0", "-1", "1e999", "-.inf", ".nan", "1_000", "010", "0x1F", "9" * 5000),
        *("${vars.model}", "${vars.no}", "${env:HOME}", "${env:NO_SUCH:-9}", "${", "${}", "$${", "${env:A:-${env:B}}"),
        *("~nobody-here/x", "~", "~root", "/", "/dev/null", "..", "./x", "x" * 5000, "a/b.yaml"),
        *("\x7f", "a\nb", "é", "\u2028", "1e-4", "toy:1", "toy:layers=9"),
        *("drafter.records", "drafter.", ".", "a.b.c", "4GiB", "-4GiB", "1e9GB", "auto", "cuda:99"),
        *("!!python/object/apply:os.system [x]", "!!binary x", "&a [*a]", "&a {b: 1}", "*a", "<<", "? [x]", "{[1]: 2}"),
        *("[]", "{}", "[[]]", "{a: {b: {c: {d: 1}}}}", "[1, 2]", "[null]", "{from: target}", "{from: 3, capacity: 0}"),
    ]
)  # fmt: skip
WORDS = st.sampled_from([*KEYS, *NAMES, *TYPES, "extends", "vars", "plugins", "version", "stages", "<<", "inputs"])
VALUE = ODD | WORDS | st.text(max_size=6).map(repr) | st.integers().map(str) | st.floats().map(str)

OVERRIDES = st.lists(
    st.builds("{}={}".format, WORDS | st.builds("stages.{}.{}".format, WORDS, WORDS), VALUE), max_size=2
)


class Raw(str):
    """YAML that is put in as it is."""


def rendered(node: Any) -> str:
    if isinstance(node, Mapping):
        return "{" + ", ".join(f"{key}: {rendered(value)}" for key, value in node) + "}"
    if isinstance(node, list):
        return "[" + ", ".join(map(rendered, node)) + "]"
    if isinstance(node, Raw) or not isinstance(node, str):
        return "null" if node is None else str(node)
    return '"' + node.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def lists(node: Any) -> list[list[Any]]:
    """Every mapping and list of a tree that holds something."""
    if not isinstance(node, list):
        return []
    below = [value for _, value in node] if isinstance(node, Mapping) else node
    return [*([node] if node else []), *(found for value in below for found in lists(value))]


def mutate(root: Mapping, draw: Any) -> None:
    node = draw(st.sampled_from(lists(root)))
    at = draw(st.integers(0, len(node) - 1))
    key, value = node[at] if isinstance(node, Mapping) else ("", node[at])
    action = draw(st.sampled_from(["drop", "twice", "rename", "replace", "add", "decorate", "move", "swap"]))
    if action == "drop":
        del node[at]
    elif action == "twice":
        node.insert(draw(st.integers(0, len(node))), node[at])
    elif action == "move":
        to = draw(st.sampled_from(lists(root)))
        del node[at]
        to.append((key or "moved", value) if isinstance(to, Mapping) else value)
    elif action == "swap":
        other = draw(st.integers(0, len(node) - 1))
        node[at], node[other] = node[other], node[at]
    elif action == "rename" and key:
        node[at] = (Raw(draw(WORDS | ODD.filter(lambda text: "\n" not in text))), value)
    elif action == "decorate":
        mark = draw(st.sampled_from(["!!str ", "!x ", "&a ", "!!python/name:os.system ", "&a !y ", "*a # "]))
        node[at] = (key, Raw(mark + rendered(value))) if key else Raw(mark + rendered(value))
    else:
        fresh = Raw(draw(VALUE))
        entry = (Raw(draw(WORDS)) if action == "add" else key, fresh) if isinstance(node, Mapping) else fresh
        node[at : at + (action != "add")] = [entry]


@st.composite
def trees(draw: Any) -> str:
    """A pipeline with a few places changed."""
    root = pairs(draw(st.sampled_from(TREES)))
    for _ in range(draw(st.integers(1, 5))):
        if lists(root):
            mutate(root, draw)
    return "\n".join(f"{key}: {rendered(value)}" for key, value in root)


@st.composite
def texts(draw: Any) -> bytes:
    """A pipeline cut off, and with bytes put in or in place of others."""
    data = draw(st.sampled_from(TEXTS)).encode()
    if draw(st.booleans()):
        data = data[: draw(st.integers(0, len(data)))]
    marks = st.sampled_from([*"{}[]:,&*!|>'\"%@`#-?~\t\n", "\ufeff", "<<: ", "...", "---", "\0", "\x85", "é", "\\x"])
    for _ in range(draw(st.integers(0, 4))):
        at, size = draw(st.integers(0, len(data))), draw(st.integers(0, 30))
        put = draw(marks.map(str.encode) | st.binary(max_size=6) | st.text(max_size=3).map(lambda t: t.encode("utf-8")))
        data = data[:at] + put + data[at + size :]
    return data


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins(builtin=[stages])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a mutated pipeline goes: beside the data that it names."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "data").symlink_to(ROOT / "data")
    (folder / "pipelines").mkdir()
    (folder / "pipelines" / "a").mkdir()
    (folder / "pipelines" / "a" / "b.yaml").write_text(TEXTS[-1])
    return folder / "pipelines" / "fuzz.yaml"


def tried(file: Path, data: bytes, plugins: Plugins, overrides: list[str]) -> None:
    """Load and check a file: it becomes a pipeline that can be drawn and written down, or placed problems."""
    file.write_bytes(data)
    began = time.thread_time()
    try:
        pipeline = load(file, plugins, overrides=overrides)
    except PipelineInvalid as invalid:
        assert invalid.problems
        told = "".join(written(invalid.problems) for written in FORMATS.values())
        told.encode()
        assert all(problem.file and problem.message for problem in invalid.problems)
        for fault in ("Traceback", "mistake in the plugin", "cannot be checked", "Error: "):
            assert fault not in told, told
    else:
        as_text(pipeline.graph, pipeline.name)
        again = load_text(pipeline.text, plugins, file.parent)
        assert again.resolved == pipeline.resolved
    assert time.thread_time() - began < MOST_SECS


@FUZZ
@given(text=trees(), overrides=OVERRIDES)
def test_mutated_pipeline_is_checked_or_told_what_is_wrong(
    text: str, overrides: list[str], file: Path, plugins: Plugins
) -> None:
    tried(file, text.encode("utf-8", "surrogatepass"), plugins, overrides)


@FUZZ
@given(data=texts())
def test_cut_and_garbled_file_is_checked_or_told_what_is_wrong(data: bytes, file: Path, plugins: Plugins) -> None:
    tried(file, data, plugins, [])
