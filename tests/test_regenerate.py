"""A pipeline that generates: killed, stopped, resumed, run again; and the shipped one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runs import ROOT, invoke, json_lines, overrides
from runtime_fakes import GENERATING, FakeSink, Pipeline, threads_left

from flowdflash.errors import StageFailed
from flowdflash.items import GeneratedBatch
from flowdflash.runtime.ledger import Ledger

PIPELINE = """
version: 1
name: regenerate
seed: 7
vars: {temperature: 1.0}
stages:
  prompts: {kind: source, type: chat_jsonl, task: generate, prompt_until: every_answer, path: prompts.jsonl,
            tokenizer: "toy:{}", max_length: 64}
  batches: {kind: bucketer, type: sorted_budget, inputs: prompts, token_budget: 256, max_samples: 3}
  dispatch: {kind: dispatcher, type: pull, inputs: batches}
  generator: {kind: generator, type: transformers, inputs: dispatch, model: "toy:{}", dtype: float32, device: cpu,
              max_new_tokens: 6, temperature: "${vars.temperature}", top_k: 50}
  answers: {kind: sink, type: responses, inputs: generator, path: answers.jsonl, keep: all, overwrite: true}
"""

# Dies as by kill -9 in the middle of writing its third batch.
DYING = """
import os, signal, sys
from flowdflash.cli import main
from flowdflash.data.partial import PartialFile
append = PartialFile._append
def dying(self, file, block):
    if len(self.batches) == 2:
        file.write(block[: len(block) // 2])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    append(self, file, block)
PartialFile._append = dying
main(sys.argv[1:])
"""


def row(number: int) -> dict[str, Any]:
    turns = ["x" * (number % 5 + 1), "and then?"][: 1 + number % 2]
    return {"messages": [{"role": "user", "content": text} for text in turns], "n": number}


def responses_of(run: Path) -> dict[str, Any]:
    summaries = json.loads((run / "outcome.json").read_text())["summaries"]
    return {"asked": summaries["generator"]["responses"], **summaries["answers"]}


@pytest.mark.timeout(240)
def test_a_run_killed_in_the_middle_goes_on_or_is_run_again_and_ends_with_the_same_rows(tmp_path: Path) -> None:
    cache, file, answers = tmp_path / "cache", tmp_path / "p.yaml", tmp_path / "answers.jsonl"
    file.write_text(PIPELINE)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row(n)) + "\n" for n in range(14)))
    straight = invoke("run", file, "--run-dir", tmp_path / "straight", cache=cache)
    assert straight.exit_code == 0, straight.output
    whole = answers.read_bytes()
    assert [entry["n"] for entry in json_lines(answers)] == list(range(14)), "rows are in the order of the input"
    all_of_them = responses_of(tmp_path / "straight")["asked"]
    answers.unlink()

    killed = subprocess.run(
        [sys.executable, "-c", DYING, "run", str(file), "--run-dir", str(tmp_path / "killed")],
        env={**os.environ, "FLOWDFLASH_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=200,
    )
    partial = tmp_path / "answers.jsonl.partial"
    assert killed.returncode == -9, killed.stderr
    left = partial.read_bytes()
    assert not left.endswith(b"\n") and not answers.exists()

    resumed = invoke("run", "--resume", tmp_path / "killed", cache=cache)
    assert resumed.exit_code == 0, resumed.output
    assert answers.read_bytes() == whole and not partial.exists()
    told = responses_of(tmp_path / "killed")
    assert told["batches_of_an_earlier_run"] == 2 and 0 < told["asked"] < all_of_them
    assert "nothing is left to do" in invoke("run", "--resume", tmp_path / "killed", cache=cache).stdout

    answers.unlink()
    partial.write_bytes(left)
    changed = invoke("run", file, "--run-dir", tmp_path / "other", "--set", "vars.temperature=0.5", cache=cache)
    assert changed.exit_code == 1 and "stages.generator.temperature 1.0 then, 0.5 now" in changed.stderr
    again = invoke("run", file, "--run-dir", tmp_path / "again", cache=cache)
    assert again.exit_code == 0, again.output
    assert answers.read_bytes() == whole
    assert responses_of(tmp_path / "again")["asked"] == told["asked"]


class Remembering(FakeSink):
    """Has the batches that its options say from an earlier run."""

    @property
    def batches_done(self) -> list[int]:
        self.call("batches_done")
        return list(self.config.done)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("replicas", [1, 3])
def test_only_what_all_sinks_have_from_an_earlier_run_is_left_out(tmp_path: Path, replicas: int) -> None:
    pipeline = Pipeline(
        wires=(*GENERATING, ("generator", "", "metrics", GeneratedBatch)),
        classes={"texts": Remembering, "metrics": Remembering},
        options={
            "generator": {"replicas": replicas},
            "texts": {"done": [0, 4, 1, 6]},
            "metrics": {"done": [6, 1, 0, 2]},
        },
    )
    outcome = pipeline.run(tmp_path)
    assert (outcome.status, outcome.batches) == ("finished", 4)
    for name in ("texts", "metrics"):
        assert [item.info.seq for item in pipeline.written(name, GeneratedBatch)] == [2, 3, 4, 5]


@pytest.mark.timeout(20)
def test_a_run_of_which_all_is_there_ends_without_a_batch(tmp_path: Path) -> None:
    pipeline = Pipeline(wires=GENERATING, classes={"texts": Remembering}, options={"texts": {"done": range(7)}})
    outcome = pipeline.run(tmp_path)
    assert (outcome.status, outcome.batches) == ("finished", 0) and not pipeline.journal.of("write")


@pytest.mark.timeout(20)
def test_a_sink_that_cannot_say_what_it_has_fails_the_run_under_its_name(tmp_path: Path) -> None:
    pipeline = Pipeline(wires=GENERATING, classes={"texts": Remembering}, options={"texts": {"done": None}})
    with pytest.raises(StageFailed) as caught:
        pipeline.run(tmp_path)
    assert caught.value.stage == "texts" and not threads_left()


def test_a_ledger_of_batches_in_any_order() -> None:
    assert Ledger.of([]) == Ledger()
    assert Ledger.of([2, 0, 1, 5, 4]) == Ledger(3, (4, 5))


@pytest.mark.parametrize(
    "options",
    [
        {"generator.temperature": 0.7, "generator.top_p": 0.9},
        {"prompts.prompt_until": "every_answer"},
        {
            "generator.type": "openai",
            "generator.base_url": "http://nobody.invalid/v1",
            "generator.model": "served",
            "generator.api_key_env": "A_KEY_THAT_IS_NOT_SET",
        },
    ],
)
def test_the_shipped_pipeline_takes_the_options_that_it_speaks_of(options: dict[str, Any]) -> None:
    values = overrides({f"stages.{name}": value for name, value in options.items()})
    result = invoke("validate", ROOT / "pipelines" / "regenerate.yaml", "--strict", *values)
    assert (result.exit_code, result.stderr) == (0, "")
