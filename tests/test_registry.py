import pytest
from pydantic import Field

from flowdflash.errors import PluginBroken
from flowdflash.items import StepRecord
from flowdflash.plugin.registry import Registry
from flowdflash.stage import Interleaver, Sink, Stage, StageConfig


class Sorted(Interleaver):
    """Batches as they come.

    More text.
    """

    type = "sorted"

    class Config(StageConfig):
        reverse: bool = Field(False, description="backwards")

    def order(self, batches, history, rng):
        return range(len(batches))


class Lines(Sink):
    """Keeps lines."""

    type = "lines"
    reads = (StepRecord,)

    def write(self, item):
        pass


def refusal(cls) -> str:
    with pytest.raises(PluginBroken) as caught:
        Registry().register(cls)
    return str(caught.value)


def test_finds_what_was_registered_with_its_owner_and_first_docstring_line():
    registry = Registry()
    with registry.owned_by("mine"):
        assert registry.register(Sorted) is Sorted
    assert registry.get("interleaver", "sorted") is Sorted
    assert registry.get("bucketer", "sorted") is None
    assert registry.get("interleaver", "other") is None
    (entry,) = registry.types()
    assert (entry.kind, entry.type, entry.owner, entry.summary) == (
        "interleaver",
        "sorted",
        "mine",
        "Batches as they come.",
    )


def test_types_are_listed_by_kind_in_pipeline_order_then_by_name():
    registry = Registry()
    early = type("Early", (Sorted.__base__,), {**vars(Sorted), "type": "early", "__doc__": "Early."})
    for cls in (Lines, Sorted, early):
        registry.register(cls)
    assert [r.type for r in registry.types()] == ["early", "sorted", "lines"]
    assert [r.type for r in registry.types("sink")] == ["lines"]


def test_duplicate_name_is_refused_naming_both_owners():
    registry = Registry()
    with registry.owned_by("first"):
        registry.register(Sorted)
    other = type("Other", (Interleaver,), {**vars(Sorted), "__doc__": "Other."})
    with pytest.raises(PluginBroken, match=r"'second'.*interleaver 'sorted'.*'first'"), registry.owned_by("second"):
        registry.register(other)
    assert registry.get("interleaver", "sorted") is Sorted


def test_the_same_class_twice_is_no_duplicate_and_keeps_its_owner():
    registry = Registry()
    with registry.owned_by("first"):
        registry.register(Sorted)
    with registry.owned_by("second"):
        registry.register(Sorted)
    assert [r.owner for r in registry.types()] == ["first"]


def test_a_plugin_that_fails_half_way_leaves_nothing_registered():
    registry = Registry()
    with pytest.raises(RuntimeError), registry.owned_by("broken"):
        registry.register(Sorted)
        raise RuntimeError
    assert registry.types() == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"type": "Not Lower"}, "lower case"),
        ({"type": None}, "`type` is None"),
        ({"__doc__": None}, "no docstring"),
        ({"kind": "sink"}, "kind 'sink'"),
        ({"order": lambda self, batches: []}, r"`order` cannot be called as `order(self, batches, history, rng)`"),
        ({"order": Interleaver.order}, "does not define `order"),
        ({"__init__": lambda self: None}, "`__init__` must take the config"),
        ({"Config": dict}, "does not derive from StageConfig"),
        ({"Config": type("Config", (StageConfig,), {"__annotations__": {"a": int}, "a": 1})}, "`a` has no description"),
        (
            {
                "Config": type(
                    "Config", (StageConfig,), {"__annotations__": {"x": int}, "model_config": {"extra": "allow"}}
                )
            },
            "refuse unknown keys",
        ),
        ({"reads": ("records",)}, "must hold classes"),
    ],
)
def test_a_class_that_would_fail_later_is_refused(changes, complaint):
    assert complaint in refusal(type("Odd", (Interleaver,), {**vars(Sorted), **changes}))


def test_an_option_must_not_shadow_a_key_of_every_stage():
    class Config(StageConfig):
        inputs: int = Field(1, description="clashes")

    assert "`inputs`" in refusal(type("Odd", (Interleaver,), {**vars(Sorted), "Config": Config}))


def test_every_fault_of_a_class_is_listed():
    message = refusal(type("Odd", (Interleaver,), {"type": "X", "__module__": "somewhere"}))
    assert all(part in message for part in ("Odd", "`type` is 'X'", "no docstring", "does not define `order"))


def test_a_sink_must_say_what_it_takes():
    assert "reads" in refusal(type("Deaf", (Sink,), {**vars(Lines), "reads": ()}))


@pytest.mark.parametrize("cls", [Sorted(Sorted.Config()), dict, Stage, type("Deep", (Sorted,), {"type": "deep"})])
def test_only_classes_directly_under_a_kind_are_stages(cls):
    refusal(cls)
