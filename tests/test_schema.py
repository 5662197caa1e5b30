"""The JSON Schema for editors: shape, and that it agrees with what loading accepts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from pipeline_fakes import STAGES, FakeRegistry
from pydantic import ConfigDict, Field

from flowdflash.config.schema import json_schema
from flowdflash.stage import KINDS, Interleaver, StageConfig


def _walk(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
    for below in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _walk(below)


def test_every_stage_has_its_options_with_descriptions_and_defaults() -> None:
    schema = json_schema(FakeRegistry())
    for cls in STAGES:
        stage = schema["$defs"][f"{cls.kind}.{cls.type}"]
        assert stage["additionalProperties"] is False and stage["properties"]["kind"] == {"const": cls.kind}
        assert ("inputs" in stage["properties"]) == (cls.kind != "source")
        for name, info in cls.Config.model_fields.items():
            assert stage["properties"][name]["description"] == info.description
            assert (name in stage["required"]) == info.is_required()
    draft = schema["$defs"]["drafter.dflash"]["properties"]
    assert draft["block_size"]["default"] == 8 and draft["optimizer"]["$ref"] == "#/$defs/drafter.dflash.Optimizer"


def test_every_reference_leads_somewhere() -> None:
    schema = json_schema(FakeRegistry())
    refs = {node["$ref"] for node in _walk(schema) if isinstance(node.get("$ref"), str)}
    assert refs and refs <= {f"#/$defs/{name}" for name in schema["$defs"]}


def test_options_follow_from_kind_and_type() -> None:
    rules = json_schema(FakeRegistry())["$defs"]["stage"]["allOf"]
    kinds = [r for r in rules if r["if"]["required"] == ["kind"]]
    assert [r["if"]["properties"]["kind"]["const"] for r in kinds] == list(KINDS)
    chosen = {r["then"]["$ref"] for r in rules if r["if"]["required"] == ["kind", "type"]}
    assert chosen == {f"#/$defs/{cls.kind}.{cls.type}" for cls in STAGES}


def test_values_may_be_references_and_numbers_may_be_spelled_freely() -> None:
    lr = json_schema(FakeRegistry())["$defs"]["drafter.dflash.Optimizer"]["properties"]["lr"]
    patterns = [way.get("pattern", "") for way in lr["anyOf"]]
    assert any("vars" in pattern for pattern in patterns) and any("eE" in pattern for pattern in patterns)


def test_file_with_a_base_may_leave_things_out() -> None:
    schema = json_schema(FakeRegistry())
    assert "required" not in schema and schema["if"] == {"required": ["extends"]}
    assert schema["else"]["required"] == ["version", "stages"]


def test_option_that_cannot_be_described_costs_one_stage_only() -> None:
    class Odd(Interleaver):
        """Odd."""

        type = "odd"

        class Config(StageConfig):
            model_config = ConfigDict(arbitrary_types_allowed=True)
            slot: memoryview | None = Field(None, description="Oddest.")

    schema = json_schema(FakeRegistry([*STAGES, Odd]))
    assert "cannot be described" in schema["$defs"]["interleaver.odd"]["description"]
    assert "sink.jsonl" in schema["$defs"]


def test_schema_is_json_and_the_same_every_time() -> None:
    assert json.dumps(json_schema(FakeRegistry())) == json.dumps(json_schema(FakeRegistry()))


def test_schema_needs_neither_torch_nor_what_runs() -> None:
    code = (
        "import sys, flowdflash.config.schema\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers', 'wandb')\n"
        "       or m.startswith(('flowdflash.runtime', 'flowdflash.stages', 'flowdflash.plugin'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
