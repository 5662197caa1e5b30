"""What a run's records, its data and real decoding say together: good figures that serving does not have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from flowdflash.dflash.acceptance import answer_runs, eal_walk, mean
from flowdflash.doctor.finding import Finding, fault
from flowdflash.doctor.patient import Patient

RECENT, ENOUGH = 20, 50
"""Steps that an average is taken over, and steps before which nothing is concluded from a loss."""

CHANCE = 0.9
"""A loss above this share of ln V is that of a draft that has learnt nothing."""

GAP, AGREE, FLAT = 0.25, 0.15, 0.05
"""Accuracies that differ by more, acceptance lengths that differ by more, slots that differ by less."""

RETRAIN = "train again with flowdflash of this version; if that does not help, try flowdflash doctor --gate"


def training(p: Patient) -> Iterator[Finding]:
    """A loss that never fell, and recorded accuracies that the weights do not have on the run's own data."""
    if not p.records:
        yield Finding("training", "skipped", "there are no records of training")
        return
    loss, chance = mean([r["loss"] for r in p.records[-RECENT:]]), math.log(_choices(p))
    recorded = _recorded(p)
    if len(p.records) >= ENOUGH and loss > CHANCE * chance:
        text = f"after {len(p.records)} steps the loss is {loss:.2f}, and that of guessing {chance:.2f} (ln V)"
        advice = "look at what is supervised (flowdflash show), at lr, at the head (W1) and at the mask token (W3)"
        yield fault("learning", text, advice)
    elif not p.trained_on:
        text = f"the records (loss {loss:.2f}) are not compared with the data: {p.no_data}"
        yield Finding("training", "skipped", text)
    elif recorded[0] - p.fit.per_slot[0] > GAP:
        text = f"training recorded {_shares(recorded)} right per slot, on the same data it is {_shares(p.fit.per_slot)}"
        yield fault("training", f"{text}: {_suspects(recorded)}", RETRAIN)
    else:
        text = f"loss {loss:.2f}; right per slot: {_shares(recorded)} recorded, {_shares(p.fit.per_slot)} now"
        yield Finding("training", "ok", text)


def _recorded(p: Patient) -> list[float]:
    """Accuracy per slot over the last steps."""
    return [mean(slot) for slot in zip(*(r["accuracy_per_slot"] for r in p.records[-RECENT:]), strict=True)]


def _choices(p: Patient) -> int:
    """Tokens that the training softmax ran over."""
    if p.drafting is not None and p.drafting.config.softmax == "seen" and p.vocabulary is not None:
        return len(p.vocabulary.supervised_token_ids) + 1
    return p.config.vocab_size


def _suspects(recorded: Sequence[float]) -> str:
    if len(recorded) > 1 and max(recorded) - min(recorded) < FLAT:
        return "slots that are all alike saw their own labels (pitfalls L2, L3)"
    if recorded[0] > 0.9:
        return "a first slot that is nearly always right saw the state at its anchor, or has a shifted label (L1, L4)"
    return "training did not see what serving does: head, mask token, positions or states (W1, W3, W5, L5, L8)"


def acceptance(p: Patient) -> Iterator[Finding]:
    """Real decoding against teacher forcing on the target's own answers, and against what training promised."""
    runs = [answer_runs(p.target.model, p.draft, row.ids.tolist(), row.start) for row in p.answered]
    walked, tau, recorded = eal_walk(runs), p.decoded.tau_request_mean, _recorded(p)
    kind = "held-out prompts" if p.held_out else "prompts"
    text = f"tau_gen {tau:.2f}, teacher-forced eal_walk {walked:.2f} on {len(runs)} {kind}"
    if not abs(walked - tau) <= AGREE:
        yield fault("decoding", f"{text}: they should agree within {AGREE}", RETRAIN)
    elif p.held_out and p.trained_on and p.fit.eal > 1.5 and tau - 1 < 0.25 * (p.fit.eal - 1):
        text += f", but eal {p.fit.eal:.2f} on the run's data: the draft has learnt that, not what the target answers"
        yield fault("data", text, "train on this target's own answers to prompts like those served (pitfalls D1, D2)")
    elif p.held_out and not p.trained_on and recorded and recorded[0] > 2 * GAP and tau < 1.1:
        text += f", but training recorded {_shares(recorded)} right: {_suspects(recorded)}"
        yield fault("training", text, RETRAIN)
    else:
        yield Finding("acceptance", "ok", text)


@torch.inference_mode()
def data(p: Patient) -> Iterator[Finding]:
    """Is the text that was trained on the target's own? No fault if not: other text may be meant."""
    if not p.trained_on:
        yield Finding("data", "skipped", f"the data of the run is not known: {p.no_data}")
        return
    own: list[bool] = []
    for row in p.trained_on:
        ids, mask, _ = row.tensors(p.target.device)
        said = p.target.model(input_ids=ids, use_cache=False).logits[:, :-1].argmax(dim=-1)
        own += (said == ids[:, 1:])[mask[:, 1:]].tolist()
    text = f"{mean(own):.0%} of the supervised tokens are what the target would say"
    if mean(own) < 0.5:
        yield Finding("data", "note", f"{text}; a draft serves best that learns the target's own answers (pitfall D1)")
    else:
        yield Finding("data", "ok", text)


def _shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)
