"""Runs that are killed and resumed until they finish, and compared with one that nobody touched.

One process imports everything once and forks a child for each run or resumption, so that a kill costs well under a
second. A child runs the command line itself. It is killed from inside, at a chosen event: the n-th time that it is just
about to open, rename, remove or make something in the run's folder, that it has taken an optimizer step, or the last
one of an epoch, or begins to evaluate; and so many microseconds later, or while the call just announced is in the
kernel. So kills land before a save, inside a file, inside a rename, between two renames, while a resumption tidies up.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import random
import shutil
import signal
import sys
import threading
import time
from _thread import start_new_thread
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PIPELINE = """
version: 1
name: chaos
seed: 7
stages:
  corpus: {kind: source, type: synthetic_lengths, samples: 48, law: uniform, min_length: 12, max_length: 32,
           vocab_size: 128, pattern: cycle, avoid_token_ids: [127], epochs: 2}
  buckets: {kind: bucketer, type: length, inputs: corpus, buckets: 3, token_budget: 96}
  order: {kind: interleaver, type: stratified, inputs: buckets}
  dispatch: {kind: dispatcher, type: pull, inputs: order}
  target: {kind: target-forward, type: toy, inputs: dispatch, num_layers: 6, vocab_size: 128, replicas: REPLICAS}
  drafter: {kind: drafter, type: dflash, inputs: target, block_size: 4, num_hidden_layers: 1, num_anchors: 8,
            accumulate: 2, lr: 3e-3, precision: float32, device: cpu}
  metrics: {kind: sink, type: jsonl, inputs: drafter.records}
  save: {kind: sink, type: checkpoint, inputs: drafter.checkpoints, every_steps: 2, keep: 2}
  acceptance: {kind: sink, type: acceptance, inputs: drafter.checkpoints, num_prompts: 2, max_new_tokens: 4,
               every_steps: 4, when_busy: wait}
"""

WRITING = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree")
MOST_TRIES = 60
EPOCH_STEPS = 8
INSIDE = -1
"""A delay: as soon as the thread lets others run, which is when the call just announced is in the kernel."""


@dataclass(frozen=True)
class Kill:
    """When a child is to die: at the ``count``-th event of a kind, ``delay_us`` microseconds later.

    ``match`` counts only events whose text holds it; ``times`` sends the signal so many times, and has the thread wait
    until each has been heard, and the drafter too after its next step.
    """

    event: str
    count: int
    delay_us: int = 0
    signal: int = signal.SIGKILL
    match: str = ""
    times: int = 0


@dataclass
class Landed:
    """Where a child died, or how it ended."""

    kill: Kill | None
    where: str
    exit_code: int


class Trap:
    """In a child: counts events and kills the process at the one that was chosen, having written down where."""

    def __init__(self, kill: Kill | None, run: Path, note: Path) -> None:
        self.kill, self.run, self.note = kill, str(run), note
        self.counts: Counter[str] = Counter()
        self.sprung = False
        self.heard_signal = threading.Semaphore(0)
        self.answered = threading.Event()

    def arm(self) -> None:
        sys.addaudithook(self.heard)

    def heard(self, event: str, args: tuple[Any, ...]) -> None:
        if self.sprung or self.kill is None:
            return
        writes = event == "open" and isinstance(args[1], str) and args[1][:1] in ("w", "a", "x")
        if (writes or event in WRITING) and str(args[0]).startswith(self.run):
            where = f"{event} {str(args[0])[len(self.run) + 1 :]}"
            self.count("write", where)
            if event == "os.rename":
                self.count("rename", where)

    def count(self, kind: str, where: str) -> None:
        kill = self.kill
        if kill is None or self.sprung or kind != kill.event or kill.match not in where:
            return
        self.counts[kind] += 1
        if self.counts[kind] < kill.count:
            return
        self.sprung = True
        self.note.write_text(where)
        if kill.times:
            self.send(kill)
        elif kill.delay_us == INSIDE:
            start_new_thread(os.kill, (os.getpid(), kill.signal))
        elif kill.delay_us:
            threading.Timer(kill.delay_us / 1e6, os.kill, (os.getpid(), kill.signal)).start()
        else:
            os.kill(os.getpid(), kill.signal)

    def send(self, kill: Kill) -> None:
        for _ in range(kill.times):
            os.kill(os.getpid(), kill.signal)
            assert self.heard_signal.acquire(timeout=30)
        self.answered.set()

    def stepped(self, step: int) -> None:
        self.count("step", f"step {step}")
        if step % EPOCH_STEPS == 0:
            self.count("epoch end", f"step {step}, the last of an epoch")
        if self.sprung and self.kill is not None and self.kill.times:
            self.answered.wait(30)


def in_child(arguments: list[str], trap: Trap) -> int:
    """Run the command line in a fork; the exit code, negative for a signal."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 97
    try:
        quiet = os.open(str(trap.note) + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        from flowdflash.cli import console, main
        from flowdflash.runtime.stop import StopRequest
        from flowdflash.stages.acceptance import AcceptanceSink

        request, measure = StopRequest.request, AcceptanceSink.measure

        def requested(self: StopRequest) -> None:
            request(self)
            trap.heard_signal.release()

        def measured(self: AcceptanceSink, item: Any) -> Any:
            trap.count("evaluate", f"evaluation of step {item.step}")
            return measure(self, item)

        StopRequest.request = requested  # type: ignore[method-assign]
        AcceptanceSink.measure = measured  # type: ignore[method-assign]
        notify = console._Watch.notify

        def watched(self: Any, hook: str, /, **given: Any) -> list[str]:
            told = notify(self, hook, **given)
            if hook == "flowdflash_step":
                trap.stepped(given["record"].step)
            return told

        console._Watch.notify = watched  # type: ignore[method-assign]
        trap.arm()
        main(arguments, standalone_mode=True)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def one_story(folder: Path, pipeline: Path, kills: Iterator[Kill | None]) -> tuple[Path, list[Landed]]:
    """Start a run, kill it, resume it, kill it, ... until it finishes."""
    folder.mkdir(parents=True)
    run, note = folder / "run", folder / "note"
    landed: list[Landed] = []
    for _ in range(MOST_TRIES):
        kill = next(kills)
        note.write_text("")
        begun = (run / "run.json").is_file()
        if not begun:
            shutil.rmtree(run, ignore_errors=True)
        arguments = ["run", "--resume", str(run)] if begun else ["run", str(pipeline), "--run-dir", str(run)]
        code = in_child(arguments, Trap(kill, run, note))
        landed.append(Landed(kill, note.read_text() or "the end", code))
        if code == 0:
            return run, landed
        if code not in (-signal.SIGKILL, 130, 143):
            raise AssertionError(f"exit code {code}\n{Path(f'{note}.log').read_text()[-4000:]}")
    raise AssertionError(f"not finished after {MOST_TRIES} tries")


EVENTS = (("write", 60), ("write", 60), ("rename", 12), ("rename", 12), ("step", 6), ("epoch end", 1), ("evaluate", 5))


def random_kills(seed: int, most: int) -> Iterator[Kill | None]:
    """Kills at seeded random events, then none."""
    rng = random.Random(seed)
    for _ in range(most):
        event, most_count = rng.choice(EVENTS)
        how = signal.SIGINT if rng.random() < 0.15 else signal.SIGKILL
        yield Kill(event, rng.randint(1, most_count), rng.choice((0, INSIDE, rng.randint(1, 3000))), how)
    while True:
        yield None


def warm_up() -> None:
    """Import what every child needs."""
    import torch
    from transformers.models.llama import modeling_llama
    from transformers.models.qwen3 import modeling_qwen3

    import flowdflash
    from flowdflash.plugin.loader import load_plugins

    for module in pkgutil.walk_packages(flowdflash.__path__, "flowdflash."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    torch.set_num_threads(1)
    load_plugins(builtin=[importlib.import_module("flowdflash.stages")])
    assert modeling_llama and modeling_qwen3
    gc.freeze()  # so that a child's collector leaves alone, and does not copy, what it shares with its parent


def tell_stories(folder: Path, seeds: list[int], replicas: list[int], most_kills: int) -> list[dict[str, Any]]:
    """One row per seed: kills, where they landed, and how the run differs from an untouched one.

    The untouched run has one target replica, the others have ``replicas`` in turn.
    """
    from flowdflash.runtime.compare import compare_runs

    folder.mkdir(parents=True, exist_ok=True)
    os.environ["FLOWDFLASH_CACHE_DIR"] = str(folder / "cache")
    warm_up()
    pipeline = folder / "chaos.yaml"
    pipeline.write_text(PIPELINE.replace("REPLICAS", "1"))
    straight, _ = one_story(folder / "straight", pipeline, random_kills(0, 0))
    rows = []
    for number, seed in enumerate(seeds):
        began = time.monotonic()
        copies = replicas[number % len(replicas)]
        pipeline.write_text(PIPELINE.replace("REPLICAS", str(copies)))
        run, landed = one_story(folder / f"seed-{seed}", pipeline, random_kills(seed, most_kills))
        found = compare_runs(straight, run)
        rows.append(
            {
                "seed": seed,
                "replicas": copies,
                "secs": round(time.monotonic() - began, 2),
                "landed": [
                    {**(asdict(x.kill) if x.kill else {}), "where": x.where, "exit": x.exit_code} for x in landed
                ],
                "differences": list(found.differences),
                "steps": found.steps,
            }
        )
        shutil.rmtree(folder / f"seed-{seed}")
    return rows


SAVING, SIGTERM = "step-000004/records.jsonl", signal.SIGTERM
SIGNALS = {
    "SIGTERM during a save": Kill("write", 1, match=SAVING, signal=SIGTERM, times=1),
    "SIGTERM twice during a save": Kill("write", 1, match=SAVING, signal=SIGTERM, times=2),
    "SIGINT twice at a step": Kill("step", 3, signal=signal.SIGINT, times=2),
    "SIGTERM during an evaluation that may be skipped": Kill("evaluate", 1, signal=SIGTERM, times=1),
    "SIGTERM during an evaluation": Kill("evaluate", 2, signal=SIGTERM, times=1),
    "SIGTERM twice during an evaluation": Kill("evaluate", 2, signal=SIGTERM, times=2),
    "SIGTERM twice during the last evaluation": Kill("evaluate", 5, signal=SIGTERM, times=2),
}


def tell_signals(folder: Path) -> list[dict[str, Any]]:
    """One row per case of ``SIGNALS``: how the run ended, what it left, and how it differs once it has been resumed."""
    from flowdflash.journal import entries
    from flowdflash.runtime.checkpoints import damage, saved_checkpoints
    from flowdflash.runtime.compare import compare_runs

    os.environ["FLOWDFLASH_CACHE_DIR"] = str(folder / "cache")
    warm_up()
    pipeline = folder / "chaos.yaml"
    pipeline.write_text(PIPELINE.replace("REPLICAS", "1"))
    straight, _ = one_story(folder / "straight", pipeline, random_kills(0, 0))
    rows = []
    for name, kill in SIGNALS.items():
        run, note = folder / name / "run", folder / name / "note"
        run.parent.mkdir()
        waits = "when_busy=skip" if "may be skipped" in name else "when_busy=wait"
        options = ["--set", f"stages.acceptance.{waits}", "--run-dir", str(run)]
        code = in_child(["run", str(pipeline), *options], Trap(kill, run, note))
        secs = time.time() - note.stat().st_mtime
        outcome = json.loads((run / "outcome.json").read_text())
        saved = saved_checkpoints(run)
        newest = json.loads((saved[-1].folder / "checkpoint.json").read_text())["reason"] if saved else ""
        row = {"case": name, "exit": code, "status": outcome["status"], "aborted": outcome["aborted"], "newest": newest}
        row |= {"abandoned": outcome["abandoned"], "damaged": [str(s.folder) for s in saved if damage(s)]}
        row |= {"evaluated": [e["step"] for e in entries(run / "evaluations.jsonl")], "secs": round(secs, 2)}
        resume = ["run", "--resume", str(run), "--set", "stages.acceptance.when_busy=wait"]
        row["resumed"] = in_child(resume, Trap(None, run, note))
        row["differences"] = list(compare_runs(straight, run).differences)
        rows.append(row)
    return rows


if __name__ == "__main__":
    if sys.argv[1] == "signals":
        json.dump(tell_signals(Path(sys.argv[2])), sys.stdout)
        sys.exit()
    where, seeds, replicas, most_kills = sys.argv[1:5]
    rows = tell_stories(Path(where), json.loads(seeds), json.loads(replicas), int(most_kills))
    json.dump(rows, sys.stdout)
