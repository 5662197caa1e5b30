from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from flowdflash import stages
from flowdflash.config.changes import changes
from flowdflash.config.check import load, load_mapping
from flowdflash.errors import DataInvalid, PipelineInvalid
from flowdflash.plugin.loader import Plugins, load_plugins
from flowdflash.plugin.registry import Registry
from flowdflash.stage import OpenContext, Source, StageConfig
from flowdflash.stages.mix import Mix

from .fixtures import make_tokenizer, say, write_rows


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins(builtin=[stages])


def tree(sources: dict[str, Any], **options: Any) -> dict[str, Any]:
    mix = {"kind": "source", "type": "mix", "sources": sources, **options}
    return {
        "stages": {
            "corpus": mix,
            "buckets": {"kind": "bucketer", "type": "length", "inputs": "corpus", "token_budget": 4096},
            "dispatch": {"kind": "dispatcher", "type": "pull", "inputs": "buckets"},
            "target": {"kind": "target-forward", "type": "toy", "vocab_size": 272, "inputs": "dispatch"},
            "drafter": {"kind": "drafter", "type": "dflash", "inputs": "target"},
        }
    }


def problems(plugins: Plugins, folder: Path, sources: dict[str, Any], **options: Any) -> dict[str, str]:
    with pytest.raises(PipelineInvalid) as caught:
        load_mapping(tree(sources, **options), plugins, folder)
    prefix = "stages.corpus."
    return {p.path.removeprefix(prefix): str(p) for p in caught.value.problems if p.path.startswith(prefix)}


def config(plugins: Plugins, folder: Path, sources: dict[str, Any], **options: Any) -> Mix.Config:
    context = {"base": folder, "registry": plugins.registry}
    return Mix.Config.model_validate({"sources": sources, **options}, context=context)


def opened(plugins: Plugins, folder: Path, sources: dict[str, Any], *, seed: int = 0, **options: Any) -> Mix:
    mix = Mix(config(plugins, folder, sources, **options))
    mix.open(OpenContext("corpus", folder / "run", folder / "cache", seed=seed))
    return mix


def made(samples: int, weight: float, **options: Any) -> dict[str, Any]:
    return {"type": "synthetic_lengths", "law": "fixed", "samples": samples, "weight": weight, **options}


def sizes(weights: tuple[float, float, float] = (0.2, 0.6, 0.2)) -> dict[str, Any]:
    return {
        name: made(n, w, length=n + 10 * place)
        for place, (name, n, w) in enumerate(zip("abc", (3, 4, 3), weights, strict=True), 1)
    }


def drawn(mix: Mix, table: Any) -> Counter[str]:
    return Counter(mix.describe(n).split(":")[0] for n in table.ids.tolist())


def test_first_exhausted_stops_at_the_first_source_and_keeps_the_shares(plugins: Plugins, tmp_path: Path) -> None:
    mix = opened(plugins, tmp_path, sizes())
    (table,) = mix.epochs()
    assert drawn(mix, table) == {"a": 1, "b": 4, "c": 1}
    assert len({mix.describe(n) for n in table.ids.tolist()}) == 6


def test_all_exhausted_shows_every_sample_and_keeps_the_shares(plugins: Plugins, tmp_path: Path) -> None:
    mix = opened(plugins, tmp_path, sizes(), stop="all_exhausted")
    (table,) = mix.epochs()
    assert drawn(mix, table) == {"a": 3, "b": 9, "c": 3}
    places = Counter(mix.describe(n) for n in table.ids.tolist())
    assert len(places) == 10 and max(places.values()) == 3
    assert len(set(table.ids.tolist())) == 15  # a sample that comes again has another id


@pytest.mark.timeout(20)
def test_small_source_beside_a_big_one_costs_no_more_than_its_samples(plugins: Plugins, tmp_path: Path) -> None:
    mix = opened(plugins, tmp_path, {"few": made(2, 1), "many": made(200_000, 1)}, stop="all_exhausted")
    (table,) = mix.epochs()
    counts = np.bincount(table.ids % 200_002)
    assert counts[:2].tolist() == [100_000, 100_000] and set(counts[2:].tolist()) == {1}


def test_samples_of_a_source_come_again_only_when_all_have_come(plugins: Plugins, tmp_path: Path) -> None:
    mix = opened(plugins, tmp_path, {"few": made(2, 1), "many": made(7, 1)}, epochs=7)
    seen: Counter[str] = Counter()
    for table in mix.epochs():
        assert drawn(mix, table) == {"few": 2, "many": 2}
        seen.update(place for place in map(mix.describe, table.ids.tolist()) if place.startswith("many"))
        assert len(seen) == 7 or max(seen.values()) - min(seen.values()) == 0
        assert max(seen.values()) - min(seen.values()) <= 1
    assert set(seen.values()) == {2}


def test_order_follows_from_seed_and_epoch_alone(plugins: Plugins, tmp_path: Path) -> None:
    def ids(seed: int) -> list[list[int]]:
        mix = opened(plugins, tmp_path, {"a": made(30, 1), "b": made(40, 1)}, seed=seed, epochs=2)
        return [table.ids.tolist() for table in mix.epochs()]

    first, again, other = ids(3), ids(3), ids(4)
    assert first == again != other
    assert first[0] != first[1]


def test_weight_zero_is_never_drawn_and_never_opened(plugins: Plugins, tmp_path: Path) -> None:
    sources = {**sizes((1, 0, 0)), "gone": {"type": "tokens", "path": "gone.jsonl", "weight": 0}}
    mix = opened(plugins, tmp_path, sources)
    (table,) = mix.epochs()
    assert drawn(mix, table) == {"a": 3}
    assert set(problems(plugins, tmp_path, sizes((0, 0, 0)))) == {"sources"}
    assert "sources.a.weight" in problems(plugins, tmp_path, sizes((-1, 1, 1)))


def test_source_without_rows_or_with_too_small_a_share_is_named_at_start(plugins: Plugins, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataInvalid, match=r"empty\.jsonl: the file holds no rows"):
        opened(plugins, tmp_path, {"a": made(3, 1), "b": {"type": "tokens", "path": "empty.jsonl"}})
    with pytest.raises(DataInvalid, match="'b' of the mix: its weight is too small"):
        opened(plugins, tmp_path, {"a": made(3, 1), "b": made(3, 0.1)})


@pytest.fixture
def parts(tmp_path: Path) -> dict[str, Any]:
    """A chat file and a token file with one bad row each, for the same tokenizer."""
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    write_rows(tmp_path / "chat.jsonl", [say("hi", "hello"), {"messages": []}, say("a", "bcd")])
    row = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    write_rows(tmp_path / "tokens.jsonl", [{"input_ids": []}, row, {**row, "input_ids": [250, 251, 252]}])
    return {
        "chat": {"type": "chat_jsonl", "path": "chat.jsonl", "tokenizer": "./model", "max_length": 99},
        "tokens": {"type": "tokens", "path": "tokens.jsonl", "tokenizer": "./model", "weight": 2},
    }


def test_tokens_vocabulary_accounts_and_rejects_are_those_of_each_source(
    plugins: Plugins, tmp_path: Path, parts: dict[str, Any]
) -> None:
    mix = opened(plugins, tmp_path, parts, stop="all_exhausted")
    (table,) = mix.epochs()
    assert len(table) == 6
    vocabulary = mix.vocabulary()
    assert vocabulary is not None
    seen, learnt = set(), set()
    for n, sample in enumerate(table.ids.tolist()):
        ids, mask = mix.tokens(sample)
        assert (len(ids), mask.sum()) == (table.lengths[n], table.supervised[n])
        assert mix.describe(sample).startswith("tokens: " if len(ids) == 3 else f"chat: {tmp_path}")
        seen |= set(ids.tolist())
        learnt |= set(ids[mask].tolist())
    assert set(vocabulary.token_ids.tolist()) == seen
    assert set(vocabulary.supervised_token_ids.tolist()) == learnt
    summary = mix.summary()
    told = {name: (part["samples_per_epoch"], part["rejected"]) for name, part in summary["sources"].items()}
    assert told == {"chat": (2, {"empty conversation": 1}), "tokens": (4, {"no `loss_mask`": 1})}
    assert (summary["samples_per_epoch"], summary["sources"]["tokens"]["passes_per_epoch"]) == (6, 2.0)
    for name in parts:
        assert len((tmp_path / "run" / f"corpus.{name}" / "rejects.jsonl").read_text().splitlines()) == 1
    mix.close()
    with pytest.raises(RuntimeError, match="not open"):
        mix.tokens(0)


def test_prompts_of_a_mix_keep_their_rows(plugins: Plugins, tmp_path: Path, parts: dict[str, Any]) -> None:
    chat = {**parts["chat"], "task": "generate"}
    mix = opened(plugins, tmp_path, {"one": chat, "two": {**chat, "prompt_until": "last_answer"}})
    (table,) = mix.epochs()
    rows = [mix.row(n) for n in table.ids.tolist()]
    assert Counter(row["messages"][0]["content"] for row in rows if row) == {"hi": 2, "a": 2}


def test_resume_with_one_source_changed_is_refused(plugins: Plugins, tmp_path: Path, parts: dict[str, Any]) -> None:
    state = opened(plugins, tmp_path, parts).state()
    opened(plugins, tmp_path, parts).restore(state)
    write_rows(tmp_path / "chat.jsonl", [say("hi", "hullo"), say("a", "bcd")])
    with pytest.raises(DataInvalid, match=r"chat\.jsonl: rows.* have changed since the checkpoint"):
        opened(plugins, tmp_path, parts).restore(state)


def test_facts_are_those_on_which_the_sources_agree(plugins: Plugins, tmp_path: Path, parts: dict[str, Any]) -> None:
    pipeline = load_mapping(tree(parts, epochs=3), plugins, tmp_path)
    facts = pipeline.graph.nodes["buckets"].facts
    assert facts["files"] == tuple((tmp_path / part["path"]).resolve() for part in parts.values())
    assert {key: facts[key] for key in ("tokenizer", "max_length", "epochs", "task", "template_options")} == {
        "tokenizer": str(tmp_path / "model"),
        "max_length": 2048,
        "epochs": 3,
        "task": "train",
        "template_options": {},
    }
    prompts = {**parts, "chat": {**parts["chat"], "task": "generate"}}
    assert "differ in task: generate and train" in problems(plugins, tmp_path, prompts)["sources"]
    others = {**parts, "tokens": {**parts["tokens"], "tokenizer": "some/other"}}
    assert "differ in tokenizer" in problems(plugins, tmp_path, others)["sources"]


def test_mistakes_in_a_source_of_a_mix_are_placed_there(
    plugins: Plugins, tmp_path: Path, parts: dict[str, Any]
) -> None:
    wrong = {
        "typo": {**parts["chat"], "pth": "x", "wieght": 2},
        "number": {**parts["tokens"], "max_length": "1k"},
        "lacking": {"type": "tokens"},
        "unknown": {"type": "tokns"},
        "nested": {"type": "mix", "sources": {}},
        "untyped": {"path": "x"},
        "a b": made(3, 1),
    }
    found = problems(plugins, tmp_path, wrong)
    assert {
        "sources.typo.pth",
        "sources.typo.wieght",
        "sources.number.max_length",
        "sources.lacking",
        "sources.unknown.type",
        "sources.nested",
        "sources.untyped",
        "sources.a b",
    } == set(found)
    assert "path is missing" in found["sources.lacking"] and "JSONL file" in found["sources.lacking"]
    assert "did you mean 'path'?" in found["sources.typo.pth"]
    assert "did you mean 'weight'?" in found["sources.typo.wieght"]
    assert "did you mean 'tokens'?" in found["sources.unknown.type"]
    assert "type is missing" in found["sources.untyped"]
    assert "a mix holds no other mix" in found["sources.nested"]
    gone = {**parts["tokens"], "path": "gone.jsonl", "epochs": 2}
    assert set(problems(plugins, tmp_path, {"t": gone})) == {"sources.t.path", "sources.t.epochs"}


def test_source_that_cannot_be_counted_is_refused_as_such() -> None:
    class Endless(Source):
        """Never ends."""

        type = "endless"
        streaming = True

        class Config(StageConfig):
            """None."""

        def epochs(self) -> Any:
            """None."""

        def tokens(self, sample_id: int) -> Any:
            """None."""

    registry = Registry()
    registry.register(Endless)
    with pytest.raises(ValidationError, match="source of type 'endless' is streaming, so"):
        Mix.Config.model_validate({"sources": {"e": {"type": "endless"}}}, context={"registry": registry})


def test_paths_start_from_the_folder_of_the_file_they_are_written_in(
    plugins: Plugins, tmp_path: Path, parts: dict[str, Any]
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    write_rows(base / "chat.jsonl", [say("hi", "hello")])
    (base / "base.yaml").write_text(
        "version: 1\nstages:\n"
        "  corpus: {kind: source, type: mix, sources: {c: {type: chat_jsonl, path: chat.jsonl, tokenizer: ../model},\n"
        "    t: {type: tokens, path: gone.jsonl}}}\n"
        "  buckets: {kind: bucketer, type: length, inputs: corpus, token_budget: 4096}\n"
        "  dispatch: {kind: dispatcher, type: pull, inputs: buckets}\n"
        "  target: {kind: target-forward, type: toy, vocab_size: 272, inputs: dispatch}\n"
        "  drafter: {kind: drafter, type: dflash, inputs: target}\n"
    )
    (tmp_path / "mine.yaml").write_text(
        "version: 1\nextends: base/base.yaml\nstages: {corpus: {sources: {t: {path: tokens.jsonl}}}}\n"
    )
    pipeline = load(tmp_path / "mine.yaml", plugins)
    sources = pipeline.graph.nodes["corpus"].config.sources
    assert (sources["c"].path, sources["t"].path) == (base / "chat.jsonl", tmp_path / "tokens.jsonl")
    assert pipeline.resolved["stages"]["corpus"]["sources"]["c"]["path"] == "./base/chat.jsonl"
    changed = load(tmp_path / "mine.yaml", plugins, overrides=["stages.corpus.sources.c.weight=3"])
    assert [str(change.path) for change in changes(pipeline, changed)] == ["stages.corpus.sources"]


def test_config_crosses_a_process_border(plugins: Plugins, tmp_path: Path, parts: dict[str, Any]) -> None:
    before = config(plugins, tmp_path, parts)
    after = pickle.loads(pickle.dumps(before))
    assert after == before
    assert [part.model_fields_set for part in after.sources.values()] == [
        part.model_fields_set for part in before.sources.values()
    ]


def test_lengths_of_the_mix_are_those_of_its_samples(plugins: Plugins, tmp_path: Path) -> None:
    mix = opened(plugins, tmp_path, sizes(), stop="all_exhausted")
    (table,) = mix.epochs()
    assert np.array_equal(table.lengths, [len(mix.tokens(n)[0]) for n in table.ids.tolist()])
    assert Counter(table.lengths.tolist()) == {13: 3, 24: 9, 33: 3}
