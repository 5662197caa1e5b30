"""The evaluator: when it measures, what it measures, and that ``flowdflash eval`` finds the same afterwards."""

from __future__ import annotations

import gc
import json
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import TINY, invoke, json_lines, overrides
from drafter_fakes import draft_config, lively
from safetensors.torch import load_file, save_file

from flowdflash.cli.checkpoint_eval import _evaluator, _Setting
from flowdflash.dflash import decode
from flowdflash.dflash.acceptance import summarise
from flowdflash.dflash.decode import finish, greedy, speculative_decode
from flowdflash.dflash.export import export_zlab, zlab_config
from flowdflash.dflash.model import DFlashDraft
from flowdflash.dflash.rounds import SpeculativeBatch
from flowdflash.dflash.sampling import Sampling
from flowdflash.dflash.speculators import export_speculators
from flowdflash.errors import DataInvalid
from flowdflash.items import Checkpoint
from flowdflash.journal import entries
from flowdflash.stage import Check, OpenContext, SilentReport
from flowdflash.stages.acceptance import AcceptanceSink
from flowdflash.stages.chat_jsonl import ChatJsonl
from flowdflash.target.load import load_target

SHAPE = '"hidden_size":32,"num_layers":4,"heads":4,"kv_heads":2,"head_dim":8'
# Six tokens: random drafts are right often enough for every acceptance length to occur.
SIX = f'toy:{{{SHAPE},"vocab_size":6}}'
# Room for the byte tokenizer and its chat template.
BYTES = f'toy:{{{SHAPE},"vocab_size":272}}'


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def draft_of(vocab_size: int, seed: int = 0) -> DFlashDraft:
    return lively(draft_config(num_hidden_layers=1, vocab_size=vocab_size, mask_token_id=vocab_size - 1), seed)


def checkpoint(draft: DFlashDraft, step: int = 3, reason: Any = "every") -> Checkpoint:
    return Checkpoint(step, 0, reason, zlab_config(draft.config), dict(draft.state_dict()), {}, {})


def measured(sink: AcceptanceSink, item: Checkpoint) -> Any:
    return finish(sink.measure(item))


def written(sink: AcceptanceSink, item: Checkpoint) -> int:
    """How often the sink gave others their turn meanwhile."""
    return len(list(sink.write(item)))


def opened(
    tmp_path: Path,
    cache: Path,
    model: str = SIX,
    stopping: Any = lambda: False,
    resumed_at_step: int | None = None,
    **options: Any,
) -> AcceptanceSink:
    config = {"num_prompts": 3, "max_new_tokens": 13, "batch_size": 2, "device": "cpu", **options}
    sink = AcceptanceSink(AcceptanceSink.Config(**config))
    facts = {"model": model, "vocab_size": json.loads(model.removeprefix("toy:"))["vocab_size"]}
    told: dict[str, Any] = {"facts": facts, "report": SilentReport(), "stopping": stopping}
    sink.open(OpenContext("acceptance", tmp_path, cache, seed=5, resumed_at_step=resumed_at_step, **told))
    return sink


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, {(0, "start"), (12, "final")}),
        ({"at_start": False}, {(12, "final")}),
        ({"at_end": False}, {(0, "start")}),
        ({"every_steps": 5}, {(0, "start"), (5, "every"), (10, "every"), (12, "final")}),
        ({"every_steps": 6, "at_start": False, "at_end": False}, {(6, "every"), (12, "final")}),
        ({"every_steps": 5, "at_start": False, "at_end": False}, {(5, "every"), (10, "every")}),
    ],
)
def test_it_measures_where_the_options_say_and_never_keeps_an_interrupted_run_waiting(
    tmp_path: Path, cache: Path, options: dict[str, Any], wanted: set[tuple[int, str]]
) -> None:
    sink = opened(tmp_path, cache, when_busy="wait", **options)
    asked = [(0, "start"), *((s, "every") for s in range(1, 12)), (12, "final"), (5, "interrupted"), (0, "interrupted")]
    assert {(step, reason) for step, reason in asked if sink.wants(step, reason)} == wanted


def test_the_figures_are_those_of_the_decode_loop_and_every_prompt_is_lossless(tmp_path: Path, cache: Path) -> None:
    sink, draft = opened(tmp_path, cache, draft_dtype="float32"), draft_of(6)
    assert written(sink, checkpoint(draft)) > record_passes(sink) / 2, "the turn is given up after each pass"
    (record,) = json_lines(tmp_path / "evaluations.jsonl")
    target = load_target(SIX, cache, dtype="float32", device="cpu").model
    results = speculative_decode(target, draft, sink.prompts, max_new_tokens=13)
    wanted = summarise(results, 4)
    assert [r.tokens for r in results] == greedy(target, sink.prompts, max_new_tokens=13)
    assert (record["stage"], record["step"], record["prompts"], record["identical"]) == ("acceptance", 3, 3, 3)
    assert record["tau_gen"] == pytest.approx(wanted.tau_request_mean) and record["tau_gen"] > 1
    assert record["block_size"] == 4 and record["alone"] is None and record["temperature"] == 0
    assert (record["answers"], record["eal"], record["eal_walk"]) == (0, None, None)
    assert record["speedup"] == pytest.approx(record["plain_secs"] / record["secs"])
    assert record["tau_pooled"] == pytest.approx(wanted.tau_pooled)
    assert (record["passes"], tuple(record["histogram"])) == (wanted.passes, wanted.histogram)
    assert (record["new_tokens"], record["fewest_new_tokens"]) == (39, 13)
    assert sum(n * count for n, count in enumerate(record["histogram"], 1)) == 39 - 3
    assert sink.summary()["evaluations"] == [{k: v for k, v in record.items() if k != "stage"}]


def force(monkeypatch: pytest.MonkeyPatch, known: torch.Tensor) -> None:
    """A draft that proposes the tokens of these texts, one per prompt."""

    def propose(self: Any, sizes: Any, width: int, reach: int, at: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(known[self.rows].gather(1, at[:, 1:]), 6)

    monkeypatch.setattr(SpeculativeBatch, "_propose", propose)


def record_passes(sink: AcceptanceSink) -> int:
    return sink.results[-1].passes


def test_a_draft_that_is_always_right_fills_every_block(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = opened(tmp_path, cache, batch_size=3)
    target = load_target(SIX, cache, dtype="float32", device="cpu").model
    answers = greedy(target, sink.prompts, max_new_tokens=20)
    known = torch.tensor([[*prompt, *answer] for prompt, answer in zip(sink.prompts, answers, strict=True)])
    force(monkeypatch, known)
    result = measured(sink, checkpoint(draft_of(6)))
    assert result.tau_gen == result.tau_pooled == 4.0
    assert (result.identical, result.passes, result.histogram) == (3, 9, (0, 0, 0, 9))


def test_a_draft_that_is_wrong_costs_passes_and_no_token(tmp_path: Path, cache: Path, monkeypatch: Any) -> None:
    sink = opened(tmp_path, cache, batch_size=3)
    target = load_target(SIX, cache, dtype="float32", device="cpu").model
    answers = greedy(target, sink.prompts, max_new_tokens=20)
    known = torch.tensor([[*prompt, *answer] for prompt, answer in zip(sink.prompts, answers, strict=True)])
    force(monkeypatch, (known + 1) % 6)
    result = measured(sink, checkpoint(draft_of(6)))
    assert (result.tau_gen, result.identical, result.passes) == (1.0, 3, 36)


def test_a_target_that_disagrees_with_itself_is_counted_as_not_identical(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = opened(tmp_path, cache)
    real = decode.plain_rounds

    def other(*arguments: Any, **options: Any) -> Any:
        first, *rest = yield from real(*arguments, **options)
        return [(first[0] ^ 1, *first[1:]), *rest]

    monkeypatch.setattr(decode, "plain_rounds", other)
    assert measured(sink, checkpoint(draft_of(6))).identical == 2


def test_the_draft_is_measured_as_it_is_exported(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    real = decode.speculative_rounds

    def spy(target: Any, draft: DFlashDraft, *arguments: Any, **options: Any) -> Any:
        seen.append({name: tensor.clone() for name, tensor in draft.state_dict().items()})
        return real(target, draft, *arguments, **options)

    monkeypatch.setattr(decode, "speculative_rounds", spy)
    item = checkpoint(draft_of(6))
    for dtype in ("bfloat16", "float32"):
        measured(opened(tmp_path, cache, draft_dtype=dtype), item)
    _, rounded, _, whole = seen  # each after the one that warms up
    for name, tensor in item.draft_tensors.items():
        assert rounded[name].dtype is torch.float32
        assert torch.equal(rounded[name], tensor.to(torch.bfloat16).float()) and torch.equal(whole[name], tensor)
    assert not torch.equal(rounded["fc.weight"], whole["fc.weight"])


def test_a_measurement_changes_neither_the_checkpoint_nor_the_next_one(tmp_path: Path, cache: Path) -> None:
    sink, item = opened(tmp_path, cache), checkpoint(draft_of(6))
    before = {name: tensor.clone() for name, tensor in item.draft_tensors.items()}
    first, _, again = (measured(sink, i) for i in (item, checkpoint(draft_of(6, seed=9)), item))
    assert (first.tau_gen, first.histogram) == (again.tau_gen, again.histogram)
    assert all(torch.equal(item.draft_tensors[name], tensor) for name, tensor in before.items())


def rows(path: Path, count: int) -> Path:
    chats = [
        [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": "no"}] for i in range(count)
    ]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


def test_prompts_of_a_file_are_its_questions_as_the_chat_template_writes_them(tmp_path: Path, cache: Path) -> None:
    from flowdflash.target.load import load_tokenizer

    sink = opened(tmp_path, cache, BYTES, prompts=rows(tmp_path / "p.jsonl", 5), num_prompts=2, max_new_tokens=4)
    tokenizer = load_tokenizer(BYTES, cache)
    assert [tokenizer.decode(p) for p in sink.prompts] == [
        f"<|im_start|>user\nquestion {i}<|im_end|>\n<|im_start|>assistant\n" for i in range(2)
    ]
    result = measured(sink, checkpoint(draft_of(272)))
    assert (result.prompts, result.identical) == (2, 2)
    assert sink.meter is not None and sink.meter._options["stop_ids"] == (tokenizer.eos_token_id,)


def test_a_file_with_too_few_prompts_is_an_error_that_names_both_numbers(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(DataInvalid, match="2 usable prompts, num_prompts asks for 3"):
        opened(tmp_path, cache, BYTES, prompts=rows(tmp_path / "p.jsonl", 2), num_prompts=3)


def test_close_lets_the_target_go_and_keeps_the_account(tmp_path: Path, cache: Path) -> None:
    sink = opened(tmp_path, cache)
    written(sink, checkpoint(draft_of(6)))
    assert sink.meter is not None
    target = weakref.ref(sink.meter.target)
    sink.close()
    gc.collect()
    assert target() is None and len(sink.summary()["evaluations"]) == 1


def test_the_target_is_loaded_once_and_plain_decoding_done_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flowdflash.target import load

    loads, plains = [], []
    load_target_really, plain_really = load.load_target, decode.plain_rounds
    monkeypatch.setattr(load, "load_target", lambda *a, **o: loads.append(a) or load_target_really(*a, **o))
    monkeypatch.setattr(decode, "plain_rounds", lambda *a, **o: plains.append(len(a[1])) or plain_really(*a, **o))
    sink = opened(tmp_path, cache)
    assert not loads, "opening a pipeline should not load a model that may never be needed"
    for step in (1, 2):
        written(sink, checkpoint(draft_of(6), step))
    assert (len(loads), plains) == (1, [1, 3]), "one prompt to warm up, then all"
    assert [e["step"] for e in entries(tmp_path / "evaluations.jsonl")] == [1, 2]


def test_alone_and_in_a_batch_give_one_tau(tmp_path: Path, cache: Path) -> None:
    result = measured(opened(tmp_path, cache, alone=True, batch_size=3), checkpoint(draft_of(6)))
    assert result.alone is not None and (result.batch_size, result.alone.batch_size) == (3, 1)
    assert result.alone.tau_gen == result.tau_gen > 1
    assert result.alone.identical == result.identical == 3
    assert json.loads(json.dumps(result.as_dict()))["alone"]["tau_gen"] == result.tau_gen
    assert measured(opened(tmp_path, cache, alone=True, batch_size=1), checkpoint(draft_of(6))).alone is None


def test_sampling_is_obeyed_and_compared_with_no_greedy_text(tmp_path: Path, cache: Path) -> None:
    sink = opened(tmp_path, cache, temperature=1.0, top_k=4, draft_dtype="float32")
    result = measured(sink, checkpoint(draft_of(6)))
    assert sink.meter is not None
    sampling = Sampling(1.0, top_k=4, seed=5)
    wanted = speculative_decode(sink.meter.target, draft_of(6), sink.prompts, max_new_tokens=13, sampling=sampling)
    assert result.tau_gen == summarise(wanted, 4).tau_request_mean
    assert (result.identical, result.temperature, result.top_k) == (None, 1.0, 4)


def test_i7_blocks_longer_than_the_draft_was_trained_with_are_warned_of(tmp_path: Path, cache: Path) -> None:
    for block_size, warned in ((2, False), (4, False), (6, True)):
        sink = opened(tmp_path, cache, block_size=block_size)
        result = measured(sink, checkpoint(draft_of(6)))
        assert (result.block_size, len(result.histogram)) == (block_size, block_size)
        assert any("trained with blocks of 4" in line for line in sink.ctx.report.lines) == warned  # type: ignore[attr-defined]


def test_answers_of_the_file_are_looked_at_and_prompts_without_one_are_not(tmp_path: Path, cache: Path) -> None:
    path = rows(tmp_path / "p.jsonl", 2)
    with path.open("a") as file:
        file.write(json.dumps({"prompt": "question without an answer"}) + "\n")
    sink = opened(tmp_path, cache, BYTES, prompts=path, max_new_tokens=3)
    result = measured(sink, checkpoint(draft_of(272)))
    assert (result.prompts, result.answers) == (3, 2)
    # "no" and the end of the turn: two blocks that are cut by the end of the answer, none of full size.
    assert result.eal_walk >= 1 and result.eal != result.eal
    assert [a and (bytes(a[0][a[1] : -1]), a[0][a[1] :]) for a in sink.answers] == [
        (b"no", [*b"no", sink.tokenizer.eos_token_id])
    ] * 2 + [None]


def test_a_text_file_is_a_prompt_per_line(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "p.txt").write_text("first\n\n  \n{second}\n")
    sink = opened(tmp_path, cache, BYTES, prompts=tmp_path / "p.txt", num_prompts=0)
    assert [sink.tokenizer.decode(p).split("\n")[1] for p in sink.prompts] == ["first<|im_end|>", "{second}<|im_end|>"]


def test_a_measurement_that_falls_due_while_one_is_going_on_is_left_out_and_told(tmp_path: Path, cache: Path) -> None:
    sink = opened(tmp_path, cache, every_steps=2)
    assert sink.wants(2, "every") and sink.wants(2, "every"), "the drafter asks twice about each step"
    assert not sink.wants(4, "every")
    written(sink, checkpoint(draft_of(6), 2))
    assert not sink.wants(4, "every"), "what was said once stays"
    assert sink.wants(6, "every") and not sink.wants(8, "every") and sink.wants(10, "final")
    assert sink.summary()["steps_left_out"] == [4, 8]
    assert "acceptance: step 4 is not measured: that of step 2 is going on" in sink.ctx.report.lines  # type: ignore[attr-defined]


@pytest.mark.parametrize("at_end", [True, False])
def test_the_end_is_measured_even_where_its_turn_on_the_way_was_left_out(
    tmp_path: Path, cache: Path, at_end: bool
) -> None:
    sink = opened(tmp_path, cache, every_steps=2, at_end=at_end)
    assert sink.wants(2, "every") and not sink.wants(4, "every")
    assert sink.wants(4, "final") == sink.wants(4, "final") == at_end
    assert sink.summary()["steps_left_out"] == ([] if at_end else [4])


def test_a_resumed_run_tells_of_steps_that_nobody_can_measure_any_more(tmp_path: Path, cache: Path) -> None:
    entries = [{"stage": "acceptance", "step": 2}, {"stage": "other", "step": 4}]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    sink = opened(tmp_path, cache, every_steps=2, resumed_at_step=7)
    assert sink.wants(6, "every"), "of this one there is a checkpoint"
    assert sink.summary()["steps_left_out"] == sink.summary()["steps_left_out"] == [4]
    (line,) = sink.ctx.report.lines  # type: ignore[attr-defined]
    assert line.startswith("acceptance: step 4 is not measured:") and "resumed at step 7" in line


@pytest.mark.parametrize(("when_busy", "made"), [("skip", []), ("wait", [3])])
def test_a_run_that_is_to_stop_waits_for_a_measurement_only_if_told_to(
    tmp_path: Path, cache: Path, when_busy: str, made: list[int]
) -> None:
    asked = iter([False, False])
    sink = opened(tmp_path, cache, stopping=lambda: next(asked, True), when_busy=when_busy)
    pieces = written(sink, checkpoint(draft_of(6)))
    assert (pieces == 2) == (when_busy == "skip")
    assert [e["step"] for e in sink.summary()["evaluations"]] == made
    assert sink.summary()["steps_left_out"] == ([3] if when_busy == "skip" else [])
    assert (tmp_path / "evaluations.jsonl").exists() == bool(made)


def test_on_several_gpus_the_evaluator_leaves_the_first_to_the_drafter(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flowdflash.target import load

    for count, device in ((0, "cpu"), (1, "cuda:0"), (4, "cuda:3")):
        monkeypatch.setattr(load, "gpu_count", lambda count=count: count)
        assert str(opened(tmp_path, cache, device="auto").device) == device


@pytest.mark.parametrize(
    ("options", "facts", "place"),
    [
        ({"prompts": "/nowhere/prompts.jsonl"}, {"model": SIX}, "prompts"),
        ({}, {}, "model"),
        ({"at_start": False, "at_end": False}, {"model": SIX}, ""),
        ({"num_prompts": 0}, {"model": SIX}, "num_prompts"),
        ({"top_p": 0.9}, {"model": SIX}, "top_p"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_run(
    options: dict[str, Any], facts: dict[str, Any], place: str
) -> None:
    check = Check("acceptance", facts)
    AcceptanceSink(AcceptanceSink.Config(**options)).check(check)
    assert [p.path for p in check.problems] == [place] and check.problems[0].severity == "error"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A run over a vocabulary of six, so that drafts are right now and then."""
    run = tmp_path_factory.mktemp("eval") / "run"
    changes = {
        "stages.corpus.samples": 24,
        "stages.corpus.vocab_size": 6,
        "stages.corpus.avoid_token_ids": "[5]",
        "stages.target.vocab_size": 6,
        "stages.target.model_seed": 7,
        "stages.drafter.precision": "float32",
        "stages.save.every_steps": 2,
        "stages.acceptance.max_new_tokens": 24,
    }
    result = invoke("run", TINY, "--run-dir", run, *overrides(changes), cache=cache)
    assert result.exit_code == 0, result.stderr
    return run


def comparable(record: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in record.items() if k not in ("secs", "plain_secs", "speedup", "stage", "checkpoint")}


def test_eval_on_a_run_and_on_its_checkpoint_gives_what_the_run_found(finished: Path, cache: Path) -> None:
    wanted = json_lines(finished / "evaluations.jsonl")[-1]
    assert wanted["tau_gen"] > 1 and wanted["identical"] == wanted["prompts"] == 4
    newest = finished / "checkpoints" / (finished / "checkpoints" / "latest").read_text().strip()
    for path in (finished, newest):
        result = invoke("eval", path, "--format", "json", cache=cache)
        assert result.exit_code == 0, result.stderr
        found = json.loads(result.stdout)
        assert found["checkpoint"] == str(newest.resolve() / "draft")
        assert comparable(found) == comparable(wanted)
    assert len(json_lines(finished / "evaluations.jsonl")) == 2, "eval leaves the run as it was"


def test_eval_says_it_in_words_and_obeys_its_options(finished: Path, cache: Path) -> None:
    result = invoke("eval", finished, "--num-prompts", 2, "--max-new-tokens", 5, cache=cache)
    first, second, third, fourth = result.stdout.splitlines()
    assert result.exit_code == 0 and first.startswith("checkpoint: ") and "step-" in first
    assert "acceptance length τ = " in second and "on 2 prompts, 10 tokens" in second
    assert "2 of 2 identical to plain greedy decoding" in second and "accepted per slot" in third
    assert fourth.startswith("  batches of 32: τ ") and "speedup" in fourth
    options = ("--alone", "--temperature", 0.5, "--top-p", 0.9, "--batch-size", 2, "--block-size", 2)
    result = invoke("eval", finished, "--num-prompts", 2, "--max-new-tokens", 5, *options, cache=cache)
    assert "sampled at temperature 0.5, top_p 0.9, top_k 0" in result.stdout
    assert [line.split(":")[0] for line in result.stdout.splitlines()[-2:]] == ["  batches of 2", "  batches of 1"]


def test_eval_of_an_older_checkpoint_measures_that_one(finished: Path, cache: Path) -> None:
    older = sorted(p for p in (finished / "checkpoints").glob("step-*"))[0]
    found = json.loads(invoke("eval", older, "--format", "json", cache=cache).stdout)
    assert found["checkpoint"] == str(older.resolve() / "draft") and f"step-{found['step']:06d}" == older.name


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda run: shutil.rmtree(run / "checkpoints"), "nor a checkpoint nor a run with one"),
        (
            lambda run: (run / "checkpoints" / "latest").write_text("step-999999\n"),
            "nor a checkpoint nor a run with one",
        ),
        (lambda run: (run / "run.json").unlink(), "no pipeline says on which prompts"),
        (lambda run: (run / "run.json").write_text("{}"), "run.json has no pipeline_folder"),
        (lambda run: (run / "pipeline.yaml").unlink(), "pipeline.yaml cannot be read"),
        (lambda run: next(run.glob("checkpoints/*/checkpoint.json")).write_text("{"), "checkpoint.json has no step"),
        (lambda run: next(run.glob("checkpoints/*/draft/model.safetensors")).write_bytes(b"x"), "cannot be read"),
    ],
)
def test_eval_of_a_damaged_run_says_what_is_wrong_in_a_line(
    finished: Path, cache: Path, tmp_path: Path, damage: Any, told: str
) -> None:
    run = tmp_path / "copy"
    newest = (finished / "checkpoints" / "latest").read_text().strip()
    other = [p.name for p in (finished / "checkpoints").glob("step-*") if p.name != newest]
    shutil.copytree(finished, run, ignore=shutil.ignore_patterns(*other))
    damage(run)
    result = invoke("eval", run, cache=cache)
    assert result.exit_code == 1 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and told in line


def test_eval_of_a_pipeline_without_an_evaluator_wants_prompts_and_is_content_with_them(
    cache: Path, tmp_path: Path
) -> None:
    """An export of its own, and a checkpoint whose pipeline has no evaluator: all there is to know is in the draft."""
    draft = draft_of(272)
    export_zlab(tmp_path / "export", draft.config, draft.state_dict(), provenance={"target": BYTES, "step": 7})
    result = invoke("eval", tmp_path / "export", cache=cache)
    assert result.exit_code == 1 and "no pipeline says on which prompts" in result.stderr
    prompts = rows(tmp_path / "p.jsonl", 3)
    options = ("--prompts", prompts, "--max-new-tokens", 4, "--format", "json")
    found = json.loads(invoke("eval", tmp_path / "export", *options, cache=cache).stdout)
    assert (found["step"], found["prompts"], found["identical"], found["answers"]) == (7, 3, 3, 3)
    other = BYTES.replace('"num_layers":4', '"num_layers":5')
    result = invoke("eval", tmp_path / "export", *options, "--target", other, cache=cache)
    assert result.exit_code == 1 and "this target has 5" in result.stderr
    result = invoke("eval", tmp_path / "export", "--prompts", prompts, "--top-k", 3, cache=cache)
    assert result.exit_code == 1 and "greedy decoding does not sample" in result.stderr


def test_eval_takes_the_target_of_a_pipeline_without_an_evaluator(finished: Path, cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "copy"
    shutil.copytree(finished, run)
    text = (run / "pipeline.yaml").read_text()
    (run / "pipeline.yaml").write_text(text[: text.index("  acceptance:")])
    assert "no pipeline says" in invoke("eval", run, cache=cache).stderr
    result = invoke("eval", run, "--prompts", rows(tmp_path / "p.jsonl", 1), cache=cache)
    # Its target has six tokens and no tokenizer; that it is looked for shows that the target is known.
    assert result.exit_code == 1 and "has no tokenizer" in result.stderr


def test_eval_decodes_greedily_what_a_pipeline_samples() -> None:
    setting = _Setting(options={"temperature": 0.8, "top_p": 0.9, "num_prompts": 2}, facts={"model": BYTES})
    sink = _evaluator(setting, {}, {"temperature": 0.0}, Path(), SilentReport())
    assert (sink.config.temperature, sink.config.top_p, sink.config.num_prompts) == (0.0, 1.0, 2)
    assert _evaluator(setting, {}, {}, Path(), SilentReport()).config.top_p == 0.9


def test_prompts_that_are_trained_on_are_told_of_before_the_run_and_at_eval(tmp_path: Path) -> None:
    path, report = rows(tmp_path / "rows.jsonl", 1), SilentReport()
    (tmp_path / "link.jsonl").symlink_to(path)
    source = ChatJsonl(ChatJsonl.Config(path=path, tokenizer=BYTES))
    facts = {"model": BYTES, **source.check(Check("corpus"))}
    for name, told in (("link.jsonl", ["warning"]), ("other.jsonl", [])):
        check = Check("acceptance", facts)
        AcceptanceSink(AcceptanceSink.Config(prompts=rows(tmp_path / name, 1))).check(check)
        assert [problem.severity for problem in check.problems] == told
    setting = _Setting(facts=facts)
    _evaluator(setting, {}, {"prompts": path}, Path(), report)
    (line,) = report.lines
    assert line.startswith("warning: prompts: the draft is trained on rows of this file")


def test_w3_eval_refuses_a_draft_that_brings_another_head(cache: Path) -> None:
    draft = draft_of(272)
    # Of two levels only: no run can lie above it.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        export_speculators(folder, draft.config, draft.state_dict(), target=BYTES)
        weights = Path(folder) / "model.safetensors"
        save_file({**load_file(weights), "lm_head.weight": torch.zeros(272, 32)}, weights)
        prompts = rows(Path(folder) / "p.jsonl", 1)
        result = invoke("eval", folder, "--prompts", prompts, "--max-new-tokens", 2, cache=cache)
    assert result.exit_code == 1 and "lm_head.weight is not the target's" in result.stderr
