from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowdflash.dflash.sampling import Sampling
from flowdflash.errors import DataInvalid, ModelInvalid
from flowdflash.items import Answer, IntArray
from flowdflash.stages.transformers_generator import TransformersGenerator
from flowdflash.target.generate import _answer, generate_answers, left_padded, stop_ids
from flowdflash.target.load import LoadedTarget, load_tokenizer

from .models import TOY_REF, batch_of, context, problems, random_rows


def stage(**options: Any) -> TransformersGenerator:
    defaults: dict[str, Any] = {"model": TOY_REF, "dtype": "float32", "device": "cpu", "max_new_tokens": 12}
    return TransformersGenerator(TransformersGenerator.Config(**{**defaults, **options}))


def arrays(rows: list[list[int]]) -> list[IntArray]:
    return [np.array(row, dtype=np.int64) for row in rows]


def greedy(toy: LoadedTarget, row: list[int], count: int, stops: tuple[int, ...]) -> list[int]:
    """One token after the other, without a cache, without padding."""
    ids = list(row)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(toy.model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in stops:
            break
    return ids[len(row) :]


def test_padding_moves_to_the_left() -> None:
    ids, mask = left_padded(arrays([[1, 2, 3], [4]]), pad_id=9)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_greedy_answers_are_the_models_own_whatever_the_batch(cache: Path, toy: LoadedTarget) -> None:
    tokenizer = load_tokenizer(TOY_REF, cache)
    rows = random_rows([23, 5, 40])
    # A stop token that the toy does write: some answers end early.
    stops = tuple({greedy(toy, rows[0], 6, ())[-1]})
    answers = generate_answers(
        toy, tokenizer, arrays(rows), stops=stops, max_new_tokens=10, sampling=Sampling(), seeds=[0] * 3
    )
    reasons = set()
    for row, answer in zip(rows, answers, strict=True):
        tokens = greedy(toy, row, 10, stops)
        ended = tokens[-1] in stops
        reasons.add(answer.finish_reason)
        assert answer.tokens == len(tokens)
        assert answer.finish_reason == ("stop" if ended else "length")
        assert answer.text == tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=True)
    assert "stop" in reasons


def test_89_output_is_cut_by_position_not_by_value(cache: Path) -> None:
    tokenizer = load_tokenizer(TOY_REF, cache)
    answer = _answer([72, 105, 258, 74, 256, 256], tokenizer, (258,))
    assert (answer.text, answer.tokens, answer.finish_reason) == ("Hi", 3, "stop")
    answer = _answer([72, 32, 44, 105], tokenizer, (258,))
    assert (answer.text, answer.tokens, answer.finish_reason) == ("H ,i", 4, "length")
    answer = _answer([72, *"é".encode()[:1]], tokenizer, (258,))
    assert (answer.text, answer.tokens, answer.finish_reason) == ("H", 2, "length"), "cut inside a character"


def test_an_answer_with_a_special_token_inside_is_rejected_and_not_written_without_it(cache: Path) -> None:
    tokenizer = load_tokenizer(TOY_REF, cache)
    for stop in (258, 256):
        answer = _answer([72, 257, 105, stop], tokenizer, (258,))
        assert (answer.text, answer.rejected) == ("", "special token inside the answer")
        assert answer.detail == tokenizer.convert_ids_to_tokens(257) and not answer.complete


def test_sampling_is_reproducible_and_leaves_the_global_generator_alone(cache: Path, toy: LoadedTarget) -> None:
    tokenizer = load_tokenizer(TOY_REF, cache)

    prompts = arrays(random_rows([9, 4]))

    def answers(seed: int, given: list[IntArray] = prompts, **options: Any) -> list[str]:
        sampling = Sampling(**{"temperature": 1.0, **options})
        seeds = [seed + place for place in range(len(given))]
        made = generate_answers(toy, tokenizer, given, stops=(258,), max_new_tokens=12, sampling=sampling, seeds=seeds)
        return [answer.text for answer in made]

    state = torch.get_rng_state()
    assert answers(1) == answers(1)
    assert answers(1) != answers(2)
    assert answers(2, prompts[1:]) == answers(1)[1:], "the batch that a prompt is in does not matter"
    assert torch.equal(torch.get_rng_state(), state)
    cold = answers(3, temperature=0.0)
    assert answers(3, top_k=1) == cold
    assert answers(3, top_p=1e-6) == cold


def test_sampled_tokens_follow_the_models_probabilities(toy: LoadedTarget, cache: Path) -> None:
    count, row = 3000, [1, 2, 3]
    with torch.no_grad():
        expected = (toy.model(torch.tensor([row])).logits[0, -1] / 0.5).softmax(-1)
    seen = torch.zeros(272)
    tokenizer = load_tokenizer(TOY_REF, cache)
    ids: list[int] = []
    generate = toy.model.generate
    from unittest.mock import patch

    def recorded(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = generate(*args, **kwargs)
        ids.extend(out[:, -1].tolist())
        return out

    with patch.object(toy.model, "generate", recorded):
        generate_answers(
            toy,
            tokenizer,
            arrays([row] * count),
            stops=(258,),
            max_new_tokens=1,
            sampling=Sampling(0.5),
            seeds=range(count),
        )
    for token in ids:
        seen[token] += 1
    # Total variation distance between 3,000 draws and a distribution concentrated on a few tokens.
    assert float((seen / count - expected).abs().sum() / 2) < 0.08


def test_a_generated_batch_carries_rows_counts_and_reasons(tmp_path: Path, cache: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}], "id": i} for i in range(2)]
    generator = stage()
    generator.open(context(tmp_path, cache))
    out = generator.generate(batch_of(random_rows([9, 4]), kept=rows))
    assert out.rows == tuple(rows)
    answers = [answer for (answer,) in out.answers]
    assert len(answers) == 2 and all(1 <= answer.tokens <= 12 for answer in answers)
    summary = generator.summary()
    assert (summary["responses"], summary["response_tokens"]) == (2, sum(answer.tokens for answer in answers))
    assert summary["responses_cut"] == [answer.finish_reason for answer in answers].count("length")
    with pytest.raises(DataInvalid, match="does not give the rows"):
        generator.generate(batch_of([[1, 2]]))
    generator.close()


def rendered(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    return ids


def test_later_turns_are_rendered_with_the_answers_and_draw_anew(tmp_path: Path, cache: Path) -> None:
    tokenizer = load_tokenizer(TOY_REF, cache)
    users = [{"role": "user", "content": text} for text in "abc"]
    generator = stage(temperature=1.0)
    generator.open(context(tmp_path, cache))
    asked: list[tuple[list[list[int]], list[int]]] = []

    def answers(prompts: Any, seeds: list[int]) -> list[Answer]:
        asked.append(([prompt.tolist() for prompt in prompts], seeds))
        return [Answer(f"answer {len(asked)}", 2) for _ in prompts]

    generator._answers = answers  # type: ignore[assignment, method-assign]
    first = rendered(tokenizer, users[:1])
    batch = batch_of([first, first], kept=[{"messages": users}, {"messages": users[:1]}])
    long, short = generator.generate(batch).answers
    assert ([answer.text for answer in long], len(short)) == (["answer 1", "answer 2", "answer 3"], 1)
    assert asked[0][0] == [first, first]
    said: list[dict[str, str]] = []
    for turn, ((prompt, *_), _) in enumerate(asked):
        said.append(users[turn])
        assert prompt == rendered(tokenizer, said)
        said.append({"role": "assistant", "content": f"answer {turn + 1}"})
    assert len({seed for _, seeds in asked for seed in seeds}) == 4
    generator.close()


def test_a_turn_that_no_longer_fits_the_model_ends_its_conversation_by_name(tmp_path: Path, cache: Path) -> None:
    tokenizer = load_tokenizer(TOY_REF, cache)
    users = [{"role": "user", "content": "a"}, {"role": "user", "content": "b" * 5000}]
    generator = stage(max_new_tokens=4)
    generator.open(context(tmp_path, cache))
    plain = generator._answers
    generator._answers = lambda prompts, seeds: [  # type: ignore[method-assign]
        replace(answer, text="x", finish_reason="stop") if not answer.rejected else answer
        for answer in plain(prompts, seeds)
    ]
    first = rendered(tokenizer, users[:1])
    ((good, refused),) = generator.generate(batch_of([first], kept=[{"messages": users}])).answers
    assert good.text == "x"
    assert (refused.rejected, refused.tokens) == ("longer than max_length", 0) and "tokens" in refused.detail
    assert generator.summary()["responses"] == 1
    generator.close()


def test_too_long_for_the_model_is_an_error(cache: Path, toy: LoadedTarget) -> None:
    with pytest.raises(ModelInvalid, match="exceed the 4096 positions"):
        generate_answers(
            toy,
            load_tokenizer(TOY_REF, cache),
            arrays([[1] * 10]),
            stops=(258,),
            max_new_tokens=4090,
            sampling=Sampling(),
            seeds=[0],
        )


def test_end_tokens_come_from_model_and_tokenizer(
    cache: Path, toy: LoadedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(TOY_REF, cache)
    assert stop_ids(toy, tokenizer) == (258,)
    monkeypatch.setattr(toy.model.generation_config, "eos_token_id", [259, 258])
    assert stop_ids(toy, tokenizer) == (258, 259)
    monkeypatch.setattr(toy.model.generation_config, "eos_token_id", None)
    monkeypatch.setattr(tokenizer, "_special_tokens_map", {**tokenizer._special_tokens_map, "eos_token": None})
    with pytest.raises(ModelInvalid, match="no end-of-turn token"):
        stop_ids(toy, tokenizer)


@pytest.mark.parametrize(
    ("options", "facts", "path"),
    [
        ({}, {"tokenizer": "Qwen/Qwen3-8B"}, "model"),
        ({}, {"task": "train"}, ""),
        ({"max_new_tokens": 200}, {"max_length": 4000}, "max_new_tokens"),
        ({"top_p": 0.9}, {}, "top_p"),
        ({"seed": 3}, {}, "seed"),
        ({"model": "NoSuchModel"}, {}, "model"),
        ({"device": "cuda:0", "replicas": 2}, {}, "device"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], facts: dict[str, Any], path: str) -> None:
    found, _ = problems(stage(**options), **facts)
    assert [place for place, _ in found] == [path]


def test_prompts_of_the_same_model_pass() -> None:
    found, facts = problems(stage(temperature=0.7, top_p=0.9), tokenizer="toy:{}", task="generate", max_length=512)
    assert found == []
    assert facts["max_new_tokens"] == 12
