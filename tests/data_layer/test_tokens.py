from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from flowdflash.errors import DataInvalid
from flowdflash.stage import Check
from flowdflash.stages.tokens import Tokens

from .fixtures import write_rows

Open = Callable[..., Any]


def row(ids: list[int], supervised: int) -> dict[str, Any]:
    return {"input_ids": ids, "loss_mask": [0] * (len(ids) - supervised) + [1] * supervised}


def test_ids_and_mask_are_those_of_the_file(open_source: Open) -> None:
    source = open_source([row([5, 6, 7], 2), row([260, 0, 1, 2], 3)], type=Tokens, epochs=2)
    first, second = source.epochs()
    assert (first.lengths.tolist(), first.supervised.tolist(), second.epoch) == ([3, 4], [2, 3], 1)
    ids, mask = source.tokens(1)
    assert (ids.tolist(), mask.tolist()) == ([260, 0, 1, 2], [False, True, True, True])
    assert source.vocabulary().supervised_token_ids.tolist() == [0, 1, 2, 6, 7]
    assert source.row(0) is None


def test_compressed_tokens_are_read_by_their_leading_bytes(open_source: Open, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [row([5, 6, 7], 2)])
    path.write_bytes(zstandard.compress(path.read_bytes()))
    assert open_source(path, type=Tokens).summary()["samples"] == 1


def test_ids_are_held_against_the_vocabulary_only_where_it_is_known(open_source: Open) -> None:
    rows = [row([5, 6, 7], 2), row([5, 261, 7], 2)]
    assert open_source(rows, type=Tokens).summary()["rejected"] == {"token id outside the vocabulary": 1}
    assert open_source(rows, type=Tokens, tokenizer="").summary()["rows_kept"] == 2
    too_large = open_source([*rows, row([5, 1 << 31], 1)], type=Tokens, tokenizer="")
    assert too_large.summary()["rejected"] == {"token id outside the vocabulary": 1}


def test_over_long_samples_are_cut_or_dropped_and_counted(open_source: Open) -> None:
    rows = [row(list(range(20)), 15), row(list(range(20)), 3), row([1, 2, 3], 2)]
    cut = open_source(rows, type=Tokens, max_length=10)
    assert (cut.summary()["truncated"], cut.summary()["samples"]) == (1, 2)
    assert cut.summary()["rejected"] == {"no supervised token after truncation": 1}
    assert cut.tokens(0)[0].tolist() == list(range(10))
    dropped = open_source(rows, type=Tokens, max_length=10, over_long="drop")
    assert dropped.summary()["rejected"] == {"longer than max_length": 2}


def test_changed_limits_or_rows_give_another_store(open_source: Open) -> None:
    state = open_source([row([5, 6, 7], 2)], type=Tokens).state()
    open_source([row([5, 6, 7], 2)], type=Tokens).restore(state)
    for rows, options in (([row([5, 6, 8], 2)], {}), ([row([5, 6, 7], 2)], {"max_length": 99})):
        with pytest.raises(DataInvalid, match="have changed since the checkpoint"):
            open_source(rows, type=Tokens, **options).restore(state)


def test_facts_name_the_tokenizer_only_if_it_is_known(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [row([1, 2], 1)])
    facts = {"files": (path.resolve(),), "max_length": 2048, "epochs": 1, "task": "train"}
    assert Tokens(Tokens.Config(path=path)).check(Check("corpus")) == facts
    named = Tokens(Tokens.Config(path=path, tokenizer="some/model"))
    assert named.check(Check("corpus")) == {**facts, "tokenizer": "some/model"}
    check = Check("corpus")
    Tokens(Tokens.Config(path=tmp_path, tokenizer="nothing-known")).check(check)
    assert {problem.path for problem in check.problems} == {"path", "tokenizer"}
