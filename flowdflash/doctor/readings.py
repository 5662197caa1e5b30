"""Would the same weights fit better if they were read in another way? Then that is how they were trained.

Each reading takes one thing otherwise than the config says: other layers, another order of features, another mask
token, another base of the positions, a mask or labels as of a known mistake. A draft that fits its own reading badly
and another one well was trained by that other one, whatever its config says; only the weights are needed to tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from flowdflash.doctor.finding import Finding, fault
from flowdflash.doctor.fitting import Fit, Reading
from flowdflash.doctor.patient import Patient

THETAS = (1e4, 1e5, 5e5, 1e6)
SURE, BETTER, LEARNT = 4.0, 0.95, 0.15
"""Another reading has to fit better by four standard errors and by a twentieth, and to get this share of first slots
right: on weights that have learnt nothing all readings are alike."""

RETRAIN = "train again with flowdflash of this version: weights trained so cannot be served"

Suspicion = tuple[str, str, str, Reading]
"""Name of the fault if the reading is right, what training did then, what to do then, and the reading."""


def suspicions(p: Patient) -> Iterator[Suspicion]:
    """What is known to go wrong."""
    yield from _other_features(p)
    yield from _other_config(p)
    plain = Reading(p.config, p.config.target_layer_ids)
    yield "leak", "the state at the anchor in sight (pitfall L1)", RETRAIN, replace(plain, reach=1)
    ahead = replace(plain, reach=p.config.block_size)
    yield "leak", "the states of the drafted tokens themselves in sight (pitfall L1)", RETRAIN, ahead
    crowded = replace(plain, visible=_blocks_see_each_other)
    yield "leak", "blocks that saw each other (pitfall L2)", RETRAIN, crowded
    causal = replace(plain, visible=_causal_blocks)
    yield "causal blocks", "slots that saw only the slots before them (pitfall L3)", RETRAIN, causal
    for shift, side in ((-1, "earlier"), (1, "later")):
        yield "labels", f"labels from one place {side} (pitfall L4)", RETRAIN, replace(plain, shift=shift)


def _other_features(p: Patient) -> Iterator[Suspicion]:
    layers, plain = p.config.target_layer_ids, Reading(p.config, p.config.target_layer_ids)
    for step in (-1, 1):
        moved = tuple(layer + step for layer in layers)
        if moved[0] >= 0 and moved[-1] < p.config.num_target_layers:
            advice = "let target_layer_ids in config.json name these layers (pitfall L5)"
            yield "target_layer_ids", f"the states of layers {list(moved)}", advice, replace(plain, layers=moved)
    orders = {layers[::-1]: None} if len(layers) > 1 else {}
    for i, j in combinations(range(len(layers)), 2):
        order = list(layers)
        order[i], order[j] = order[j], order[i]
        orders[tuple(order)] = None
    for swapped in orders:
        text = f"features in the order of layers {list(swapped)}"
        yield "feature order", text, "reorder the columns of fc.weight accordingly", replace(plain, layers=swapped)


def _other_config(p: Patient) -> Iterator[Suspicion]:
    layers = p.config.target_layer_ids
    for mask in sorted(_mask_candidates(p)):
        other = Reading(replace(p.config, mask_token_id=mask), layers)
        yield "mask_token_id", f"mask token {mask}", f"write mask_token_id {mask} into config.json (pitfall W3)", other
    for theta in sorted({*THETAS, float(p.facts.get("rope_theta", THETAS[0]))} - {p.config.rope_theta}):
        advice = f"write rope_theta {theta:g} into config.json, in both spellings (pitfall W5)"
        yield "rope_theta", f"rope_theta {theta:g}", advice, Reading(replace(p.config, rope_theta=theta), layers)


def _mask_candidates(p: Patient) -> set[int]:
    """Ids that somebody may have taken for the mask token."""
    known = [p.facts.get(f"{kind}_token_id") for kind in ("mask", "bos", "eos", "pad")]
    known += [getattr(p.tokenizer, f"{kind}_token_id", None) for kind in ("mask", "unk", "pad", "eos")]
    known += [0, p.config.vocab_size - 1, len(p.tokenizer) if p.tokenizer is not None else None]
    flat = [i for ids in known for i in (ids if isinstance(ids, list | tuple) else [ids])]
    return {i for i in flat if i is not None and 0 <= i < p.config.vocab_size} - {p.config.mask_token_id}


def _blocks_see_each_other(visible: Tensor, context: int) -> Tensor:
    visible[..., context:] = True
    return visible


def _causal_blocks(visible: Tensor, context: int) -> Tensor:
    slot = torch.arange(visible.shape[2], device=visible.device)
    visible[..., context:] &= slot <= slot[:, None]
    return visible


def readings(p: Patient) -> Iterator[Finding]:
    """The best of the other readings, if it fits clearly better than what the config says."""
    if not p.known_rows:
        text = "no rows are known that the draft should be good at: examine it in its run, or name prompts (--prompts)"
        yield Finding("readings", "skipped", text)
        return
    tried = list(suspicions(p))
    best: tuple[float, Suspicion] | None = None
    for number, suspicion in enumerate(tried, 1):
        p.report.progress("readings", number, len(tried))
        fit = p.fitting.fit(suspicion[3])
        if _clearly_better(fit, p.fit) and (best is None or float(fit.loss.mean()) < best[0]):
            best = float(fit.loss.mean()), suspicion
    own = float(p.fit.loss.mean())
    if best is None:
        text = f"none of {len(tried)} other ways to read the weights fits {len(p.fit.loss)} blocks clearly better"
        yield Finding("readings", "ok", f"{text} than their config, whose loss is {own:.2f}")
        return
    loss, (name, training, advice, _) = best
    yield fault(name, f"training had {training}: the loss is {loss:.2f} so, and {own:.2f} as the config says", advice)


def _clearly_better(fit: Fit, own: Fit) -> bool:
    gain = own.loss - fit.loss
    sure = float(gain.mean()) > SURE * float(gain.std()) / len(gain) ** 0.5
    learnt = fit.per_slot[0] >= LEARNT and int(fit.right.sum()) >= int(own.right.sum())
    return sure and learnt and float(fit.loss.mean()) < BETTER * float(own.loss.mean())
