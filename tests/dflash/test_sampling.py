"""Sampled decoding: the distribution that options ask for, with a draft and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from flowdflash.dflash.acceptance import summarise
from flowdflash.dflash.decode import finish, plain_rounds, speculative_decode
from flowdflash.dflash.sampling import GREEDY, Sampling, draw, probabilities, verify

Make = Callable[..., Any]
TOKENS = 4
SAMPLINGS = (Sampling(1.0), Sampling(0.6, top_k=3), Sampling(1.3, top_p=0.8), Sampling(1.5, top_p=0.9, top_k=3))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_distribution_is_that_of_transformers(sampling: Sampling) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(50, 20, generator=torch.Generator().manual_seed(0)) * 3
    scores: Any = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    torch.testing.assert_close(probabilities(logits, sampling), scores.softmax(dim=-1))


def test_the_most_likely_token_always_stays_and_options_that_leave_all_in_change_nothing() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    assert probabilities(logits, Sampling(1.0, top_p=0.01)).tolist() == [[0.0, 1.0, 0.0]]
    assert torch.equal(probabilities(logits, Sampling(1.0, top_k=3)), logits.softmax(dim=-1))
    assert torch.equal(probabilities(logits, Sampling(1.0, top_k=99)), logits.softmax(dim=-1))


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}])
def test_impossible_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be at least 0"):
        Sampling(**wrong)


def test_a_draw_takes_each_token_by_its_weight_and_never_one_without() -> None:
    weights = torch.tensor([0.0, 2.0, 0.0, 1.0, 1.0, 0.0])
    grid = (torch.arange(8, dtype=torch.float64) + 0.5) / 8
    assert draw(weights.expand(8, -1), grid).tolist() == [1, 1, 1, 1, 3, 3, 4, 4]
    edges = torch.tensor([0.0, 0.5, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert draw(weights.expand(4, -1), edges).tolist() == [1, 3, 4, 4]


def test_the_rule_of_acceptance_gives_exactly_the_targets_distribution() -> None:
    """All outcomes of two drafts over three tokens, enumerated: every probability is a multiple of 1/8."""
    q = torch.tensor([[4, 2, 2], [2, 4, 2]], dtype=torch.float64) / 8
    first = torch.tensor([2, 3, 3], dtype=torch.float64) / 8
    second = torch.tensor([[4, 2, 2], [2, 4, 2], [1, 6, 1]], dtype=torch.float64) / 8  # given the first token
    third = torch.tensor([[1, 1, 6], [0, 4, 4], [8, 0, 0]], dtype=torch.float64) / 8  # given the second
    grid = (torch.arange(8, dtype=torch.float64) + 0.5) / 8
    uniform = torch.cartesian_prod(*[grid] * 5)
    drafts = torch.stack([draw(q[k].expand(len(uniform), -1), uniform[:, k]) for k in (0, 1)], dim=1)
    p = torch.stack([first.expand(len(uniform), -1), second[drafts[:, 0]], third[drafts[:, 1]]], dim=1)
    accepted, last = verify(p, q.expand(len(uniform), -1, -1), drafts, torch.full([len(uniform)], 2), uniform[:, 2:])
    one = torch.where(accepted > 0, drafts[:, 0], last)
    two = torch.where(accepted > 1, drafts[:, 1], last)
    assert torch.equal(share(one), first)
    overlap = [float(torch.minimum(first, q[0]).sum())]
    assert float((accepted > 0).double().mean()) == overlap[0], "accepted with probability 1 - TV(p, q)"
    for token in range(3):
        here = (accepted > 0) & (one == token)
        assert torch.equal(share(two[here]), second[token])
        there = (accepted > 1) & (two == token)
        assert torch.equal(share(last[there]), third[token])
    assert set(accepted.tolist()) == {0, 1, 2}


def share(tokens: Tensor) -> Tensor:
    return torch.bincount(tokens, minlength=3).double() / len(tokens)


def test_drafts_that_were_not_proposed_are_neither_accepted_nor_refused() -> None:
    p = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]]).expand(3, -1, -1)
    q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]).expand(3, -1, -1)
    uniform = torch.full((3, 3), 0.5, dtype=torch.float64)
    accepted, last = verify(p, q, torch.tensor([[0, 1]] * 3), torch.tensor([0, 1, 2]), uniform)
    assert accepted.tolist() == [0, 1, 2] and last.tolist() == [0, 1, 0]
    alone, token = verify(p[:, :1], q[:, :0], torch.zeros(3, 0).long(), torch.zeros(3).long(), uniform[:, :1])
    assert alone.tolist() == [0, 0, 0] and token.tolist() == [0, 0, 0]


def exact(target: Any, prompt: Sequence[int], length: int, sampling: Sampling) -> Tensor:
    """Probability of every continuation of some tokens, by the target's own forward."""
    texts = torch.tensor([[*prompt, *text] for text in product(range(TOKENS), repeat=length)])
    p = probabilities(target(texts).logits[:, len(prompt) - 1 : -1], sampling)
    return p.gather(-1, texts[:, len(prompt) :, None])[..., 0].prod(dim=1)


def chi_square(found: Sequence[Sequence[int]], wanted: Tensor) -> tuple[float, int]:
    """The statistic and its degrees of freedom; texts that are expected fewer than five times count as one."""
    length = len(found[0])
    places = torch.tensor([sum(t * TOKENS ** (length - 1 - i) for i, t in enumerate(text)) for text in found])
    counts = torch.bincount(places, minlength=len(wanted)).double()
    expected = wanted * len(found)
    assert not counts[wanted == 0].any(), "a text that has no probability"
    often = expected >= 5
    rest = expected[~often].sum()
    cells = (counts[often] - expected[often]).square() / expected[often]
    if rest > 0:
        cells = torch.cat([cells, ((counts[~often].sum() - rest).square() / rest)[None]])
    return float(cells.sum()), len(cells) - 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[3]])
def test_sampled_texts_are_distributed_as_the_target_says(
    make_target: Make, make_draft: Make, sampling: Sampling
) -> None:
    """Three thousand texts of three tokens, drafted in blocks of three; the seeds are fixed."""
    target = make_target(3, vocab_size=TOKENS)
    draft = make_draft(3, 4.0, vocab_size=TOKENS, mask_token_id=3, block_size=3).double()
    prompt, many = [1, 2], 3000
    wanted = exact(target, prompt, 3, sampling)
    assert float(wanted.sum()) == pytest.approx(1.0)
    options: dict[str, Any] = {"max_new_tokens": 3, "batch_size": many, "sampling": sampling}
    drafted = speculative_decode(target, draft, [prompt] * many, **options)
    plain = finish(plain_rounds(target, [prompt] * many, **options))
    for texts in ([r.tokens for r in drafted], plain):
        statistic, freedom = chi_square(texts, wanted)
        # Mean and standard deviation of a chi-square are its degrees of freedom n and the root of 2n.
        assert statistic < freedom + 4 * (2 * freedom) ** 0.5, (statistic, freedom)
    figures = summarise(drafted, 3)
    assert min(figures.histogram[:2]) > 50, "drafts must be accepted and refused"


def test_the_statistic_finds_a_distribution_that_is_another(make_target: Make) -> None:
    target, prompt, many = make_target(3, vocab_size=TOKENS), [1, 2], 3000
    sampled = finish(plain_rounds(target, [prompt] * many, max_new_tokens=3, batch_size=many, sampling=Sampling(1.2)))
    statistic, freedom = chi_square(sampled, exact(target, prompt, 3, Sampling(1.0)))
    assert statistic > freedom + 8 * (2 * freedom) ** 0.5


def test_a_prompt_gets_the_same_tokens_whatever_its_batch_mates_are(make_target: Make, make_draft: Make) -> None:
    target, draft = make_target(1, vocab_size=6), make_draft(1, 8.0, vocab_size=6, mask_token_id=5).double()
    prompts = [[1, 2], [3] * 7, [0, 4, 2], [1, 2], [5]]
    sampling = Sampling(1.0, top_k=5, seed=3)
    options: dict[str, Any] = {"max_new_tokens": 21, "stop_ids": (4,), "sampling": sampling}
    together, alone = (speculative_decode(target, draft, prompts, batch_size=b, **options) for b in (5, 1))
    assert together == alone
    assert len({len(r.tokens) for r in together}) > 1 and together[0].tokens != together[3].tokens
    assert all(sum(r.produced) == len(r.tokens) - 1 and not set(r.tokens[:-1]) & {4} for r in together)
    plain = [finish(plain_rounds(target, prompts, batch_size=b, **options)) for b in (5, 1)]
    assert plain[0] == plain[1]
    other = speculative_decode(target, draft, prompts, **{**options, "sampling": Sampling(1.0, top_k=5, seed=4)})
    assert [r.tokens for r in other] != [r.tokens for r in together]


def test_the_draft_is_bounded_as_its_target_is(make_target: Make, make_draft: Make) -> None:
    """With logits that are bounded to nearly nothing it proposes all tokens alike."""
    target, many = make_target(1, vocab_size=6), [[1, 2]] * 200
    found = []
    for cap in (None, 1e-9):
        draft = make_draft(1, 8.0, vocab_size=6, mask_token_id=5, final_logit_softcapping=cap).double()
        results = speculative_decode(
            target, draft, many, max_new_tokens=2, batch_size=200, block_size=2, sampling=Sampling(1.0)
        )
        found.append(sum(r.accepted[0] for r in results) / 200)
    first = probabilities(target(torch.tensor([[1, 2]])).logits[0, -1], Sampling(1.0))
    texts = torch.tensor([[1, 2, token] for token in range(6)])
    second = probabilities(target(texts).logits[:, -1], Sampling(1.0))
    alike = float((first * torch.minimum(second, torch.tensor(1 / 6)).sum(dim=-1)).sum())
    assert found[1] == pytest.approx(alike, abs=0.15) and abs(found[0] - alike) > 0.2


def test_a_temperature_near_zero_is_greedy(make_target: Make, make_draft: Make) -> None:
    target, draft = make_target(1, vocab_size=6), make_draft(1, 8.0, vocab_size=6, mask_token_id=5).double()
    prompts = [[1, 2], [3] * 7]
    cold, greedy = (
        speculative_decode(target, draft, prompts, max_new_tokens=20, sampling=sampling)
        for sampling in (Sampling(1e-6), GREEDY)
    )
    assert cold == greedy
