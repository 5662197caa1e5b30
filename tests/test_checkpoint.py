"""The checkpoint sink: complete or absent, whatever happens; keeps the newest few; holds the draft and nothing else."""

from __future__ import annotations

import errno
import hashlib
import json
import resource
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flowdflash_checkpoint
import pytest
import torch
from drafter_fakes import draft_config
from flowdflash_checkpoint import CheckpointSink

from flowdflash.dflash.config import tensor_shapes
from flowdflash.dflash.export import load_zlab, zlab_config
from flowdflash.dflash.model import DFlashDraft
from flowdflash.items import Checkpoint
from flowdflash.stage import OpenContext, SilentReport

CONFIG = draft_config(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=40,
    mask_token_id=39,
)
TARGET = "toy:{}"


def snapshot(step: int, reason: str = "every", *, seed: int | None = None) -> Checkpoint:
    """What the drafter gives: a draft of this seed (the step by default), an optimizer's state, a ledger."""
    draft = DFlashDraft(CONFIG, seed=step if seed is None else seed)
    moments = {0: {"step": torch.tensor(float(step)), "exp_avg": torch.ones(3)}}
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "fused": None, "params": [0]}]
    state = {"optimizer": {"state": moments, "param_groups": groups}, "steps": step, "epoch": 1, "skipped": 0}
    ledger = {"prefix": 4 * step, "extras": [4 * step + 1]}
    config = zlab_config(CONFIG, provenance={"target": TARGET, "step": step})
    return Checkpoint(step, 1, reason, config, dict(draft.state_dict()), state, ledger, 0.01)  # type: ignore[arg-type]


def opened(run_dir: Path, in_use: Collection[int] = (), **options: Any) -> CheckpointSink:
    sink = CheckpointSink(CheckpointSink.Config(**options))
    run_dir.mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {"facts": {"model": TARGET}, "report": SilentReport(), "checkpoints_in_use": lambda: in_use}
    sink.open(OpenContext("save", run_dir, run_dir, **told))
    return sink


def names(run_dir: Path) -> list[str]:
    return sorted(p.name for p in (run_dir / "checkpoints").iterdir())


def latest(run_dir: Path) -> Path:
    """The checkpoint that ``latest`` names, found complete: every file of its manifest is there and unharmed."""
    folder = run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text().strip()
    files = json.loads((folder / "checkpoint.json").read_text())["files"]
    written = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert set(files) == written - {"checkpoint.json"} >= {"draft/config.json", "draft/model.safetensors", "state.pt"}
    for name, facts in files.items():
        content = (folder / name).read_bytes()
        assert facts == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}, name
    load_zlab(folder / "draft")
    return folder


def fail_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: Callable[..., bool], error: Any) -> None:
    """Let a function raise when its arguments are as told; or, where nothing is to be caught, as if the power went."""
    original = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if when(*arguments):
            raise error
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, call)


class Killed(BaseException):
    """Stands for the end of the process: nothing that runs after it counts."""


def test_the_manifest_says_what_was_written_and_its_hashes_are_right(tmp_path: Path) -> None:
    sink = opened(tmp_path / "run")
    sink.write(snapshot(7))
    folder = latest(tmp_path / "run")
    manifest = json.loads((folder / "checkpoint.json").read_text())
    assert folder.name == "step-000007" and names(tmp_path / "run") == ["latest", "step-000007"]
    assert {k: manifest[k] for k in ("step", "epoch", "reason", "run", "target", "ledger", "pause_secs")} == {
        "step": 7,
        "epoch": 1,
        "reason": "every",
        "run": "run",
        "target": TARGET,
        "ledger": {"prefix": 28, "extras": [29]},
        "pause_secs": 0.01,
    }
    assert sink.summary()["checkpoints_written"] == 1 and sink.summary()["newest"] == "step-000007"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_exported_draft_loads_strictly_and_equals_the_live_tensors(tmp_path: Path, dtype: str) -> None:
    item = snapshot(3)
    opened(tmp_path / "run", dtype=dtype).write(item)
    config, draft = load_zlab(latest(tmp_path / "run") / "draft")
    stored = draft.state_dict()
    assert config == CONFIG and set(stored) == set(item.draft_tensors)
    for name, tensor in item.draft_tensors.items():
        assert stored[name].dtype is getattr(torch, dtype)
        assert torch.equal(stored[name], tensor.to(getattr(torch, dtype))), name


def test_nothing_of_the_target_is_in_the_export_and_its_config_says_where_it_comes_from(tmp_path: Path) -> None:
    from safetensors import safe_open

    opened(tmp_path / "run").write(snapshot(3))
    folder = latest(tmp_path / "run") / "draft"
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        kept = set(file.keys())
    assert kept == set(tensor_shapes(CONFIG))
    assert not [name for name in kept if "embed" in name or "lm_head" in name]
    raw = json.loads((folder / "config.json").read_text())
    assert raw["flowdflash"] == {"target": TARGET, "step": 3} and raw["dtype"] == "bfloat16"


def test_the_state_loads_without_running_code_and_keeps_full_precision(tmp_path: Path) -> None:
    item = snapshot(3)
    opened(tmp_path / "run").write(item)
    saved = torch.load(latest(tmp_path / "run") / "state.pt", weights_only=True)
    assert saved["state"]["steps"] == 3
    assert saved["state"]["optimizer"]["param_groups"] == item.state["optimizer"]["param_groups"]
    for name, tensor in item.draft_tensors.items():
        assert saved["tensors"][name].dtype is torch.float32 and torch.equal(saved["tensors"][name], tensor)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "state.pt", "checkpoint.json"])
def test_a_fault_at_any_file_leaves_the_previous_checkpoint_and_no_half_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run = tmp_path / "run"
    sink = opened(run)
    sink.write(snapshot(1))
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        fail_at(patch, flowdflash_checkpoint, "_sync", lambda path: path.name == name, full)
        with pytest.raises(OSError, match="No space left on device"):
            sink.write(snapshot(2))
    assert names(run) == ["latest", "step-000001"] and latest(run).name == "step-000001"
    sink.write(snapshot(3))
    assert latest(run).name == "step-000003"


def test_a_full_disk_while_tensors_are_written_surfaces_and_keeps_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    sink = opened(run)
    sink.write(snapshot(1))

    def half(value: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError) as caught:
        sink.write(snapshot(2))
    assert caught.value.errno == errno.ENOSPC
    assert names(run) == ["latest", "step-000001"] and latest(run).name == "step-000001"


def killed_at_each_move(tmp_path: Path, steps: tuple[int, ...], **options: Any) -> list[Path]:
    """Run folders whose process was killed before the 1st, 2nd, ... rename or deletion of its last write."""
    runs = []
    for moment in range(40):
        run = tmp_path / f"killed-{moment}" / "run"
        sink = opened(run, **options)
        for step in steps[:-1]:
            sink.write(snapshot(step))
        moves = iter(range(100))
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in ((Path, "rename"), (Path, "replace"), (shutil, "rmtree")):
                fail_at(patch, owner, name, lambda *_, moves=moves, moment=moment: next(moves) >= moment, Killed())
            try:
                sink.write(snapshot(steps[-1], "interrupted", seed=99))
            except Killed:
                runs.append(run)
            else:
                assert moment >= 3, "at least: clear, rename, switch"
                return [*runs, run]
    raise AssertionError("the write never came to its end")


@pytest.mark.parametrize(
    ("steps", "options"),
    [((5, 10), {"keep": 3}), ((10, 10), {"keep": 3}), ((10, 10), {"keep": 1}), ((5, 10, 15), {"keep": 1})],
    ids=["another step", "the same step", "the same step, one kept", "one kept"],
)
def test_whenever_the_process_is_killed_latest_names_a_complete_checkpoint(
    tmp_path: Path, steps: tuple[int, ...], options: dict[str, int]
) -> None:
    runs = killed_at_each_move(tmp_path, steps, **options)
    for run in runs:
        latest(run)
        for path in (run / "checkpoints").glob("step-*"):
            assert (path / "checkpoint.json").is_file() and (path / "state.pt").is_file(), f"{path} is half there"
        # Whoever writes to the folder next clears what was left, and goes on.
        sink = opened(run, **options)
        assert not list((run / "checkpoints").glob(".*-step-*"))
        sink.write(snapshot(20))
        assert latest(run).name == "step-000020"
    reasons = {json.loads((p / "checkpoint.json").read_text())["reason"] for p in runs[-1].glob("checkpoints/step-*")}
    assert "interrupted" in reasons or options["keep"] == 1


def test_a_step_that_is_written_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    sink = opened(run, keep=3)
    for reason, seed in (("every", 1), ("interrupted", 2), ("interrupted", 3)):
        item = snapshot(10, reason, seed=seed)
        sink.write(item)
        folder = latest(run)
        assert json.loads((folder / "checkpoint.json").read_text())["reason"] == reason
        saved = torch.load(folder / "state.pt", weights_only=True)["tensors"]
        assert all(torch.equal(saved[name], tensor) for name, tensor in item.draft_tensors.items())
        assert names(run) == sorted(["latest", folder.name]), "the one before is gone"
    sink.write(snapshot(20))
    assert len(names(run)) == 3


def test_the_newest_few_stay_by_number_not_by_name(tmp_path: Path) -> None:
    run = tmp_path / "run"
    sink = opened(run, keep=2)
    for step in (999_998, 999_999, 1_000_000):
        sink.write(snapshot(step))
    assert names(run) == ["latest", "step-1000000", "step-999999"]


@pytest.mark.parametrize("keep", [1, 2])
def test_the_only_one_and_the_one_just_written_are_never_deleted(tmp_path: Path, keep: int) -> None:
    run = tmp_path / "run"
    sink = opened(run, keep=keep)
    sink.write(snapshot(30))
    assert names(run) == ["latest", "step-000030"]
    # Training that was taken up again from an earlier step: the new checkpoint has the smaller number.
    opened(run, keep=keep).write(snapshot(20))
    assert latest(run).name == "step-000020"


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    other = opened(tmp_path / "other")
    other.write(snapshot(1000))
    shutil.copytree(tmp_path / "other" / "checkpoints" / "step-001000", run / "checkpoints" / "step-001000")
    mine = run / "checkpoints"
    (mine / "step-notes.txt").write_text("notes")
    (mine / "step-000001").write_text("a file")
    (mine / "step-000002").mkdir()
    (mine / "step-000003").mkdir()
    (mine / "step-000003" / "checkpoint.json").write_text("[1]")
    foreign = {p.relative_to(mine): p.read_bytes() for p in mine.rglob("*") if p.is_file()}
    sink = opened(run, keep=1)
    for step in (1, 2, 1000, 1001):
        sink.write(snapshot(step))
    assert names(run) == [
        "latest",
        *("step-000001", "step-000002", "step-000003", "step-001000", "step-001001", "step-notes.txt"),
    ]
    assert {path: (mine / path).read_bytes() for path in foreign} == foreign
    assert latest(run).name == "step-001001"


def test_a_step_whose_name_is_taken_by_somebody_else_gets_a_name_of_its_own(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step-000005").mkdir(parents=True)
    sink = opened(run)
    sink.write(snapshot(5))
    assert latest(run).name == "step-000005-2" and not list((run / "checkpoints" / "step-000005").iterdir())


def test_leftovers_of_killed_writers_go_when_the_folder_is_opened(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    for name in (".writing-step-000004", ".removing-step-000001"):
        (folder / name / "draft").mkdir(parents=True)
    (folder / ".writing-step-notes").write_text("a file is nobody's leftover")
    opened(tmp_path / "run")
    assert names(tmp_path / "run") == [".writing-step-notes"]


def test_an_old_checkpoint_that_cannot_be_deleted_is_told_and_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    sink = opened(run, keep=1)
    sink.write(snapshot(1))
    with monkeypatch.context() as patch:
        fail_at(
            patch, flowdflash_checkpoint, "_remove", lambda path: True, PermissionError(errno.EACCES, "not allowed")
        )
        sink.write(snapshot(2))
    assert latest(run).name == "step-000002"
    (line,) = sink.report.lines
    assert line.startswith("warning: could not delete") and "step-000001" in line and "not allowed" in line


def test_a_draft_that_is_not_finite_is_refused_and_the_previous_one_stays(tmp_path: Path) -> None:
    from flowdflash.errors import ModelInvalid

    run = tmp_path / "run"
    sink = opened(run)
    sink.write(snapshot(1))
    broken = snapshot(2)
    next(iter(broken.draft_tensors.values())).fill_(float("nan"))
    with pytest.raises(ModelInvalid, match="not finite"):
        sink.write(broken)
    assert names(run) == ["latest", "step-000001"]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, {(12, "final"), (7, "interrupted"), (0, "interrupted")}),
        ({"at_start": True}, {(0, "start"), (12, "final"), (7, "interrupted"), (0, "interrupted")}),
        ({"every_steps": 5}, {(5, "every"), (10, "every"), (12, "final"), (7, "interrupted"), (0, "interrupted")}),
        ({"every_steps": 5, "at_end": False}, {(5, "every"), (10, "every"), (7, "interrupted"), (0, "interrupted")}),
        ({"every_steps": 6, "at_end": False}, {(6, "every"), (12, "final"), (7, "interrupted"), (0, "interrupted")}),
        ({"at_end": False}, {(7, "interrupted"), (0, "interrupted")}),
    ],
)
def test_checkpoints_are_wanted_where_the_options_say_and_at_every_interruption(
    tmp_path: Path, options: dict[str, Any], wanted: set[tuple[int, str]]
) -> None:
    sink = opened(tmp_path / "run", **options)
    asked = [(0, "start"), *((step, "every") for step in range(1, 12)), (12, "final"), (7, "interrupted")]
    asked += [(0, "interrupted"), (0, "final")]
    found = {(step, reason) for step, reason in asked if sink.wants(step, reason)}
    assert found - {(0, "final")} == wanted
    assert ((0, "final") in found) == options.get("at_end", True)


def test_the_files_lie_where_servers_look_for_them(tmp_path: Path) -> None:
    opened(tmp_path / "run").write(snapshot(300))
    folder = tmp_path / "run" / "checkpoints" / "step-000300"
    assert sorted(p.name for p in (folder / "draft").iterdir()) == ["config.json", "model.safetensors"]
    assert {p.name for p in folder.iterdir()} >= {"checkpoint.json", "draft", "state.pt"}


def measured(run_dir: Path, **taus: float | None) -> None:
    """What an evaluator named ``acceptance`` writes, by step; and one of another name that thinks otherwise."""
    lines = [{"stage": "acceptance", "step": int(step[1:]), "tau_gen": tau} for step, tau in taus.items()]
    lines += [{"stage": "other", "step": line["step"], "tau_gen": 9.0 - (line["tau_gen"] or 0.0)} for line in lines]
    (run_dir / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_best_stays_beside_the_newest(tmp_path: Path) -> None:
    run = tmp_path / "run"
    sink = opened(run, keep=1, keep_best=1, best_by="acceptance", every_steps=1)
    taus = {"s1": 1.1, "s2": 1.9, "s3": 1.3, "s4": 1.9, "s5": 1.2}
    for step in range(1, 6):
        sink.write(snapshot(step))
        measured(run, **dict(list(taus.items())[:step]))
    sink.close()
    assert names(run) == ["latest", "step-000004", "step-000005"], "of equals the newer"
    assert latest(run).name == "step-000005"


@pytest.mark.parametrize("keep_best", [0, 1])
def test_what_an_evaluator_still_has_stays_until_it_is_done_with_it(tmp_path: Path, keep_best: int) -> None:
    run, in_use = tmp_path / "run", {1, 2}
    sink = opened(run, in_use, keep=1, keep_best=keep_best)
    for step in (1, 2, 3):
        sink.write(snapshot(step))
    assert names(run) == ["latest", *(f"step-00000{k}" for k in (1, 2, 3))]
    in_use.remove(2)
    (run / "evaluations.jsonl").write_text('{"stage": "a", "step": 2, "tau_gen": 1.5}\n{"stage": "a", "step": 1, "ta')
    sink.write(snapshot(4))
    assert names(run) == ["latest", *(f"step-00000{k}" for k in ((1, 2, 4) if keep_best else (1, 4)))]
    in_use.clear()
    sink.close()
    assert names(run) == ["latest", *(f"step-00000{k}" for k in ((2, 4) if keep_best else (4,)))], "1 was left out"


def test_the_only_good_one_is_never_deleted_whatever_was_measured(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    measured(run, s1=9.0, s2=1.0)
    sink = opened(run, keep=1, keep_best=1, best_by="acceptance")
    sink.write(snapshot(2))
    sink.close()
    assert names(run) == ["latest", "step-000002"]


def graph_with(**options: Any) -> Any:
    evaluator = type("Evaluator", (CheckpointSink,), {"saves": False})
    edge = SimpleNamespace(source="drafter")

    def node(name: str, cls: Any, **config: Any) -> Any:
        return SimpleNamespace(name=name, cls=cls, config=SimpleNamespace(**config), inputs=[edge])

    evaluators = [node(name, evaluator, every_steps=every) for name, every in options.pop("evaluators").items()]
    save = node("save", CheckpointSink, **{"keep_best": 1, "best_by": "", "every_steps": 10, **options})
    return SimpleNamespace(of_kind=lambda kind: [save, *evaluators])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"evaluators": {"acceptance": 20}}, ""),
        ({"evaluators": {"a": 20, "b": 0}, "best_by": "a"}, ""),
        ({"evaluators": {}}, "the drafter has 0 evaluators"),
        ({"evaluators": {"a": 20, "b": 20}}, "the drafter has 2 evaluators"),
        ({"evaluators": {"a": 20}, "best_by": "b"}, "is named 'b'"),
        ({"evaluators": {"a": 0}}, "no checkpoint that is saved here"),
        ({"evaluators": {"a": 15}}, "no checkpoint that is saved here"),
        ({"evaluators": {"a": 20}, "every_steps": 0}, "no checkpoint that is saved here"),
        ({"evaluators": {"a": 20}, "keep_best": 0, "best_by": "a"}, "nothing is kept by it"),
    ],
)
def test_keeping_the_best_needs_somebody_who_measures_what_is_saved(options: dict[str, Any], text: str) -> None:
    problems = flowdflash_checkpoint.flowdflash_check(graph_with(**options))
    assert [text in p.message and p.path.startswith("stages.save.") and bool(p.hint) for p in problems] == [
        True for _ in ([text] if text else [])
    ]


def test_a_checkpoint_that_falls_due_while_one_is_written_is_skipped_and_counted(tmp_path: Path) -> None:
    sink = opened(tmp_path / "run", every_steps=1, when_busy="skip")
    assert [sink.wants(1, "every"), sink.wants(1, "every")] == [True, True], "asked before the copy and after it"
    assert [sink.wants(2, "every"), sink.wants(2, "every"), sink.wants(3, "every")] == [False] * 3
    assert sink.wants(3, "interrupted") and sink.wants(3, "final"), "the last one is never skipped"
    sink.write(snapshot(1))
    assert sink.wants(4, "every")
    assert sink.summary()["skipped_while_busy"] == 2
    assert [line.split(":")[1] for line in sink.report.lines] == [
        f" checkpoint of step {step} skipped" for step in (2, 3)
    ]


def test_by_default_a_checkpoint_waits_for_the_one_before(tmp_path: Path) -> None:
    sink = opened(tmp_path / "run", every_steps=1)
    assert all(sink.wants(step, "every") for step in (1, 2, 3)) and sink.report.lines == []


def test_a_folder_that_has_become_a_file_is_an_error_of_the_disk(tmp_path: Path) -> None:
    run = tmp_path / "run"
    sink = opened(run, every_steps=1, when_busy="skip")
    sink.write(snapshot(1))
    (run / "checkpoints").rename(run / "moved")
    (run / "checkpoints").write_text("")
    assert sink.wants(2, "every")
    with pytest.raises(OSError, match="checkpoints"):
        sink.write(snapshot(2))
    assert sink.summary()["writes_failed"] == 1 and sink.wants(3, "every"), "it is not busy any more"
    (run / "checkpoints").unlink()
    (run / "moved").rename(run / "checkpoints")
    sink.write(snapshot(3))
    assert latest(run).name == "step-000003"


@pytest.mark.parametrize("most_bytes", [3000, 8000], ids=["the export does not fit", "the state does not fit"])
def test_a_disk_that_is_really_full_is_an_error_of_the_disk(tmp_path: Path, most_bytes: int) -> None:
    run = tmp_path / "run"
    sink = opened(run)
    sink.write(snapshot(1))
    sizes = {path.name: path.stat().st_size for path in latest(run).rglob("*")}
    assert sizes["config.json"] < 3000 < sizes["model.safetensors"] < 8000 < sizes["state.pt"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        with pytest.raises(OSError):
            sink.write(snapshot(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(run) == ["latest", "step-000001"] and latest(run).name == "step-000001"


class Emptied(set[int]):
    """The thread that writes ends just after this set was looked at."""

    def __sub__(self, other: Any) -> set[int]:  # type: ignore[override]
        left = set(self) - other
        self.clear()
        return left


def test_a_checkpoint_that_is_complete_at_that_moment_is_no_fault(tmp_path: Path) -> None:
    sink = opened(tmp_path / "run", every_steps=1, when_busy="skip")
    sink.due = Emptied({1})
    assert not sink.wants(2, "every") and "that of step 1" in sink.report.lines[0]
