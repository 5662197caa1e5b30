"""Metrics sink for Weights & Biases: a first-party plugin of flowdflash."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal

from pydantic import Field

from flowdflash.errors import FlowdflashError
from flowdflash.items import StepRecord
from flowdflash.journal import cut_back
from flowdflash.plugin import hookimpl
from flowdflash.secrets import hidden
from flowdflash.stage import Check, OpenContext, Sink, StageConfig
from flowdflash_wandb.account import effective_mode, has_api_key
from flowdflash_wandb.progress import Progress
from flowdflash_wandb.series import AXIS, Series

INIT_TIMEOUT_SECS = 60
"""How long to wait for the service at the start of a run."""

FINISH_TIMEOUT_SECS = 120
"""How long to wait for uploads at the end of a run: a dead network must not keep a finished run from ending."""

MOST_WAITING = 200
"""Records that may wait for W&B to take them: fewer than a checkpoint holds, so that a killed run loses none."""


class WandbSink(Sink):
    """Logs every optimizer step to Weights & Biases: loss, norms, lengths, and which buckets were dispatched.

    Series are drawn over the optimizer step, an axis of their own, so that W&B's hidden counter drops no record. A
    failure of W&B while training is one warning; from then on records go to a JSONL file in the run's folder, and so do
    those that it is too slow to take. The environment variable WANDB_MODE wins over ``mode``. Never asks for anything.
    """

    type = "wandb"
    reads = (StepRecord,)
    safe_to_change = frozenset({"name", "mode"})

    class Config(StageConfig):
        """Options of the W&B sink."""

        project: str = Field("flowdflash", min_length=1, description="W&B project")
        name: str = Field("", description="name of the run in W&B; empty: the name of the run's folder")
        mode: Literal["auto", "online", "offline", "disabled"] = Field(
            "auto",
            description="auto: online if an API key is configured and the service answers, else offline; online: "
            "refuse to start without; offline: files for `wandb sync`; disabled: log nothing. WANDB_MODE wins",
        )

    def __init__(self, config: WandbSink.Config) -> None:
        super().__init__(config)
        self._run: Any = None
        self._wandb: Any = None
        self._mode = ""
        self._series = Series()
        self._failed = ""
        self._spill = self._progress = Path()
        self._last_step: int | None = None
        self._counts = {"logged": 0, "spilled": 0, "lost": 0}
        self._warn: Any = None
        self._lock = threading.Lock()
        self._waiting: SimpleQueue[_Row | None] = SimpleQueue()
        self._sending: _Row | None = None
        self._behind = self._stuck = False
        # A call of W&B may block; only a thread of its own can be left behind in one.
        self._sender = threading.Thread(target=self._send, name="flowdflash-wandb", daemon=True)

    def check(self, check: Check) -> Mapping[str, Any]:
        """Refuse what would fail after the models are loaded: a mode that is none, online without a key."""
        # Reading the key's whereabouts here is a little input, and saves a person the time of loading a model.
        try:
            if effective_mode(self.config.mode) == "online" and not has_api_key():
                check.refuse("mode", "online needs a W&B API key and there is none", _KEY_HINT)
        except ValueError as error:
            check.refuse("mode", str(error))
        return {}

    def open(self, ctx: OpenContext) -> None:
        """Start or take up the W&B run."""
        self._warn = ctx.report.warn
        self._spill = ctx.run_dir / f"{ctx.stage}-spill.jsonl"
        mode = effective_mode(self.config.mode)
        if mode == "online" and not has_api_key():
            raise FlowdflashError(f"W&B mode online needs an API key and there is none; {_KEY_HINT}")
        self._mode = mode if mode != "auto" else "online" if has_api_key() else "offline"
        if self._mode == "disabled":
            return
        self._progress = ctx.run_dir / ctx.stage / "progress.json"
        if ctx.resumed_at_step is not None:
            before = Progress.read(self._progress)
            self._last_step, self._series = before.step, Series(before.dispatched)
            cut_back(self._spill, max(before.step, ctx.resumed_at_step))
        self._wandb = _import_wandb()
        try:
            self._run = self._start(ctx)
        except Exception as error:
            if mode != "auto" or self._mode == "offline":
                raise FlowdflashError(f"W&B could not start a run ({self._mode}): {_one_line(error)}") from error
            self._warn(f"W&B does not answer, logging offline instead: {_one_line(error)}")
            self._mode = "offline"
            self._run = self._start(ctx)
        self._sender.start()
        if self._mode == "online" and (url := getattr(self._run, "url", "")):
            ctx.report.info(f"W&B: {url}")

    def write(self, item: StepRecord) -> None:
        """Log one record; never raises for a fault of W&B, and never waits for it."""
        if self._run is None:
            return
        # A resumed run takes steps again that were logged before it was killed, and they come out the same.
        if self._last_step is not None and item.step <= self._last_step:
            return
        values = self._series.values(item)
        row = _Row(item, {**values, **self._histogram()}, dict(self._series.dispatched))
        if self._waiting.qsize() < MOST_WAITING:
            self._waiting.put(row)
            return
        if not self._behind:
            self._behind = True
            self._warn(f"W&B is {MOST_WAITING:,} records behind; those that it cannot take go to {self._spill}")
        self._keep(item)

    @property
    def last_step(self) -> int | None:
        """The last step that was logged before a resumed run began."""
        return self._last_step

    def _send(self) -> None:
        """On a thread of its own: whatever waits, in order."""
        while (row := self._waiting.get()) is not None:
            self._sending = row
            self._log(row)
            self._sending = None

    def _log(self, row: _Row) -> None:
        step = row.record.step
        if not self._failed:
            try:
                self._run.log(row.values)
            except Exception as error:
                self._failed = _one_line(error)
                self._warn(f"W&B failed at step {step}, records go to {self._spill} from here: {self._failed}")
            else:
                self._counts["logged"] += 1
                with suppress(OSError):
                    Progress(step, row.dispatched).write(self._progress)
                return
        self._keep(row.record)

    def _hand_over(self) -> bool:
        """Wait a bounded time until W&B has every record; what it does not take is spilled. False if it is stuck."""
        if self._stuck or not self._sender.is_alive():
            return not self._stuck
        self._waiting.put(None)
        self._sender.join(FINISH_TIMEOUT_SECS)
        if not self._sender.is_alive():
            return True
        self._stuck = True
        left: list[_Row | None] = [self._sending]
        with suppress(Empty):
            while True:
                left.append(self._waiting.get_nowait())
        self._waiting.put(None)
        kept = [row.record for row in left if row is not None]
        for record in kept:
            self._keep(record)
        if kept:
            self._warn(f"W&B does not take the last {len(kept)} records; they are in {self._spill}")
        return False

    def close(self) -> None:
        """Finish the W&B run, waiting a bounded time for uploads."""
        if self._run is None or not self._hand_over():
            return
        try:
            self._run.finish(exit_code=0)
        except Exception as error:
            self._warn(f"W&B could not finish the run: {_one_line(error)}")

    def summary(self) -> Mapping[str, Any]:
        """How many records W&B has, and where the others are."""
        if self._mode in ("", "disabled"):
            return {"mode": self._mode or "never opened"}
        self._hand_over()
        url = str(getattr(self._run, "url", "") or "") if self._mode == "online" else ""
        spill = str(self._spill) if self._counts["spilled"] else ""
        extra = {"url": url, "failure": self._failed, "spill_file": spill}
        return {"mode": self._mode, **self._counts, **{key: value for key, value in extra.items() if value}}

    def _start(self, ctx: OpenContext) -> Any:
        folder = ctx.run_dir / ctx.stage
        folder.mkdir(parents=True, exist_ok=True)
        known = folder / "run-id.txt"  # a resumed run goes on in the same W&B run
        given = {"id": known.read_text().strip(), "resume": "allow"} if known.is_file() else {}
        run = self._wandb.init(
            project=hidden(self.config.project),
            name=hidden(self.config.name) or ctx.run_dir.name,
            mode=self._mode,
            dir=str(folder),
            reinit="create_new",
            config={
                "seed": ctx.seed,
                **{k: _told(v) for k, v in ctx.facts.items() if isinstance(v, str | int | float)},
            },
            settings=self._wandb.Settings(
                console="off",
                silent=True,
                init_timeout=INIT_TIMEOUT_SECS,
                finish_timeout=FINISH_TIMEOUT_SECS,
                # Among what W&B notes of the machine is the command line, where a shell may have put a secret.
                x_disable_meta=any(hidden(word) != word for word in sys.argv),
            ),
            **given,
        )
        known.write_text(f"{run.id}\n")
        run.define_metric(AXIS)
        run.define_metric("*", step_metric=AXIS)
        return run

    def _histogram(self) -> dict[str, Any]:
        histogram = self._series.histogram()
        return {"buckets/dispatched": self._wandb.Histogram(np_histogram=histogram)} if histogram else {}

    def _keep(self, item: StepRecord) -> None:
        with self._lock:
            try:
                with self._spill.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(item.as_dict()) + "\n")
                self._counts["spilled"] += 1
            except OSError:
                self._counts["lost"] += 1


@dataclass(frozen=True, slots=True)
class _Row:
    """A record, what W&B is to log of it, and the batches dispatched per bucket up to it."""

    record: StepRecord
    values: dict[str, Any]
    dispatched: dict[int, int]


_KEY_HINT = "set WANDB_API_KEY, run `wandb login`, or say `mode: auto` or `offline`"


def _import_wandb() -> Any:
    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        import wandb
    except ImportError as error:
        raise FlowdflashError(
            f"the sink needs the package wandb, which does not import ({error}); pip install wandb, or say "
            "`mode: disabled`"
        ) from error
    return wandb


def _told(value: str | int | float) -> str | int | float:
    return hidden(value) if isinstance(value, str) else value


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


@hookimpl
def flowdflash_register(registry: Any) -> None:
    """Register the sink."""
    registry.register(WandbSink)
