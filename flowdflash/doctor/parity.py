"""Does the code train and serve the same draft? A block may not see its future, and both ways give the same logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import torch
from torch import Tensor, nn

from flowdflash.dflash.mask import Backend, draft_mask
from flowdflash.dflash.training import training_step_inputs
from flowdflash.doctor.finding import Finding, fault
from flowdflash.doctor.patient import Patient

TOLERANCE = 1e-4
"""Of logits in fp32, relative to the largest, or absolute where that is below 1."""

BROKEN = "do not train with this installation: its code is at fault, not the checkpoint; reinstall it, and report this"


def _features(p: Patient, ids: Tensor) -> Tensor:
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    return p.view.forward(ids, positions, p.view.new_cache(ids.shape[1]), ids.shape[1], only=positions[:, -1])[1]


def _trained(p: Patient, ids: Tensor, features: Tensor, anchors: list[int], backend: Backend = "sdpa") -> Tensor:
    """``[A, B, V]`` logits of a training forward."""
    at = torch.tensor([anchors], device=ids.device)
    block_ids, positions, mask = training_step_inputs(p.config, ids, at, torch.ones_like(at).bool(), backend=backend)
    states = p.draft(nn.functional.embedding(block_ids, p.view.embedding), features, positions, mask)
    return p.view.draft_logits(states.view(len(anchors), p.config.block_size, -1))


def _served(p: Patient, ids: Tensor, anchor: int) -> Tensor:
    """``[B, V]`` logits of a decoding step: the states of what stands before the anchor come in two pieces."""
    size, draft, cache = p.config.block_size, p.draft, p.draft.new_cache(1, anchor)
    states = p.view.new_cache(anchor)
    for at in (slice(0, anchor // 2), slice(anchor // 2, anchor)):
        positions = torch.arange(at.start, at.stop, device=ids.device)[None]
        if positions.numel():
            features = p.view.forward(ids[:, at], positions, states, at.stop, only=positions[:, -1] - at.start)[1]
            draft.extend(cache, features, positions)
    block = torch.full((1, size), p.config.mask_token_id, device=ids.device)
    block[0, 0] = ids[0, anchor]
    start = torch.tensor([anchor], device=ids.device)
    mask = draft_mask(start, torch.full_like(start, size), context=anchor, slots=size)
    places = anchor + torch.arange(size, device=ids.device)[None]
    return p.view.draft_logits(
        draft.propose(nn.functional.embedding(block, p.view.embedding), cache, places, mask, anchor)
    )[0]


@torch.inference_mode()
def leak(p: Patient) -> Iterator[Finding]:
    """Tokens and states from the anchor on, and other blocks, change no logit; the state before it changes them."""
    row = p.answered[0]
    ids, _, _ = row.tensors(p.target.device)
    anchor, features = row.start, _features(p, ids)
    later, noise = ids.clone(), torch.randn(features.shape, generator=torch.Generator().manual_seed(0))
    later[0, anchor + 1 :] = (later[0, anchor + 1 :] + 1) % p.config.vocab_size
    unseen, seen = features.clone(), features.clone()
    unseen[:, anchor:] += noise[:, anchor:].to(features)
    seen[:, anchor - 1] += noise[:, anchor - 1].to(features)
    usable = [b for b in get_args(Backend) if b != "flex" or p.target.device.type == "cuda"]
    for backend in usable:
        alone = _trained(p, ids, features, [anchor], backend)
        changed = _trained(p, later, unseen, [anchor], backend)
        crowded = _trained(p, ids, features, [anchor - 1, anchor], backend)[1:]
        if not torch.allclose(changed, alone, rtol=0, atol=TOLERANCE * _scale(alone)):
            text = f"with attention {backend} a block sees tokens or states at or after its anchor (pitfall L1)"
            yield fault("leak", text, BROKEN)
        elif not torch.allclose(crowded, alone, rtol=0, atol=TOLERANCE * _scale(alone)):
            yield fault("leak", f"with attention {backend} a block sees its neighbours (pitfall L2)", BROKEN)
        elif torch.equal(_trained(p, ids, seen, [anchor], backend), alone):
            yield fault("context", f"with attention {backend} a block does not see the state before its anchor", BROKEN)
        else:
            yield Finding("leak", "ok", f"with attention {backend} a block sees all before its anchor, nothing after")


def _scale(logits: Tensor) -> float:
    return max(float(logits.abs().max()), 1.0)


@torch.inference_mode()
def parity(p: Patient) -> Iterator[Finding]:
    """Logits of the training forward with one anchor against those of a decoding step there (pitfall L8)."""
    worst, count = 0.0, 0
    for row in p.answered:
        ids, _, _ = row.tensors(p.target.device)
        features = _features(p, ids)
        for anchor in {row.start, (row.start + len(row.ids)) // 2}:
            trained, served = _trained(p, ids, features, [anchor])[0, 1:], _served(p, ids, anchor)[1:]
            worst, count = max(worst, float((trained - served).abs().max()) / _scale(trained)), count + 1
    if not worst <= TOLERANCE:
        text = f"training and decoding give logits that differ by {worst:.2g} of the largest, allowed is {TOLERANCE:g}"
        yield fault("parity", text, BROKEN)
    else:
        yield Finding(
            "parity", "ok", f"logits of training and of decoding are equal within {worst:.1g} ({count} blocks)"
        )
