"""Is what lies on disk whole, what was trained, and of this target?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import permutations

import torch
from torch import Tensor

from flowdflash.dflash.config import DraftConfig
from flowdflash.dflash.folder import CONFIG, read_json
from flowdflash.dflash.head import Head
from flowdflash.dflash.importing import check_borrowed
from flowdflash.doctor.finding import Finding, fault
from flowdflash.doctor.patient import Patient
from flowdflash.doctor.rows import Row, batch_of
from flowdflash.errors import ModelInvalid
from flowdflash.runtime.checkpoints import damage, saved_checkpoints
from flowdflash.target.hidden import probe_head
from flowdflash.training.build import check_head

WHY = {
    "target_layer_ids": "the draft would be fed other states than it learned from",
    "mask_token_id": "its blocks would be filled with a token that the draft has never seen",
    "rope_theta": "positions would turn at another rate than in training",
    "block_size": "blocks of another size were never trained",
    "vocab_size": "a server that shares the target's embedding and head would reject every draft",
    "num_target_layers": "it belongs to a target of another depth",
}
SHARED = {"vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_target_layers": "num_layers"}
SHARED |= {"final_logit_softcapping": "final_logit_softcapping"}
"""What a draft must have in common with its target, and the fact that says it."""

ENGINE_THETA = 1e6
"""What some servers take for a ``rope_theta`` that they do not find."""


def config(p: Patient) -> Iterator[Finding]:
    """The config against the run's pipeline, or where there is none against the target, and what servers need in it."""
    stated, trained = asdict(p.config), p.trained_as
    if trained is not None:
        wanted, source = asdict(trained), "the run's pipeline"
    else:
        wanted, source = {name: p.facts.get(fact) for name, fact in SHARED.items()}, f"the target {p.ref}"
    found = []
    for name, value in wanted.items():
        if value != stated[name]:
            why = f": {WHY[name]}" if name in WHY else ""
            text = f"{name} is {stated[name]}, {source} has {value}{why}"
            found.append(fault(name, text, f"write {value} into {p.folder / CONFIG}, or export the draft again"))
    # A value that is wrong already is not looked at again.
    found += [other for other in _needed(p) if other.name not in {finding.name for finding in found}]
    yield from found
    if not any(finding.status == "fault" for finding in found):
        yield Finding("config", "ok", f"{len(wanted)} entries are those of {source}")
    if trained is None:
        yield Finding("pipeline", "skipped", f"not compared with the pipeline: {p.no_pipeline}")


def _needed(p: Patient) -> Iterator[Finding]:
    """What servers need in a config and ours does not, and what the records of training say."""
    config, file = p.config, p.folder / CONFIG
    whole = read_json(file)
    raw = whole.get("transformer_layer_config") or whole
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        ids = p.facts.get(name)
        if config.mask_token_id in (ids if isinstance(ids, list | tuple) else [ids]):
            text = f"mask_token_id {config.mask_token_id} is the target's {name}, which servers treat specially"
            yield fault("mask_token_id", text, "train with a row of the embedding that means nothing")
            break
    slots = len(p.records[-1]["accuracy_per_slot"]) if p.records else config.block_size - 1
    if slots != config.block_size - 1:
        text = f"block_size is {config.block_size}, but training recorded {slots} slots after the anchor"
        yield fault("block_size", text, f"write {slots + 1} into {file}")
    kinds = raw.get("layer_types")
    if kinds is not None and len(kinds) != config.num_hidden_layers:
        text = f"layer_types names {len(kinds)} layers, num_hidden_layers is {config.num_hidden_layers}"
        yield fault("layer_types", text, f"write as many into {file}, all full_attention")
    flat, nested = raw.get("rope_theta"), (raw.get("rope_parameters") or {}).get("rope_theta")
    if None in (flat, nested):
        missing = "rope_theta" if flat is None else "rope_parameters.rope_theta"
        text = f"{missing} is missing, and a server that reads only that takes {ENGINE_THETA:g}"
        if config.rope_theta == ENGINE_THETA:
            yield Finding("rope_theta", "note", f"{text}, which happens to be right")
        else:
            yield fault("rope_theta", f"{text} instead of {config.rope_theta:g}", f"write both spellings into {file}")


def tensors(p: Patient) -> Iterator[Finding]:
    """Names, shapes and values of the tensors; those of a checkpoint's export against those that training saved."""
    served, saved = p.tensors, p.imported.tensors
    wrong = [
        f"{name} {how}" for name, tensor in served.items() if (how := _difference(p.config, name, tensor, saved[name]))
    ]
    if wrong:
        text = f"the exported weights are not the trained ones: {'; '.join(wrong[:4])}"
        more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        name = "feature order" if "features in the order" in text else "weights"
        yield fault(name, text + more, "export the checkpoint again (flowdflash export)")
        return
    same = ", equal to the trained ones in that precision" if p.checkpoint else ""
    dtype = str(next(iter(served.values())).dtype).removeprefix("torch.")
    yield Finding("tensors", "ok", f"{len(served)} tensors in {dtype}, all there and finite{same}")


def _difference(config: DraftConfig, name: str, served: Tensor, saved: Tensor) -> str:
    """How an exported tensor differs from the trained one; empty if it does not."""
    trained = saved.to(served.dtype)
    if torch.equal(served, trained):
        return ""
    if trained.ndim == 2 and trained.shape[0] == trained.shape[1] and torch.equal(served, trained.T):
        return "is transposed"
    if name == "fc.weight":
        parts = trained.chunk(config.num_features, dim=1)
        for order in permutations(range(len(parts))) if len(parts) <= 6 else ():
            if torch.equal(served, torch.cat([parts[i] for i in order], dim=1)):
                layers = [config.target_layer_ids[i] for i in order]
                return f"has its features in the order of layers {layers}, not {list(config.target_layer_ids)}"
    return f"differs by up to {float((served.double() - saved.double()).abs().max()):.3g}"


def files(p: Patient) -> Iterator[Finding]:
    """Every file of a checkpoint is what was written."""
    mine = [] if p.run_dir is None else [s for s in saved_checkpoints(p.run_dir) if s.folder == p.checkpoint]
    for saved in mine:
        if wrong := damage(saved):
            advice = "take another checkpoint, or train on from an older one (flowdflash run --resume)"
            yield fault("files", f"the checkpoint was changed after it was written: {wrong}", advice)
        else:
            yield Finding("files", "ok", "every file is what was written")
    if not mine:
        yield Finding("files", "skipped", "an exported draft has no list of its files")


def target(p: Patient) -> Iterator[Finding]:
    """The draft meets the embedding and the head that it was trained with: the target's own."""
    advice = "export the draft again, without embedding and head: servers take the target's"
    try:
        check_borrowed(p.imported, p.borrowed.embed, p.borrowed.head)
    except ModelInvalid as error:
        yield fault("head" if "lm_head" in str(error) else "embedding", str(error), advice)
        return
    own = p.target.model.get_input_embeddings().weight.float().cpu()
    if not torch.equal(own, p.borrowed.embed):
        text = "the embedding that a drafter reads from the target's files is not the one that the target uses"
        yield fault("embedding", text, "fetch the target again")
    ids = torch.arange(min(8, p.config.vocab_size)).numpy()
    probe = probe_head(p.target, batch_of(Row(ids, ids >= 0)))
    try:
        check_head(Head(p.borrowed.head, softcap=p.config.final_logit_softcapping), probe, torch.float32)
    except ModelInvalid as error:
        yield fault("head", str(error), "fetch the target again; a draft trained with another head has to be retrained")
    else:
        yield Finding("target", "ok", f"embedding and head are those of {p.ref}, whose logits they give")
