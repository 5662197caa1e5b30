"""What a person sees of a run: progress on a terminal and elsewhere, the plan, the account at the end."""

from __future__ import annotations

import io
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowdflash.cli.console import ConsoleReport
from flowdflash.cli.report_text import evaluation_lines, outcome_text, plan_text, step_text
from flowdflash.runtime.meter import StageSnapshot
from flowdflash.runtime.outcome import RunOutcome
from flowdflash.runtime.plan_tables import EpochPlan, Plan
from flowdflash.testing import make_records
from flowdflash.training.acceptance import Acceptance, Speed


class Clock:
    def __init__(self) -> None:
        self.secs = 100.0

    def __call__(self) -> float:
        return self.secs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Called by a test, not a fixture: pytest changes sys.stderr between the two."""
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return screen


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_without_a_terminal_there_is_a_line_per_interval_and_the_first_and_last_always(capsys: Any) -> None:
    clock = Clock()
    with ConsoleReport(10.0, clock) as report:
        for done in range(1, 31):
            report.progress("training", done, 30, f"loss {done}")
            clock.secs += 1.0
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == [f"training: {n} of 30  loss {n}" for n in (1, 11, 21, 30)]


def test_each_kind_of_work_has_an_interval_of_its_own(capsys: Any) -> None:
    with ConsoleReport(10.0, Clock()) as report:
        for done in (1, 2):
            report.progress("reading", done, 1000)
            report.progress("training", done, 5000)
    assert capsys.readouterr().err.splitlines() == ["reading: 1 of 1,000", "training: 1 of 5,000"]


def test_lines_and_warnings_go_to_stderr(capsys: Any) -> None:
    with ConsoleReport() as report:
        report.info("[bold]as it is[/bold]")
        report.warn("careful")
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "[bold]as it is[/bold]\nwarning: careful\n")


@pytest.mark.timeout(20)
def test_several_threads_never_mix_their_lines_nor_show_an_interval_twice(capsys: Any) -> None:
    start = threading.Barrier(4)
    with ConsoleReport(10.0, Clock()) as report:

        def work(name: str) -> None:
            start.wait(10)
            for i in range(200):
                report.info(f"{name} {i}")
                report.progress("shared", 1, 9)

        threads = [threading.Thread(target=work, args=(f"thread-{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(15)
    lines = capsys.readouterr().err.splitlines()
    assert lines.count("shared: 1 of 9") == 1
    assert sorted(set(lines)) == sorted([f"thread-{n} {i}" for n in range(4) for i in range(200)] + ["shared: 1 of 9"])
    assert len(lines) == 801


def test_a_terminal_gets_bars_and_lines_above_them(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with ConsoleReport(10.0, Clock()) as report:
        report.progress("training", 3, 12, "loss 4.2")
        report.info("[red]:smile: stays as it is[/red] " + "x" * 150)
        report.progress("training", 12, 12, "loss 3.1")
    text = terminal.getvalue()
    assert "\x1b[" in text, "no bar was drawn"
    assert "training: " not in text, "lines of progress belong where there is no terminal"
    shown = plain(text)
    assert "training loss 3.1" in shown and "12/12" in shown
    assert "[red]:smile: stays as it is[/red] " + "x" * 150 + "\n" in shown, "markup, emoji or wrapping changed a line"


@pytest.mark.timeout(20)
def test_on_a_terminal_too_several_threads_may_report(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with ConsoleReport() as report:

        def work(name: str) -> None:
            for i in range(50):
                report.progress(name, i + 1, 50)
                report.info(f"{name} {i}")

        threads = [threading.Thread(target=work, args=(f"work-{n}",)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(15)
    lines = [line.strip() for line in re.split(r"[\r\n]", plain(terminal.getvalue()))]
    assert {f"work-{n} {i}" for n in range(3) for i in range(50)} <= set(lines)


def test_after_the_bars_are_gone_lines_are_plain_again(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with ConsoleReport() as report:
        report.progress("training", 1, 2)
    length = len(terminal.getvalue())
    report.info("afterwards")
    assert terminal.getvalue()[length:] == "afterwards\n"


def epoch() -> EpochPlan:
    buckets = np.array([0, 1, 0, 0, 1])
    return EpochPlan(
        buckets=buckets,
        samples=np.array([4, 2, 4, 4, 2]),
        tokens=np.array([400, 500, 400, 380, 460]),
        padded_tokens=np.array([480, 512, 480, 480, 512]),
        max_length=np.array([120, 256, 118, 119, 250]),
        dropped={"no full batch at the end of the epoch": 3},
    )


def test_the_plan_says_what_each_bucket_comes_to_and_how_many_steps_there_are() -> None:
    text = plan_text(Plan((epoch(), epoch()), window=2))
    lines = text.splitlines()
    assert "2 epochs, 6 optimizer steps of 2 batches" in lines[0], "a window never crosses an epoch: 2 * ceil(5 / 2)"
    rows = {line.split()[0]: line.split() for line in lines}
    assert rows["0"] == ["0", "24", "75.0%", "6", "60.0%", "2,360", "18.1%", "98", "120"]
    assert rows["1"] == ["1", "8", "25.0%", "4", "40.0%", "1,920", "6.2%", "240", "256"]
    assert "total   32 samples, 10 batches, 4,280 tokens" in lines
    assert lines[-1] == "dropped: 6 samples (no full batch at the end of the epoch)"


def test_a_plan_without_buckets_says_all() -> None:
    from dataclasses import replace

    text = plan_text(Plan((replace(epoch(), buckets=np.full(5, -1)),), window=2))
    assert "\nall " in text


def acceptance(step: int, tau: float = 1.5, **changes: Any) -> Acceptance:
    given: dict[str, Any] = {
        "step": step,
        "block_size": 4,
        "tau_gen": tau,
        "tau_pooled": 1.4,
        "eal": 1.625,
        "eal_walk": float("nan"),
        "answers": 3,
        "prompts": 4,
        "batch_size": 32,
        "identical": 4,
        "new_tokens": 64,
        "fewest_new_tokens": 16,
        "passes": 40,
        "histogram": (30, 5, 5, 0),
        "acceptance_per_slot": (0.25, 0.5, float("nan")),
        "secs": 2.0,
        "plain_secs": 1.0,
        "speedup": 0.5,
        "alone": Speed(1, 1.5, 4, 1.0, 1.25, 1.25),
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
    }
    return Acceptance(**{**given, **changes})


def outcome(**changes: Any) -> RunOutcome:
    snapshots = (
        StageSnapshot("target", 2, 1.0, 0.5, 2.0, 10, 10, {}, 0.25),
        StageSnapshot("drafter", 1, 3.5, 0.5, 0.0, 10, 10, {}, 0.875),
    )
    given: dict[str, Any] = {
        "status": "finished",
        "steps": 6,
        "batches": 10,
        "samples": 1032,
        "tokens": 4280,
        "batches_per_bucket": {"0": 6, "1": 4},
        "dropped": {"too long": 7},
        "wall_secs": 5.0,
        "run_secs": 4.0,
        "stages": snapshots,
        "bottleneck": "drafter",
        "summaries": {
            "save": {"checkpoints_written": 2, "newest": "step-000006", "nothing": [], "write_secs": 0.25},
            "acceptance": {
                "evaluations": [acceptance(0).as_dict(), acceptance(6, 1.75).as_dict()],
                "steps_left_out": [3, 5],
            },
        },
    }
    return RunOutcome(**{**given, **changes})


def test_the_account_names_buckets_bottleneck_checkpoints_and_acceptance() -> None:
    text = outcome_text(outcome(), Path("/runs/first"))
    lines = text.splitlines()
    assert lines[0] == ("finished: 6 optimizer steps, 10 batches, 1,032 samples, 4,280 tokens in 5.0 s (856 tokens/s)")
    assert "batches per bucket: 0: 6, 1: 4" in lines
    assert "dropped: 7 samples (too long)" in lines
    assert "bottleneck: drafter" in lines
    row = next(line for line in lines if line.startswith("target ×2"))
    assert row.split() == ["target", "×2", "10", "1.0", "0.5", "2.0", "25", "%"]
    assert "save: checkpoints_written 2, newest step-000006, write_secs 0.25" in lines
    taus = [line for line in lines if "τ =" in line]
    assert [line.split(":")[1] for line in taus] == [" step 0", " step 6"]
    assert "τ = 1.750 (pooled 1.400) on 4 prompts, 64 tokens in 40 passes; 4 of 4 identical" in taus[1]
    assert "  passes that committed 1, 2, ... tokens: 30 5 5 0; accepted per slot: 0.25 0.50 –" in lines
    assert "  teacher forced on 3 answers: eal 1.625, where decoding puts its blocks –" in lines
    assert "  batches of 32: τ 1.750, 2.0 s; without the draft 1.0 s: speedup 0.50" in lines
    assert "  batches of 1: τ 1.500, 1.0 s; without the draft 1.2 s: speedup 1.25" in lines
    assert "acceptance: steps that were not measured: 3, 5" in lines
    assert lines[-1] == "run folder: /runs/first"


@pytest.mark.parametrize("aborted", [False, True])
def test_an_interrupted_run_says_so_and_whether_a_checkpoint_was_written(aborted: bool) -> None:
    last = outcome_text(outcome(status="interrupted", aborted=aborted), Path("r")).splitlines()[-1]
    assert last.startswith("interrupted at a step boundary")
    assert ("no checkpoint was written" in last) == aborted


def test_threads_left_behind_are_named() -> None:
    text = outcome_text(outcome(abandoned=("target-0",)), Path("r"))
    assert "left behind in a call that cannot be interrupted: target-0" in text


def test_figures_that_cannot_be_had_are_dashes_and_no_nan_reaches_json() -> None:
    nan = float("nan")
    nothing = acceptance(0, nan, tau_pooled=nan, acceptance_per_slot=(nan,), alone=Speed(1, nan, 4, 1.0, 1.0, 1.0))
    plain = nothing.as_dict()
    assert (plain["tau_gen"], plain["tau_pooled"], plain["acceptance_per_slot"]) == (None, None, [None])
    assert plain["alone"]["tau_gen"] is None
    assert "τ = – (pooled –) on 4 prompts" in evaluation_lines("acceptance", plain)[0]


def test_a_step_is_told_in_a_line_and_a_skipped_one_by_its_reason() -> None:
    from dataclasses import replace

    (record,) = make_records(1)
    assert step_text(record) == "loss 4.000  accuracy 0.500  grad norm 2.00  lr 1.00e-04"
    assert step_text(replace(record, skipped="loss is nan")) == "skipped: loss is nan"
