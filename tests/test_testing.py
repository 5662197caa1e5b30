"""The contract checks must fail for stages that break the contract, each for the reason it says."""

import json
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from pydantic import Field

from flowdflash import testing
from flowdflash.errors import PipelineInvalid, PluginBroken
from flowdflash.items import BatchTable, FeatureBatch, StepRecord
from flowdflash.plugin import hookimpl
from flowdflash.plugin.loader import Plugins
from flowdflash.stage import Bucketer, Dispatcher, Drafter, Interleaver, Sink, StageConfig, TargetForward


def interleaver(order):
    return type("Odd", (Interleaver,), {"type": "odd", "__doc__": "Odd.", "order": order})


@pytest.mark.parametrize(
    ("order", "complaint"),
    [
        (lambda self, b, h, rng: range(1, len(b)), "each index must come exactly once"),
        (lambda self, b, h, rng: [0] * len(b), "each index must come exactly once"),
        (lambda self, b, h, rng: np.random.permutation(len(b)), "not numpy's global one"),
        (lambda self, b, h, rng: np.random.default_rng().permutation(len(b)), "same seed"),
        (lambda self, b, h, rng: [float(i) for i in range(len(b))], "not an index"),
    ],
)
def test_an_interleaver_that_breaks_the_contract_is_caught(order, complaint):
    with pytest.raises(AssertionError, match=complaint):
        testing.assert_interleaver_contract(interleaver(order))


def test_an_interleaver_that_writes_to_its_input_is_caught():
    def order(self, batches, history, rng):
        batches.bucket[:] = 0
        return range(len(batches))

    with pytest.raises(ValueError, match="read-only"):
        testing.assert_interleaver_contract(interleaver(order))


def test_a_generator_is_a_sound_order():
    def order(self, batches, history, rng):
        yield from reversed(range(len(batches)))

    testing.assert_interleaver_contract(interleaver(order))


def test_a_class_that_cannot_be_registered_breaks_the_contract():
    with pytest.raises(PluginBroken, match="does not define `order"):
        testing.assert_interleaver_contract(type("Odd", (Interleaver,), {"type": "odd", "__doc__": "Odd."}))


class Choosy(Interleaver):
    """Refuses."""

    type = "choosy"

    class Config(StageConfig):
        size: int = Field(1, description="count")

    def check(self, check):
        check.refuse("size", "too small")
        return {}

    def order(self, batches, history, rng):
        return range(len(batches))


def test_a_class_inside_a_function_cannot_cross_a_process():
    class Config(StageConfig):
        size: int = Field(1, description="count")

    hidden = type("Hidden", (Interleaver,), {**vars(Choosy), "Config": Config})
    with pytest.raises(AssertionError, match="define the class at the top of a module"):
        testing.assert_interleaver_contract(hidden)


def test_options_that_check_refuses_are_said():
    with pytest.raises(AssertionError, match="too small"):
        testing.assert_interleaver_contract(Choosy)


def bucketer(batches):
    return type("Odd", (Bucketer,), {"type": "odd", "__doc__": "Odd.", "batches": batches})


def singles(samples, rows):
    rows = np.asarray(rows, dtype=np.int64)
    return BatchTable.build(samples, list(rows.reshape(-1, 1)), [0] * len(rows))


@pytest.mark.parametrize(
    ("batches", "complaint"),
    [
        (lambda self, s, rng: (singles(s, range(1, len(s))), None), "lost"),
        (lambda self, s, rng: (singles(s, [*range(len(s)), *range(min(1, len(s)))]), None), "places for"),
        (lambda self, s, rng: (singles(s, np.random.default_rng().permutation(len(s))), None), "same seed"),
        (lambda self, s, rng: ([], None), "must return a BatchTable"),
        (lambda self, s, rng: (singles(s, range(len(s))), None if s.last else s), "places for"),
    ],
)
def test_a_bucketer_that_breaks_the_contract_is_caught(batches, complaint):
    with pytest.raises(AssertionError, match=complaint):
        testing.assert_bucketer_contract(bucketer(batches))


def test_a_sound_bucketer_passes():
    testing.assert_bucketer_contract(bucketer(lambda self, s, rng: (singles(s, rng.permutation(len(s))), None)))


def dispatcher(route):
    return type("Odd", (Dispatcher,), {"type": "odd", "__doc__": "Odd.", "route": route})


@pytest.mark.parametrize(
    ("route", "complaint"),
    [
        (lambda self, loads, batch: len(loads), "it must be a replica from"),
        (lambda self, loads, batch: "0", "it must be a replica from"),
        (lambda self, loads, batch: None, "all are idle"),
        (lambda self, loads, batch: int(np.random.default_rng().integers(len(loads))), "not a function"),
    ],
)
def test_a_dispatcher_that_breaks_the_contract_is_caught(route, complaint):
    with pytest.raises(AssertionError, match=complaint):
        testing.assert_dispatcher_contract(dispatcher(route))


def test_sound_dispatchers_pass():
    free = dispatcher(lambda self, loads, batch: next((load.replica for load in loads if not load.full), None))
    in_turn = dispatcher(lambda self, loads, batch: batch.seq % len(loads))
    testing.assert_dispatcher_contract(free)
    testing.assert_dispatcher_contract(in_turn)


def sink(**methods):
    body = {"type": "odd", "__doc__": "Odd.", "reads": (StepRecord,), "write": lambda self, item: None, **methods}
    return type("Odd", (Sink,), body)


@pytest.mark.parametrize(
    ("methods", "complaint"),
    [
        ({"open": lambda self, ctx: (ctx.run_dir / "stray.txt").touch()}, "stray.txt"),
        ({"summary": lambda self: {"values": np.ones(1)}}, "not JSON serializable"),
        ({"close": lambda self: 1 / 0}, "division"),
    ],
)
def test_a_sink_that_breaks_the_contract_is_caught(methods, complaint):
    with pytest.raises((AssertionError, TypeError, ZeroDivisionError), match=complaint):
        testing.assert_sink_contract(sink(**methods))


def test_a_sink_without_ready_made_items_needs_some():
    with pytest.raises(AssertionError, match="pass items"):
        testing.assert_sink_contract(sink(reads=(dict,)))
    testing.assert_sink_contract(sink(reads=(dict,)), [{}])


def test_samples_by_their_lengths():
    samples = testing.make_samples([3, 4], [1, 2], epoch=2, last=False)
    assert samples.ids.tolist() == [0, 1] and samples.supervised.tolist() == [1, 2]
    assert (samples.epoch, samples.last) == (2, False)
    assert testing.make_samples([3, 4]).supervised.tolist() == [3, 4]


def test_the_brief_has_its_exact_counts_and_means():
    samples = testing.brief_samples()
    bucket = np.searchsorted(testing.BRIEF_EDGES, samples.lengths)
    assert np.bincount(bucket).tolist() == [15232, 17360, 17136, 17020, 13132, 20202]
    means = np.bincount(bucket, samples.lengths) / np.bincount(bucket)
    assert np.abs(means - [535, 991, 1462, 2056, 2827, 4831]).max() < 1


@pytest.mark.parametrize(("scale", "batches"), [(10, [24, 43, 61, 85, 94, 337]), (100, [2, 4, 6, 9, 9, 34])])
def test_the_scaled_brief_still_fills_every_batch(scale, batches):
    samples = testing.brief_samples(scale)
    counts = np.bincount(np.searchsorted(testing.BRIEF_EDGES, samples.lengths))
    sizes = testing.BRIEF_BUDGET // np.array(testing.BRIEF_EDGES)
    assert (counts / sizes).tolist() == batches


def test_records_are_consecutive_and_plain():
    records = testing.make_records(3, first_step=5)
    assert [r.step for r in records] == [5, 6, 7]
    assert json.loads(json.dumps(records[0].as_dict()))["buckets"] == {"0": 1, "1": 1, "2": 1}


def test_a_checkpoint_knows_its_size():
    assert testing.make_checkpoint(3).nbytes == 16 and testing.make_checkpoint(3).step == 3


class Features:
    """As much of a tensor as travels."""

    def numel(self):
        return 1

    def element_size(self):
        return 4


class Echo(TargetForward):
    """Gives one number per batch."""

    type = "echo"

    def forward(self, batch):
        return FeatureBatch(batch, Features(), (0,))


class Count(Drafter):
    """Steps on every batch."""

    type = "count"
    writes: ClassVar = {"records": StepRecord}

    def step(self, batch):
        self.steps = getattr(self, "steps", 0) + 1
        return testing.make_records(1, buckets=1, first_step=self.steps)

    def finish(self, reason):
        return ()


class Gather(Sink):
    """Keeps the steps."""

    type = "gather"
    reads = (StepRecord,)

    def write(self, item):
        self.got = [*getattr(self, "got", []), item.step]

    def summary(self):
        return {"got": self.got}


@pytest.mark.timeout(20)
def test_run_pipeline_runs_a_mapping_to_its_end(tmp_path):
    from flowdflash.stages.length import LengthBucketer
    from flowdflash.stages.pull import Pull
    from flowdflash.stages.shuffle import Shuffle
    from flowdflash.stages.synthetic_lengths import SyntheticLengths

    def register(registry):
        for cls in (SyntheticLengths, LengthBucketer, Shuffle, Pull, Echo, Count, Gather):
            registry.register(cls)

    plugins = Plugins()
    plugins.load_module(SimpleNamespace(__name__="mine", flowdflash_register=hookimpl(register)))
    tree = {
        "stages": {
            "corpus": {"kind": "source", "type": "synthetic_lengths", "law": "fixed", "length": 10, "samples": 12},
            "buckets": {"kind": "bucketer", "type": "length", "inputs": "corpus", "token_budget": 40, "edges": [10]},
            "order": {"kind": "interleaver", "type": "shuffle", "inputs": "buckets"},
            "dispatch": {"kind": "dispatcher", "type": "pull", "inputs": "order"},
            "target": {"kind": "target-forward", "type": "echo", "inputs": "dispatch"},
            "drafter": {"kind": "drafter", "type": "count", "inputs": "target"},
            "gather": {"kind": "sink", "type": "gather", "inputs": "drafter.records"},
        }
    }
    outcome = testing.run_pipeline(tree, run_dir=tmp_path / "run", plugins=plugins)
    assert outcome.status == "finished" and outcome.samples == 12
    assert outcome.summaries["gather"] == {"got": [1, 2, 3]}


def test_run_pipeline_refuses_what_is_wrong_with_every_problem(tmp_path):
    with pytest.raises(PipelineInvalid, match="nobody"):
        testing.run_pipeline(
            {"stages": {"a": {"kind": "sink", "type": "nobody", "inputs": "b"}}}, run_dir=tmp_path, plugins=Plugins()
        )
