"""The evaluator: when it measures, what it measures, and that ``flowdflash eval`` finds the same afterwards."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import TINY, invoke, json_lines, overrides

from flowdflash.dflash import decode
from flowdflash.dflash.config import DraftConfig
from flowdflash.dflash.decode import greedy, speculative_decode, summarise
from flowdflash.dflash.export import zlab_config
from flowdflash.dflash.model import DFlashDraft
from flowdflash.errors import DataInvalid
from flowdflash.items import Checkpoint
from flowdflash.stage import Check, OpenContext, SilentReport
from flowdflash.stages.acceptance import AcceptanceSink, read_evaluations
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
    """A random draft whose weights are large enough for its tokens to differ from place to place."""
    config = DraftConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=vocab_size,
        block_size=4,
        mask_token_id=vocab_size - 1,
        target_layer_ids=(0, 2),
        num_target_layers=4,
        rope_theta=10000.0,
    )
    draft = DFlashDraft(config, seed=seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    return draft


def checkpoint(draft: DFlashDraft, step: int = 3, reason: Any = "every") -> Checkpoint:
    return Checkpoint(step, 0, reason, zlab_config(draft.config), dict(draft.state_dict()), {}, {})


def opened(tmp_path: Path, cache: Path, model: str = SIX, **options: Any) -> AcceptanceSink:
    config = {"num_prompts": 3, "max_new_tokens": 13, "batch_size": 2, "device": "cpu", **options}
    sink = AcceptanceSink(AcceptanceSink.Config(**config))
    facts = {"model": model, "vocab_size": json.loads(model.removeprefix("toy:"))["vocab_size"]}
    sink.open(OpenContext("acceptance", tmp_path, cache, seed=5, facts=facts, report=SilentReport()))
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
    sink = opened(tmp_path, cache, **options)
    asked = [(0, "start"), *((s, "every") for s in range(1, 12)), (12, "final"), (5, "interrupted"), (0, "interrupted")]
    assert {(step, reason) for step, reason in asked if sink.wants(step, reason)} == wanted


def test_the_figures_are_those_of_the_decode_loop_and_every_prompt_is_lossless(tmp_path: Path, cache: Path) -> None:
    sink, draft = opened(tmp_path, cache, draft_dtype="float32"), draft_of(6)
    sink.write(checkpoint(draft))
    (record,) = json_lines(tmp_path / "evaluations.jsonl")
    target = load_target(SIX, cache, dtype="float32", device="cpu").model
    results = speculative_decode(target, draft, sink.prompts, max_new_tokens=13)
    wanted = summarise(results, 4)
    assert [r.tokens for r in results] == greedy(target, sink.prompts, max_new_tokens=13)
    assert (record["stage"], record["step"], record["prompts"], record["identical"]) == ("acceptance", 3, 3, 3)
    assert record["tau"] == pytest.approx(wanted.tau_request_mean) and record["tau"] > 1
    assert record["tau_pooled"] == pytest.approx(wanted.tau_pooled)
    assert (record["passes"], tuple(record["histogram"])) == (wanted.passes, wanted.histogram)
    assert (record["new_tokens"], record["fewest_new_tokens"]) == (39, 13)
    assert sum(n * count for n, count in enumerate(record["histogram"], 1)) == 39 - 3
    assert sink.summary()["evaluations"] == [{k: v for k, v in record.items() if k != "stage"}]


def test_a_draft_that_is_always_right_fills_every_block(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = opened(tmp_path, cache, batch_size=3)
    target = load_target(SIX, cache, dtype="float32", device="cpu").model
    answers = greedy(target, sink.prompts, max_new_tokens=20)
    known = torch.tensor([[*prompt, *answer] for prompt, answer in zip(sink.prompts, answers, strict=True)])
    monkeypatch.setattr(decode._Batch, "_draft", lambda self, sizes, width, reach, at: known[self.rows].gather(1, at))
    result = sink.measure(checkpoint(draft_of(6)))
    assert result.tau == result.tau_pooled == 4.0
    assert (result.identical, result.passes, result.histogram) == (3, 9, (0, 0, 0, 9))


def test_a_draft_that_is_wrong_costs_passes_and_no_token(tmp_path: Path, cache: Path, monkeypatch: Any) -> None:
    sink = opened(tmp_path, cache, batch_size=3)
    target = load_target(SIX, cache, dtype="float32", device="cpu").model
    answers = greedy(target, sink.prompts, max_new_tokens=20)
    known = torch.tensor([[*prompt, *answer] for prompt, answer in zip(sink.prompts, answers, strict=True)])

    def wrong(self: Any, sizes: Any, width: int, reach: int, at: torch.Tensor) -> torch.Tensor:
        block = known[self.rows].gather(1, at)
        block[:, 1:] = (block[:, 1:] + 1) % 6
        return block

    monkeypatch.setattr(decode._Batch, "_draft", wrong)
    result = sink.measure(checkpoint(draft_of(6)))
    assert (result.tau, result.identical, result.passes) == (1.0, 3, 36)


def test_a_target_that_disagrees_with_itself_is_counted_as_not_identical(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = opened(tmp_path, cache)
    real = decode.greedy

    def other(*arguments: Any, **options: Any) -> list[tuple[int, ...]]:
        first, *rest = real(*arguments, **options)
        return [(first[0] ^ 1, *first[1:]), *rest]

    monkeypatch.setattr(decode, "greedy", other)
    assert sink.measure(checkpoint(draft_of(6))).identical == 2


def test_the_draft_is_measured_as_it_is_exported(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    real = decode.speculative_decode

    def spy(target: Any, draft: DFlashDraft, *arguments: Any, **options: Any) -> Any:
        seen.append({name: tensor.clone() for name, tensor in draft.state_dict().items()})
        return real(target, draft, *arguments, **options)

    monkeypatch.setattr(decode, "speculative_decode", spy)
    item = checkpoint(draft_of(6))
    for dtype in ("bfloat16", "float32"):
        opened(tmp_path, cache, draft_dtype=dtype).measure(item)
    rounded, whole = seen
    for name, tensor in item.draft_tensors.items():
        assert rounded[name].dtype is torch.float32
        assert torch.equal(rounded[name], tensor.to(torch.bfloat16).float()) and torch.equal(whole[name], tensor)
    assert not torch.equal(rounded["fc.weight"], whole["fc.weight"])


def test_a_measurement_changes_neither_the_checkpoint_nor_the_next_one(tmp_path: Path, cache: Path) -> None:
    sink, item = opened(tmp_path, cache), checkpoint(draft_of(6))
    before = {name: tensor.clone() for name, tensor in item.draft_tensors.items()}
    first, _, again = (sink.measure(i) for i in (item, checkpoint(draft_of(6, seed=9)), item))
    assert (first.tau, first.histogram) == (again.tau, again.histogram)
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
    assert sink.stop_ids == {tokenizer.eos_token_id}
    result = sink.measure(checkpoint(draft_of(272)))
    assert (result.prompts, result.identical) == (2, 2)


def test_a_file_with_too_few_prompts_is_an_error_that_names_both_numbers(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(DataInvalid, match="2 usable prompts, num_prompts asks for 3"):
        opened(tmp_path, cache, BYTES, prompts=rows(tmp_path / "p.jsonl", 2), num_prompts=3)


def test_close_lets_the_target_go_and_keeps_the_account(tmp_path: Path, cache: Path) -> None:
    sink = opened(tmp_path, cache)
    sink.write(checkpoint(draft_of(6)))
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
    load_target_really, greedy_really = load.load_target, decode.greedy
    monkeypatch.setattr(load, "load_target", lambda *a, **o: loads.append(a) or load_target_really(*a, **o))
    monkeypatch.setattr(decode, "greedy", lambda *a, **o: plains.append(a) or greedy_really(*a, **o))
    sink = opened(tmp_path, cache)
    assert not loads, "opening a pipeline should not load a model that may never be needed"
    for step in (1, 2):
        sink.write(checkpoint(draft_of(6), step))
    assert (len(loads), len(plains)) == (1, 1)
    assert [e["step"] for e in read_evaluations(tmp_path / "evaluations.jsonl")] == [1, 2]


def test_a_run_without_evaluations_has_none_to_read(tmp_path: Path) -> None:
    assert read_evaluations(tmp_path / "evaluations.jsonl") == []


@pytest.mark.parametrize(
    ("options", "facts", "place"),
    [
        ({"prompts": "/nowhere/prompts.jsonl"}, {"model": SIX}, "prompts"),
        ({}, {}, "model"),
        ({"at_start": False, "at_end": False}, {"model": SIX}, ""),
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
    return {k: v for k, v in record.items() if k not in ("secs", "plain_secs", "stage", "checkpoint")}


def test_eval_on_a_run_and_on_its_checkpoint_gives_what_the_run_found(finished: Path, cache: Path) -> None:
    wanted = json_lines(finished / "evaluations.jsonl")[-1]
    assert wanted["tau"] > 1 and wanted["identical"] == wanted["prompts"] == 4
    newest = finished / "checkpoints" / (finished / "checkpoints" / "latest").read_text().strip()
    for path in (finished, newest):
        result = invoke("eval", path, "--format", "json", cache=cache)
        assert result.exit_code == 0, result.stderr
        found = json.loads(result.stdout)
        assert found["checkpoint"] == str(newest.resolve())
        assert comparable(found) == comparable(wanted)
    assert len(json_lines(finished / "evaluations.jsonl")) == 2, "eval leaves the run as it was"


def test_eval_says_it_in_words_and_obeys_its_options(finished: Path, cache: Path) -> None:
    result = invoke("eval", finished, "--num-prompts", 2, "--max-new-tokens", 5, cache=cache)
    first, second, third = result.stdout.splitlines()
    assert result.exit_code == 0 and first.startswith("checkpoint: ") and "step-" in first
    assert "acceptance length τ = " in second and "on 2 prompts, 10 tokens" in second
    assert "2 of 2 identical to plain greedy decoding" in second and "accepted per slot" in third


def test_eval_of_an_older_checkpoint_measures_that_one(finished: Path, cache: Path) -> None:
    older = sorted(p for p in (finished / "checkpoints").glob("step-*"))[0]
    found = json.loads(invoke("eval", older, "--format", "json", cache=cache).stdout)
    assert found["checkpoint"] == str(older.resolve()) and f"step-{found['step']:06d}" == older.name


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda run: shutil.rmtree(run / "checkpoints"), "neither a checkpoint nor a run with one"),
        (lambda run: (run / "checkpoints" / "latest").write_text("step-999999\n"), "names 'step-999999'"),
        (lambda run: (run / "run.json").unlink(), "run.json cannot be read"),
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


def test_eval_of_a_pipeline_without_an_evaluator_says_so(finished: Path, cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "copy"
    shutil.copytree(finished, run)
    text = (run / "pipeline.yaml").read_text()
    (run / "pipeline.yaml").write_text(text[: text.index("  acceptance:")])
    result = invoke("eval", run, cache=cache)
    assert result.exit_code == 1 and "has no sink of type acceptance" in result.stderr
