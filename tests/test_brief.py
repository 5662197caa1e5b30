"""What the project was asked for, each point on a run of a small pipeline: YAML tree in, threads, records out."""

from __future__ import annotations

import copy
import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import brief_stages
import flowdflash_wandb
import pytest
from brief_stages import Seen
from runtime_fakes import headers

from flowdflash import stages
from flowdflash.config.check import load_mapping
from flowdflash.items import BatchInfo, FeatureBatch
from flowdflash.plugin.loader import Plugins, load_plugins
from flowdflash.runtime.outcome import RunOutcome
from flowdflash.stages.dflash_drafter import DFlashDrafter
from flowdflash.testing import run_pipeline

WINDOW = 4
CLIP = 0.5
# Of these lengths the last of six buckets has under a third of the samples and over half of the batches.
TREE: dict[str, Any] = {
    "version": 1,
    "name": "asked",
    "seed": 6,
    "stages": {
        "corpus": {
            "kind": "source",
            "type": "synthetic_lengths",
            "samples": 96,
            "mu": 3.2,
            "sigma": 0.6,
            "min_length": 8,
            "max_length": 64,
            "vocab_size": 127,
            "epochs": 2,
        },
        "buckets": {
            "kind": "bucketer",
            "type": "length",
            "inputs": "corpus",
            "edges": [13, 16, 20, 24, 30, 64],
            "token_budget": 192,
        },
        "order": {"kind": "interleaver", "type": "stratified", "inputs": "buckets"},
        "dispatch": {"kind": "dispatcher", "type": "pull", "inputs": "order", "workers": 2},
        "target": {"kind": "target-forward", "type": "toy", "inputs": "dispatch", "vocab_size": 128, "replicas": 2},
        "drafter": {
            "kind": "drafter",
            "type": "dflash",
            "inputs": "target",
            "block_size": 4,
            "num_hidden_layers": 1,
            "num_anchors": 4,
            "accumulate": WINDOW,
            "clip": CLIP,
        },
        "metrics": {"kind": "sink", "type": "jsonl", "inputs": "drafter.records"},
        "board": {"kind": "sink", "type": "wandb", "inputs": "drafter.records", "mode": "offline"},
        "look": {"kind": "sink", "type": "looking", "inputs": "drafter.records"},
        "save": {"kind": "sink", "type": "slow", "inputs": "drafter.checkpoints"},
    },
}


class Board:
    """Takes the place of the package wandb."""

    id = "run"

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.threads: set[str] = set()

    def Settings(self, **given: Any) -> Any:  # noqa: N802
        return given

    def Histogram(self, np_histogram: Any) -> Any:  # noqa: N802
        return np_histogram

    def init(self, **given: Any) -> Board:
        return self

    def define_metric(self, name: str, step_metric: str = "") -> None:
        """Nothing to keep."""

    def log(self, values: dict[str, Any]) -> None:
        self.rows.append(values)
        self.threads.add(threading.current_thread().name)

    def finish(self, exit_code: int = 0) -> None:
        """Nothing to do."""


@dataclass
class Run:
    """One run of ``TREE``, and what was to be seen of it."""

    seen: Seen
    board: Board
    plan: list[BatchInfo]
    outcome: RunOutcome
    lines: list[dict[str, Any]]


def all_plugins() -> Plugins:
    return load_plugins(builtin=[stages, brief_stages])


def planned(tree: dict[str, Any], tmp_path: Path) -> list[BatchInfo]:
    """The headers of a run, worked out without running it."""
    return headers(load_mapping(tree, all_plugins(), tmp_path).graph, tree["seed"], tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("brief")
    board, seen, step = Board(), Seen(), DFlashDrafter.step

    def look(drafter: DFlashDrafter, batch: FeatureBatch) -> Any:
        seen.trained.append(batch.tokens)
        seen.threads["drafter"] = threading.current_thread().name
        return step(drafter, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flowdflash_wandb, "_import_wandb", lambda: board)
        patch.setattr(DFlashDrafter, "step", look)
        patch.setenv("WANDB_MODE", "offline")
        outcome = run_pipeline(TREE, run_dir=folder / "run", plugins=all_plugins())
    text = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    yield Run(seen, board, planned(TREE, folder), outcome, [json.loads(line) for line in text.splitlines()])


def test_1_a_header_rides_with_its_batch_from_the_plan_to_the_optimizer_step(run: Run) -> None:
    def facts(info: BatchInfo) -> tuple[Any, ...]:
        return tuple(getattr(info, name) for name in BatchInfo.__slots__ if name != "stamps")

    trained = run.seen.trained
    assert [facts(tokens.info) for tokens in trained] == [facts(info) for info in run.plan]
    for tokens in trained:
        info = tokens.info
        assert tokens.lengths.tolist() == list(info.lengths)
        assert (
            tokens.input_ids.shape == (info.samples, max(info.lengths)) and tokens.input_ids.size == info.padded_tokens
        )
        assert list(info.stamps) == ["order", "dispatch", "target"]
        assert sorted(info.stamps.values()) == list(info.stamps.values())
    # The record of a step names its batches, and every batch is in one.
    assert [seq for record in run.seen.records for seq in record.seqs] == list(range(len(run.plan)))


def windows_of_one_bucket(plan: list[BatchInfo]) -> int:
    """Windows that hold one bucket only while another had batches left."""
    count = 0
    for _, infos in groupby(plan, key=lambda info: info.epoch):
        buckets = [info.bucket for info in infos]
        windows = [buckets[at : at + WINDOW] for at in range(0, len(buckets), WINDOW)]
        count += sum(len(set(window)) == 1 < len(set(buckets[at * WINDOW :])) for at, window in enumerate(windows))
    return count


def test_2_windows_span_buckets_and_nothing_waits_or_hoards(run: Run, tmp_path: Path) -> None:
    shuffled = copy.deepcopy(TREE)
    shuffled["stages"]["order"]["type"] = "shuffle"
    assert Counter(info.bucket for info in run.plan)[5] > len(run.plan) / 2
    assert windows_of_one_bucket(planned(shuffled, tmp_path)) > 0, "a flat shuffle would do: the test shows nothing"
    assert windows_of_one_bucket(run.plan) == 0
    # These are the windows that were trained on, in that order; only the end of an epoch cuts one short.
    trained = [tokens.info for tokens in run.seen.trained]
    assert [info.seq for info in trained] == [info.seq for info in run.plan]
    for _, records in groupby(run.seen.records, key=lambda record: record.epoch):
        sizes = [record.batches for record in records]
        assert sizes[:-1] == [WINDOW] * (len(sizes) - 1) and 1 <= sizes[-1] <= WINDOW
    # Never more waits on an edge than its capacity, whatever its bucket.
    assert all(edge.high_water <= edge.capacity for edge in run.outcome.edges)


def test_3_every_logger_has_bucket_counts_lengths_padding_and_the_mix_of_the_window(run: Run) -> None:
    infos = {info.seq: info for info in run.plan}
    dispatched: Counter[int] = Counter()
    for line, row in zip(run.lines, run.board.rows, strict=True):
        window = [infos[seq] for seq in line["seqs"]]
        mix = Counter(info.bucket for info in window)
        dispatched.update(mix)
        lengths = [length for info in window for length in info.lengths]
        padding = 1 - sum(lengths) / sum(info.padded_tokens for info in window)
        assert line["step"] == row["step"]
        assert line["buckets"] == {str(bucket): mix[bucket] for bucket in sorted(mix)}
        assert line["length_max"] == row["length/max"] == max(lengths)
        assert line["length_mean"] == row["length/mean"] == pytest.approx(sum(lengths) / len(lengths))
        assert line["padding"] == row["window/padding"] == pytest.approx(padding)
        assert {k: row[f"window_mix/{k}"] for k in mix} == {k: n / len(window) for k, n in mix.items()}
        assert {k: row[f"dispatched/{k}"] for k in dispatched} == dict(dispatched)
        counts, edges = row["buckets/dispatched"]
        assert {round(edge + 0.5): count for edge, count in zip(edges, counts, strict=False) if count} == dispatched
    assert run.outcome.batches_per_bucket == {str(k): dispatched[k] for k in sorted(dispatched)}
    assert run.board.threads == {"flowdflash-wandb"}, "never the thread that trains"


@pytest.mark.timeout(100)
def test_4_the_first_four_batches_reach_four_targets_every_time(tmp_path: Path) -> None:
    tree = copy.deepcopy(TREE)
    tree["stages"]["corpus"] = {
        "kind": "source",
        "type": "synthetic_lengths",
        "law": "fixed",
        "samples": 32,
        "length": 9,
    }
    tree["stages"]["buckets"] = {"kind": "bucketer", "type": "length", "inputs": "corpus", "token_budget": 18}
    tree["stages"]["dispatch"]["workers"] = 4
    tree["stages"]["target"] = {"kind": "target-forward", "type": "looking", "inputs": "dispatch", "replicas": 4}
    for name in ("drafter", "metrics", "board", "look", "save"):
        del tree["stages"][name]
    tree["stages"]["count"] = {"kind": "sink", "type": "counting", "inputs": "target"}
    plugins = all_plugins()
    for repeat in range(20):
        # Equal batches take equally long: a target is done with one when four are.
        seen = Seen(meet=threading.Barrier(4, timeout=30).wait)
        run_pipeline(tree, run_dir=tmp_path / str(repeat), plugins=plugins)
        order = [seen.forwarded[seq] for seq in range(16)]
        assert sorted(order[:4]) == [0, 1, 2, 3]
        assert Counter(order) == {0: 4, 1: 4, 2: 4, 3: 4}


def test_5_every_record_has_the_gradient_norm_before_and_after_clipping(run: Run) -> None:
    assert len(run.lines) == len(run.seen.records) == run.outcome.steps
    for line, row in zip(run.lines, run.board.rows, strict=True):
        assert line["grad_norm"] == row["train/grad_norm"] > 0
        assert line["grad_norm_clipped"] == row["train/grad_norm_clipped"]
        assert line["grad_norm_clipped"] == pytest.approx(min(line["grad_norm"], CLIP))
    assert any(line["grad_norm"] > CLIP for line in run.lines), "nothing was clipped: the test would show nothing"


def test_6_a_checkpoint_is_written_beside_training_which_pauses_for_the_copy_alone(run: Run) -> None:
    (checkpoint,) = run.seen.saved
    assert run.seen.threads["save"] != run.seen.threads["drafter"]
    began, ended = run.seen.steps_during_save
    assert began <= ended - 2 and ended >= checkpoint.step + 3, "training stood still while the checkpoint was written"
    pauses = {line["step"]: line["checkpoint_pause_secs"] for line in run.lines}
    assert pauses.pop(checkpoint.step + 1) == checkpoint.pause_secs > 0
    assert set(pauses.values()) == {0.0}
