import json
import threading
from types import SimpleNamespace

import flowdflash_wandb
import numpy as np
import pytest
from flowdflash_wandb import WandbSink, account
from flowdflash_wandb.series import Series

from flowdflash.errors import FlowdflashError
from flowdflash.runtime.works import MOST_RECORDS
from flowdflash.stage import Check, SilentReport
from flowdflash.testing import assert_sink_contract, make_records, open_context


class StandIn:
    """Takes the place of the package wandb: keeps what is logged, and holds callers to its rules."""

    def __init__(self, *, fail_at=0, fail_online=False, fail_finish=False):
        self.fail_at, self.fail_online, self.fail_finish = fail_at, fail_online, fail_finish
        self.inits, self.rows, self.metrics, self.threads, self.finished = [], [], [], set(), 0
        self.id, self.url = "abc123", "https://wandb.example/run"

    def Settings(self, **given):  # noqa: N802
        return given

    def Histogram(self, np_histogram):  # noqa: N802
        return np_histogram

    def init(self, **given):
        self.inits.append(given)
        if self.fail_online and given["mode"] == "online":
            raise ConnectionError("no route")
        return self

    def define_metric(self, name, step_metric=None):
        self.metrics.append((name, step_metric))

    def log(self, values, **given):
        assert not given, "no hidden step: the axis is in the values"
        if self.fail_at and values["step"] >= self.fail_at:
            raise BrokenPipeError("service died")
        assert not self.rows or values["step"] > self.rows[-1]["step"], "steps must rise"
        self.threads.add(threading.get_ident())
        self.rows.append(values)

    def finish(self, exit_code=0):
        if self.fail_finish:
            raise TimeoutError("uploads")
        self.finished += 1


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    """No key, no mode, no prompt: whatever the machine has is out of sight."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("W&B asked for something"))


@pytest.fixture
def wandb(monkeypatch):
    stand_in = StandIn()
    monkeypatch.setattr(flowdflash_wandb, "_import_wandb", lambda: stand_in)
    return stand_in


@pytest.fixture(autouse=True)
def no_thread_left(monkeypatch):
    opened_here, really = [], WandbSink.open

    def kept(sink, ctx):
        opened_here.append(sink)
        really(sink, ctx)

    monkeypatch.setattr(WandbSink, "open", kept)
    yield
    for sink in opened_here:
        sink.close()
    assert [t.name for t in threading.enumerate() if t.name == "flowdflash-wandb"] == []


def opened(tmp_path, **options):
    sink = WandbSink(WandbSink.Config(**options))
    report = SilentReport()
    sink.open(open_context(tmp_path, "metrics", report=report, seed=7))
    return sink, report.lines


def refusals(**options):
    check = Check("metrics")
    WandbSink(WandbSink.Config(**options)).check(check)
    return [(p.path, p.message, p.hint) for p in check.problems]


def test_every_record_is_logged_once_in_order_over_its_own_axis(tmp_path, wandb):
    sink, lines = opened(tmp_path, project="p", name="n")
    for record in make_records(150):
        sink.write(record)
    sink.close()
    assert [row["step"] for row in wandb.rows] == list(range(1, 151)) and len(wandb.threads) == 1
    assert ("*", "step") in wandb.metrics and wandb.finished == 1
    assert (wandb.inits[0]["project"], wandb.inits[0]["name"], wandb.inits[0]["mode"]) == ("p", "n", "offline")
    assert sink.summary() == {"mode": "offline", "logged": 150, "spilled": 0, "lost": 0} and lines == []


def test_a_row_says_norms_lengths_padding_and_buckets(tmp_path, wandb):
    sink, _ = opened(tmp_path)
    for record in make_records(2):
        sink.write(record)
    sink.summary()  # waits for what has been handed over
    row = wandb.rows[-1]
    assert {k: row[k] for k in ("train/grad_norm", "train/grad_norm_clipped", "length/mean", "length/max")} == {
        "train/grad_norm": 2.0,
        "train/grad_norm_clipped": 1.0,
        "length/mean": 100.0,
        "length/max": 125,
    }
    assert row["window/padding"] == 0.2 and row["window_mix/0"] == 1 / 3 and row["window/distinct_buckets"] == 3
    assert [row[f"dispatched/{k}"] for k in range(3)] == [2, 2, 2]
    counts, edges = row["buckets/dispatched"]
    assert counts.tolist() == [2, 2, 2] and edges.tolist() == [-0.5, 0.5, 1.5, 2.5]
    assert (
        row["loss_per_bucket/2"] == 4.0
        and row["accuracy_per_slot/01"] == 0.7
        and row["wait_secs/target->drafter"] == 0.01
    )


def test_the_histogram_has_a_bar_of_zero_for_a_bucket_between_and_works_without_buckets():
    series = Series()
    series.values(SimpleNamespace(**{**make_records(1)[0].as_dict(), "buckets": {"1": 2, "4": 1}}))
    counts, edges = series.histogram()
    assert counts.tolist() == [2, 0, 0, 1] and len(edges) == 5
    alone = Series()
    alone.values(SimpleNamespace(**{**make_records(1)[0].as_dict(), "buckets": {"-1": 3}}))
    assert alone.histogram()[0].tolist() == [3] and Series().histogram() is None


def test_a_failure_while_training_is_one_warning_and_later_records_go_to_a_file(tmp_path, wandb):
    wandb.fail_at = 3
    sink, lines = opened(tmp_path)
    for record in make_records(5):
        sink.write(record)
    sink.close()
    assert len(lines) == 1 and "step 3" in lines[0] and "BrokenPipeError: service died" in lines[0]
    spilled = [json.loads(line)["step"] for line in (tmp_path / "metrics-spill.jsonl").read_text().splitlines()]
    assert spilled == [3, 4, 5]
    summary = sink.summary()
    assert (summary["logged"], summary["spilled"], summary["lost"]) == (2, 3, 0)
    assert summary["spill_file"].endswith("metrics-spill.jsonl") and "service died" in summary["failure"]


def test_what_cannot_be_spilled_is_counted_as_lost_and_still_does_not_stop_training(tmp_path, wandb):
    wandb.fail_at = 1
    sink, _ = opened(tmp_path)
    (tmp_path / "metrics-spill.jsonl").mkdir()
    for record in make_records(2):
        sink.write(record)
    assert sink.summary()["lost"] == 2 and "spill_file" not in sink.summary()


def test_a_failure_at_the_end_is_a_warning(tmp_path, wandb):
    wandb.fail_finish = True
    sink, lines = opened(tmp_path)
    sink.close()
    assert "TimeoutError" in lines[0]


def test_waits_at_start_and_end_are_bounded(tmp_path, wandb):
    opened(tmp_path)
    settings = wandb.inits[0]["settings"]
    assert 0 < settings["init_timeout"] <= 120 and 0 < settings["finish_timeout"] <= 300


def test_auto_is_online_with_a_key_and_says_where(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    sink, lines = opened(tmp_path)
    assert wandb.inits[0]["mode"] == "online" and lines == ["W&B: https://wandb.example/run"]
    assert sink.summary()["url"] == "https://wandb.example/run"


def test_auto_falls_back_to_offline_when_the_service_does_not_answer(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    wandb.fail_online = True
    sink, lines = opened(tmp_path)
    assert [init["mode"] for init in wandb.inits] == ["online", "offline"] and sink.summary()["mode"] == "offline"
    assert len(lines) == 1 and "ConnectionError: no route" in lines[0]


def test_online_that_cannot_start_is_an_error_not_a_guess(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    wandb.fail_online = True
    with pytest.raises(FlowdflashError, match="no route"):
        opened(tmp_path, mode="online")


def test_online_without_a_key_is_found_before_anything_is_loaded(tmp_path, wandb):
    ((path, message, hint),) = refusals(mode="online")
    assert path == "mode" and "API key" in message and "WANDB_API_KEY" in hint
    with pytest.raises(FlowdflashError, match="API key"):
        opened(tmp_path, mode="online")
    assert wandb.inits == []


@pytest.mark.parametrize("mode", ["auto", "offline", "disabled"])
def test_other_modes_need_no_key(mode):
    assert refusals(mode=mode) == []


def test_the_environment_wins_over_the_pipeline(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert refusals(mode="online") == []
    sink, _ = opened(tmp_path, mode="online")
    sink.write(make_records(1)[0])
    sink.close()
    assert wandb.inits == [] and sink.summary() == {"mode": "disabled"} and not list(tmp_path.iterdir())


def test_an_unknown_mode_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "ofline")
    assert "'ofline'" in refusals(mode="auto")[0][1]


@pytest.mark.parametrize(("value", "mode"), [("dryrun", "offline"), ("OFFLINE", "offline"), ("", "auto")])
def test_other_spellings_of_the_environment(monkeypatch, value, mode):
    monkeypatch.setenv("WANDB_MODE", value)
    assert account.effective_mode("auto") == mode


def test_a_key_is_found_in_netrc_for_the_host_in_use(monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine wandb.example login user password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not account.has_api_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example")
    assert account.has_api_key()


def test_without_the_package_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(FlowdflashError, match="pip install wandb"):
        opened(tmp_path, mode="offline")


def test_a_run_that_is_taken_up_again_goes_on_in_the_same_wandb_run(tmp_path, wandb):
    opened(tmp_path)[0].close()
    opened(tmp_path)[0].close()
    assert "id" not in wandb.inits[0]
    assert (wandb.inits[1]["id"], wandb.inits[1]["resume"]) == ("abc123", "allow")


def test_closing_what_was_never_opened_is_fine():
    sink = WandbSink(WandbSink.Config())
    sink.close()
    assert sink.summary() == {"mode": "never opened"}


@pytest.mark.timeout(60)
def test_the_real_package_offline_writes_under_the_run_folder(tmp_path):
    sink, lines = opened(tmp_path, mode="offline")
    for record in make_records(3):
        sink.write(record)
    sink.summary()  # waits for what has been handed over
    logged = sink._run.summary
    assert logged["train/grad_norm"] == 2.0 and logged["step"] == 3 and logged["dispatched/1"] == 3
    sink.close()
    assert sink.summary() == {"mode": "offline", "logged": 3, "spilled": 0, "lost": 0} and lines == []
    sink._wandb.teardown()  # W&B's own process writes a moment later; this waits for it
    (written,) = tmp_path.glob("metrics/wandb/offline-run-*/run-*.wandb")
    assert b"window_mix/2" in written.read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"metrics"}


@pytest.mark.timeout(60)
def test_keeps_the_contract_of_a_sink(wandb):
    assert_sink_contract(WandbSink, mode="offline")
    assert_sink_contract(WandbSink, mode="disabled")


def test_values_are_plain_numbers():
    assert all(np.isscalar(v) for v in Series().values(make_records(1)[0]).values())


def test_a_resumed_run_logs_each_step_once_and_goes_on_counting(tmp_path, wandb):
    records = make_records(6)
    first, _ = opened(tmp_path, mode="offline")
    for record in records[:4]:  # killed after step 4; the checkpoint is that of step 2
        first.write(record)
    first.summary()
    second = WandbSink(WandbSink.Config(mode="offline"))
    second.open(open_context(tmp_path, "metrics", report=SilentReport(), seed=7, resumed_at_step=2))
    assert second.last_step == 4
    for record in records[2:]:
        second.write(record)
    second.close()
    assert [row["step"] for row in wandb.rows] == [1, 2, 3, 4, 5, 6]
    assert [row["dispatched/0"] for row in wandb.rows] == [1, 2, 3, 4, 5, 6]
    assert wandb.inits[1]["id"] == "abc123"


def test_what_was_spilled_of_steps_that_come_again_is_void(tmp_path, wandb):
    records = make_records(6)
    first, _ = opened(tmp_path, mode="offline")
    for record in records[:2]:
        first.write(record)
    first.summary()
    for record in records[2:5]:
        first._keep(record)
    second = WandbSink(WandbSink.Config(mode="offline"))
    second.open(open_context(tmp_path, "metrics", report=SilentReport(), seed=7, resumed_at_step=3))
    second.close()
    spilled = [json.loads(line)["step"] for line in (tmp_path / "metrics-spill.jsonl").read_text().splitlines()]
    assert spilled == [3]


def test_no_more_records_wait_than_a_checkpoint_holds():
    assert MOST_RECORDS >= flowdflash_wandb.MOST_WAITING + 50, "more wait in the edge, and one is being sent"


@pytest.mark.timeout(20)
def test_a_service_that_blocks_neither_stops_nor_delays_training_and_loses_nothing(tmp_path, wandb, monkeypatch):
    blocked, release = threading.Event(), threading.Event()
    log = wandb.log

    def hang(values, **given):
        if values["step"] == 3:
            blocked.set()
            release.wait(15)
        log(values, **given)

    monkeypatch.setattr(wandb, "log", hang)
    monkeypatch.setattr(flowdflash_wandb, "MOST_WAITING", 4)
    monkeypatch.setattr(flowdflash_wandb, "FINISH_TIMEOUT_SECS", 0.05)
    sink, lines = opened(tmp_path)
    records = make_records(20)
    for record in records[:3]:
        sink.write(record)
    assert blocked.wait(10)
    for record in records[3:]:
        sink.write(record)  # returns at once: four wait, the others are spilled
    summary = sink.summary()
    sink.close()
    assert (summary["logged"], summary["spilled"], summary["lost"]) == (2, 18, 0) and wandb.finished == 0
    spilled = [json.loads(line)["step"] for line in (tmp_path / "metrics-spill.jsonl").read_text().splitlines()]
    assert sorted(spilled) == list(range(3, 21))
    assert "4 records behind" in lines[0] and "does not take the last 5 records" in lines[1] and len(lines) == 2
    release.set()
    sink._sender.join(10)
    assert not sink._sender.is_alive()


@pytest.mark.timeout(20)
def test_what_a_killed_run_had_not_handed_over_is_logged_when_it_is_resumed(tmp_path, wandb, monkeypatch):
    taken, release = threading.Event(), threading.Event()
    log, records = wandb.log, make_records(6)

    def slow(values, **given):
        log(values, **given)
        if values["step"] == 2:
            taken.set()
            release.wait(15)

    monkeypatch.setattr(wandb, "log", slow)
    first, _ = opened(tmp_path, mode="offline")
    for record in records[:4]:
        first.write(record)
    assert taken.wait(10)  # killed here: step 1 is on record, 2 just logged, 3 and 4 only waiting
    second = WandbSink(WandbSink.Config(mode="offline"))
    monkeypatch.setattr(wandb, "log", log)
    second.open(open_context(tmp_path, "metrics", report=SilentReport(), seed=7, resumed_at_step=4))
    assert second.last_step == 1
    wandb.rows.clear()
    for record in records[1:]:  # the runtime gives it those of the checkpoint that it lacks
        second.write(record)
    second.close()
    assert [row["step"] for row in wandb.rows] == [2, 3, 4, 5, 6]
    monkeypatch.setattr(first, "_failed", "the process was killed")
    release.set()
    first.close()
