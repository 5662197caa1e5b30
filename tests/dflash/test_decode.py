"""Greedy speculative decoding: lossless, batched, and refusal of targets that cannot be rolled back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from flowdflash.dflash.decode import finish, greedy, plain_rounds, speculative_decode, speculative_rounds
from flowdflash.dflash.model import DFlashDraft
from flowdflash.dflash.rounds import SpeculativeBatch
from flowdflash.dflash.slots import TargetView
from flowdflash.errors import ModelInvalid

Make = Callable[..., Any]
# A vocabulary of six tokens: random drafts are right often enough for every acceptance length to occur.
TINY = {"vocab_size": 6}


def tiny_draft(make_draft: Make, seed: int = 0, **changes: Any) -> DFlashDraft:
    return make_draft(seed, 8.0, vocab_size=6, mask_token_id=5, **changes).double()


def prompts_of(lengths: tuple[int, ...], seed: int, vocabulary: int = 5) -> list[list[int]]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (n,), generator=rng).tolist() for n in lengths]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("seed", "stop_ids"), [(0, ()), (1, (2,)), (2, (1, 3))])
def test_i1_the_tokens_are_plain_greedy_tokens(make_target: Make, make_draft: Make, seed: int, stop_ids: Any) -> None:
    target, draft = make_target(seed, **TINY), tiny_draft(make_draft, seed)
    prompts = prompts_of((1, 7, 3, 1, 12), seed)
    for max_new_tokens in (1, 2, 3, 4, 5, 21):
        wanted = greedy(target, prompts, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
        for batch_size in (2, 16) if max_new_tokens > 5 else (16,):
            results = speculative_decode(
                target, draft, prompts, max_new_tokens=max_new_tokens, stop_ids=stop_ids, batch_size=batch_size
            )
            assert [r.tokens for r in results] == wanted
            for result in results:
                assert sum(result.produced) == len(result.tokens) - 1
                assert all(a <= p for a, p in zip(result.accepted, result.proposed, strict=True))
                assert result.finish_reason == ("stop" if result.tokens[-1] in stop_ids else "length")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "options", [{"family": "qwen3"}, {"tied": True}, {"attention": "eager"}, {"family": "qwen3", "attention": "eager"}]
)
def test_i1_holds_for_other_targets(make_target: Make, make_draft: Make, options: dict[str, Any]) -> None:
    # In fp32: with padding and eager attention, the reference itself gives NaN in fp64.
    target, draft = make_target(3, **TINY, **options).float(), tiny_draft(make_draft, 3).float()
    prompts = prompts_of((4, 1, 9), 3)
    results = speculative_decode(target, draft, prompts, max_new_tokens=16)
    assert [r.tokens for r in results] == greedy(target, prompts, max_new_tokens=16)


@pytest.mark.timeout(60)
def test_w9_a_mask_token_that_the_target_generates_stays_in_the_output(make_target: Make, make_draft: Make) -> None:
    target, prompts = make_target(0, **TINY), prompts_of((4, 9, 1), 0)
    wanted = greedy(target, prompts, max_new_tokens=16)
    for mask in {token for tokens in wanted for token in tokens}:
        draft = tiny_draft(make_draft).requires_grad_(False)
        draft.config = replace(draft.config, mask_token_id=mask)
        results = speculative_decode(target, draft, prompts, max_new_tokens=16)
        assert [r.tokens for r in results] == wanted, f"mask token {mask}"
        assert all(sum(r.produced) == 15 for r in results)


@pytest.mark.timeout(60)
def test_a_batch_gives_each_row_what_it_gets_alone(make_target: Make, make_draft: Make) -> None:
    target, draft = make_target(1, **TINY), tiny_draft(make_draft, 1)
    prompts = prompts_of((2, 30, 5, 1, 11, 8), 1)
    together = speculative_decode(target, draft, prompts, max_new_tokens=24, stop_ids=(4,))
    alone = [speculative_decode(target, draft, [p], max_new_tokens=24, stop_ids=(4,))[0] for p in prompts]
    assert together == alone
    assert len({r.produced for r in together}) > 2, "all rows accept alike: the test shows nothing"


def test_block_size_one_is_plain_decoding(make_target: Make, make_draft: Make) -> None:
    target, draft = make_target(0, **TINY), tiny_draft(make_draft)
    (result,) = speculative_decode(target, draft, [[1, 2]], max_new_tokens=9, block_size=1)
    assert result.produced == (1,) * 8 and result.proposed == (0,) * 8
    assert (result.tokens,) == tuple(greedy(target, [[1, 2]], max_new_tokens=9))


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 4, 5, 9, 13])
def test_i2_a_perfect_draft_fills_every_block_and_the_last_is_not_over_counted(
    make_target: Make, make_draft: Make, monkeypatch: pytest.MonkeyPatch, max_new_tokens: int
) -> None:
    target, draft = make_target(2, **TINY), tiny_draft(make_draft)
    prompt = [1, 0, 3]
    (wanted,) = greedy(target, [prompt], max_new_tokens=20)
    known = torch.tensor(prompt + list(wanted) + [0] * 20)
    monkeypatch.setattr(
        SpeculativeBatch,
        "_propose",
        lambda self, sizes, width, reach, positions: torch.nn.functional.one_hot(known[positions[:, 1:]], 6),
    )
    (result,) = speculative_decode(target, draft, [prompt], max_new_tokens=max_new_tokens)
    assert result.tokens == wanted[:max_new_tokens]
    left, full = max_new_tokens - 1, []
    while left:
        full.append(min(4, left))
        left -= full[-1]
    assert list(result.produced) == full


def test_a_token_that_equals_the_mask_token_is_kept(make_target: Make, make_draft: Make) -> None:
    target, draft = make_target(0, **TINY), tiny_draft(make_draft)
    with torch.no_grad():
        target.lm_head.weight.zero_()
        target.lm_head.weight[5] = target.model.norm.weight
    (result,) = speculative_decode(target, draft, [[1, 2]], max_new_tokens=6)
    assert (result.tokens,) == tuple(greedy(target, [[1, 2]], max_new_tokens=6))


@pytest.mark.parametrize("layers", [(0, 2), (1,), (2,)])
def test_l5_l6_features_are_the_outputs_of_the_layers_named(make_target: Make, layers: tuple[int, ...]) -> None:
    target = make_target()
    view, ids = TargetView(target, layers), torch.tensor([[5, 6, 7, 8]])
    _, features = view.forward(ids, torch.arange(4)[None], view.new_cache(4), 4, only=torch.tensor([3]))
    assert not any(block._forward_hooks for block in target.model.layers)
    states = target.model(ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(features, torch.cat([states[layer + 1] for layer in layers], dim=-1))


def test_the_cache_of_slots_equals_a_fresh_forward_whatever_was_there_before(make_target: Make) -> None:
    """Ragged rows, rejected tokens in the cache, then other tokens in their place."""
    target = make_target()
    view, rng = TargetView(target, (0, 2)), torch.Generator().manual_seed(0)
    ids = torch.randint(0, 272, (2, 12), generator=rng)
    cache = view.new_cache(20)
    view.forward(ids[:, :6], torch.arange(6).expand(2, -1), cache, 6)
    starts = torch.tensor([6, 3])
    positions = starts[:, None] + torch.arange(4)
    view.forward(torch.randint(0, 272, (2, 4), generator=rng), positions, cache, 10)
    tokens = torch.stack([ids[0, 6:10], ids[1, 3:7]])
    logits, features = view.forward(tokens, positions, cache, 10)
    one, _ = view.forward(tokens, positions, cache, 10, only=torch.tensor([2, 0]))
    torch.testing.assert_close(one[:, 0], torch.stack([logits[0, 2], logits[1, 0]]))
    for row, start in enumerate((6, 3)):
        out = target(ids[row : row + 1, : start + 4], output_hidden_states=True)
        torch.testing.assert_close(logits[row], out.logits[0, start:])
        torch.testing.assert_close(features[row, :, :32], out.hidden_states[1][0, start:])


def test_the_target_is_left_as_it_was(make_target: Make, make_draft: Make) -> None:
    target = make_target(0, **TINY)
    before = {k: v.clone() for k, v in target.state_dict().items()}
    speculative_decode(target, tiny_draft(make_draft), [[1, 2, 3]], max_new_tokens=8)
    assert all(torch.equal(v, before[k]) for k, v in target.state_dict().items())
    assert not target.training and not any(p.requires_grad for p in target.parameters())


@pytest.mark.timeout(60)
def test_two_threads_may_decode_with_one_target(make_target: Make, make_draft: Make) -> None:
    target, draft = make_target(1, **TINY), tiny_draft(make_draft, 1)
    batches = [prompts_of((3, 5), 1), prompts_of((2, 9, 4), 2)]
    wanted = [speculative_decode(target, draft, prompts, max_new_tokens=20) for prompts in batches]
    found: list[Any] = [None, None]

    def work(i: int) -> None:
        found[i] = [speculative_decode(target, draft, batches[i], max_new_tokens=20) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert found == [[wanted[0]] * 3, [wanted[1]] * 3]


def test_i3_a_sliding_window_target_is_refused(make_draft: Make) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=272, sliding_window=8,
    )  # fmt: skip
    with pytest.raises(ModelInvalid, match="cannot be rolled back"):
        speculative_decode(MistralForCausalLM(config), make_draft(), [[1]], max_new_tokens=2)


def test_i3_a_recurrent_target_is_refused(make_draft: Make) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(hidden_size=32, num_hidden_layers=4, vocab_size=272, state_size=4)
    with pytest.raises(ModelInvalid, match=r"cannot be"):
        speculative_decode(MambaForCausalLM(config), make_draft(), [[1]], max_new_tokens=2)


def test_a_target_of_another_shape_and_bad_requests_are_refused(make_target: Make, make_draft: Make) -> None:
    target, draft = make_target(), make_draft()
    with pytest.raises(ModelInvalid, match="this target has 4"):
        speculative_decode(target, make_draft(num_target_layers=5), [[1]], max_new_tokens=2)
    with pytest.raises(ModelInvalid, match="attn_implementation='sdpa'"):
        target.config._attn_implementation = "flex_attention"
        speculative_decode(target, draft, [[1]], max_new_tokens=2)
    target.config._attn_implementation = "sdpa"
    for decode in (
        lambda p: speculative_decode(target, draft, p, max_new_tokens=2),
        lambda p: greedy(target, p, max_new_tokens=2),
    ):
        with pytest.raises(ValueError, match="prompt 1 is empty"):
            decode([[1], []])
    for bad in ({"max_new_tokens": 0}, {"max_new_tokens": 1, "block_size": 0}, {"max_new_tokens": 1, "batch_size": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            speculative_decode(target, draft, [[1]], **bad)
    assert speculative_decode(target, draft, [], max_new_tokens=3) == []


@pytest.mark.parametrize("stop_ids", [(), (3,), (0, 2)])
def test_plain_decoding_is_what_the_targets_own_generate_gives(make_target: Make, stop_ids: tuple[int, ...]) -> None:
    target = make_target(0, **TINY)
    prompts = prompts_of((4, 9, 1, 4), 0)
    found = greedy(target, prompts, max_new_tokens=12, stop_ids=stop_ids, batch_size=3)
    for prompt, tokens in zip(prompts, found, strict=True):
        out = target.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=list(stop_ids) or [99],
            pad_token_id=0,
        )
        assert tokens == tuple(out[0, len(prompt) :].tolist())
    assert len({len(tokens) for tokens in found}) > 1 or not stop_ids, "no row ends before another"


def test_plain_decoding_ignores_the_targets_own_generation_settings(make_target: Make) -> None:
    target = make_target(0, **TINY)
    prompts = prompts_of((4, 9, 1), 0)
    wanted = greedy(target, prompts, max_new_tokens=12)
    target.generation_config.eos_token_id = wanted[0][0]
    target.generation_config.repetition_penalty = 5.0
    assert greedy(target, prompts, max_new_tokens=12) == wanted


def test_between_rounds_a_caller_may_do_other_work_with_gradients(make_target: Make, make_draft: Make) -> None:
    target, draft, prompts = make_target(0, **TINY), tiny_draft(make_draft), prompts_of((4, 9, 1), 0)
    for rounds in (
        speculative_rounds(target, draft, prompts, max_new_tokens=9, batch_size=2),
        plain_rounds(target, prompts, max_new_tokens=9, batch_size=2),
    ):
        seen = []

        def told(done: int, seen: list[int] = seen) -> None:
            assert not torch.is_inference_mode_enabled()
            seen.append(done)

        finish(rounds, told)
        assert seen == sorted(seen) and seen[0] == 0 and seen[-1] == 3 and len(seen) > 6


def test_a_head_whose_logits_are_capped_by_the_model_is_decoded_by_those(make_target: Make, make_draft: Make) -> None:
    target = make_target(0, **TINY)
    view, ids, real = TargetView(target, (0,)), torch.tensor([[1, 2, 3]]), target.forward

    def capped(*arguments: Any, **options: Any) -> Any:
        out = real(*arguments, **options)
        out.logits = 3.0 * torch.tanh(out.logits / 3.0)
        return out

    target.forward = capped
    logits, _ = view.forward(ids, torch.arange(3)[None], view.new_cache(3), 3)
    assert float(logits.abs().max()) <= 3.0
    torch.testing.assert_close(logits, capped(input_ids=ids).logits)
