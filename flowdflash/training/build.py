"""A draft for a given target: its config from the target's facts, and the matrices that it borrows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowdflash.dflash.config import DraftConfig
from flowdflash.errors import ModelInvalid
from flowdflash.items import HeadProbe
from flowdflash.stage import Report, Vocabulary

if TYPE_CHECKING:
    import torch

    from flowdflash.dflash.head import Head
    from flowdflash.dflash.model import DFlashDraft
    from flowdflash.target.load import EmbeddingAndHead


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """The draft's own choices; None takes what the target has.

    Attributes:
        block_size, num_hidden_layers: shape of the draft.
        num_attention_heads, num_key_value_heads, head_dim, intermediate_size: geometry.
        rope_theta: base of the rotary positions.
        mask_token_id: embedding row that stands for "unknown".
        kind, own: kind of draft, and the fields that it adds.
    """

    block_size: int
    num_hidden_layers: int
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    rope_theta: float | None = None
    mask_token_id: int | None = None
    kind: type[DraftConfig] = DraftConfig
    own: Mapping[str, Any] = field(default_factory=dict)


GEOMETRY = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
"""Options of a draft that are ``auto`` or a number."""


def draft_options(config: Any) -> DraftOptions:
    """The draft's own choices among the options of the drafter."""
    names = (*GEOMETRY, "rope_theta", "mask_token_id")
    chosen = {name: None if getattr(config, name) == "auto" else getattr(config, name) for name in names}
    kind = config.draft_kind
    own = {name: getattr(config, name) for name in kind.own_fields() if hasattr(config, name)}
    return DraftOptions(config.block_size, config.num_hidden_layers, **chosen, kind=kind, own=own)


def target_facts(ref: str, cache_dir: Path, report: Report) -> Mapping[str, Any]:
    """Facts of a target that can be had at run time, whatever kind of reference it is.

    Raises:
        ModelInvalid: the model cannot be found, read, or drafted for.
    """
    from flowdflash.target.catalogue import facts_of, is_folder
    from flowdflash.target.fetch import resolve_model
    from flowdflash.target.weights import target_config_facts

    known = None if is_folder(ref) else facts_of(ref)
    return known or target_config_facts(ref, Path(resolve_model(ref, cache_dir, report)))


def draft_config(
    options: DraftOptions,
    ref: str,
    facts: Mapping[str, Any],
    layers: tuple[int, ...],
    table: tuple[int, int],
    mask: int,
) -> DraftConfig:
    """The config of a draft for the target ``ref``.

    Args:
        options: the draft's own choices.
        ref: how the pipeline names the target, for errors.
        facts: of the target.
        layers: tapped layers.
        table: rows and width of the target's embedding.
        mask: mask token.

    Raises:
        ModelInvalid: the target does not say what the draft should copy.
    """

    def pick(option: str, fact: str) -> Any:
        own = getattr(options, option)
        if own is None and fact not in facts:
            raise ModelInvalid(f"{ref} does not say its {fact}: set {option} in the drafter's options")
        return facts[fact] if own is None else own

    if options.intermediate_size is None and "num_experts" in facts:
        raise ModelInvalid(f"{ref} has experts, the draft has none: set intermediate_size in the drafter's options")
    eos = facts.get("eos_token_id")
    return options.kind(
        **options.own,
        hidden_size=table[1],
        intermediate_size=pick("intermediate_size", "intermediate_size"),
        num_hidden_layers=options.num_hidden_layers,
        num_attention_heads=pick("num_attention_heads", "num_heads"),
        num_key_value_heads=pick("num_key_value_heads", "num_kv_heads"),
        head_dim=pick("head_dim", "head_dim"),
        vocab_size=table[0],
        block_size=options.block_size,
        mask_token_id=mask,
        target_layer_ids=layers,
        num_target_layers=int(facts["num_layers"]),
        rms_norm_eps=float(facts.get("rms_norm_eps", 1e-6)),
        rope_theta=float(pick("rope_theta", "rope_theta")),
        max_position_embeddings=int(facts.get("max_position_embeddings", 40960)),
        bos_token_id=facts.get("bos_token_id"),
        eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
        pad_token_id=facts.get("pad_token_id"),
        final_logit_softcapping=facts.get("final_logit_softcapping"),
    )


def draft_size(config: Any, facts: Mapping[str, Any]) -> dict[str, int]:
    """``draft_parameters``, where the facts of the stages before tell the target's shape without opening it."""
    from flowdflash.target.catalogue import facts_of

    known = (facts_of(facts["model"]) if "model" in facts else None) or {}
    if "layers" not in facts or not {"vocab_size", "hidden_size", "num_layers"} <= known.keys():
        return {}
    table = (int(known["vocab_size"]), int(known["hidden_size"]))
    try:
        # Which row is the mask makes no difference to the size.
        draft = draft_config(draft_options(config), facts["model"], known, tuple(facts["layers"]), table, 0)
    except ModelInvalid:
        return {}
    return {"draft_parameters": draft.num_parameters}


def choose_mask_token(
    explicit: int | None, ref: str, facts: Mapping[str, Any], rows: int, cache_dir: Path, vocabulary: Vocabulary | None
) -> int:
    """The mask token: as the user says, else as known of the target, else by its tokenizer; never one in the data.

    Raises:
        ModelInvalid: it is not a row of the table, means something else, or occurs in the data.
    """
    from flowdflash.target.load import find_tokenizer
    from flowdflash.target.mask_token import resolve_mask_token

    # Of a well-known target its facts say all there is to say, without a tokenizer.
    known = explicit is None and "mask_token_id" in facts
    tokenizer = None if known else find_tokenizer(ref, cache_dir)
    mask = resolve_mask_token(explicit, tokenizer, rows, facts=facts)
    if vocabulary is not None and mask in vocabulary.token_ids:
        raise ModelInvalid(f"mask token {mask} occurs in the training data: choose another row (mask_token_id)")
    return mask


def training_head(head: Head, softmax: str, vocabulary: Vocabulary | None, mask: int) -> Head:
    """The head to train against: whole, or over the tokens that occur in the data and the mask token.

    Raises:
        ModelInvalid: the source does not know its tokens beforehand.
    """
    if softmax == "full":
        return head
    if vocabulary is None:
        raise ModelInvalid("softmax: seen needs a source that knows its tokens beforehand; use softmax: full")
    import torch

    return head.restricted(torch.tensor([*vocabulary.supervised_token_ids.tolist(), mask]))


def start_from_target(draft: DFlashDraft, ref: str, facts: Mapping[str, Any], cache_dir: Path) -> None:
    """Let the draft begin as a copy of the target's layers that follow the deepest tapped one, and of its final norm.

    Where fewer layers follow than the draft has, it takes the last ones.

    Raises:
        ModelInvalid: its layers are not built like the draft's.
    """
    from flowdflash.dflash.model import init_from_layers, init_fusion
    from flowdflash.target.load import load_decoder_layers, load_final_norm

    config, act = draft.config, facts.get("hidden_act", "silu")
    if act != "silu":
        raise ModelInvalid(f"{ref} cannot start a draft: its layers use {act}, the draft's silu; set init: random")
    first = min(config.target_layer_ids[-1] + 1, config.num_target_layers - config.num_hidden_layers)
    copied = range(first, first + config.num_hidden_layers)
    states = load_decoder_layers(ref, cache_dir, copied)
    init_from_layers(draft, [states[i] for i in copied], final_norm=load_final_norm(ref, cache_dir))
    init_fusion(draft, states[first]["input_layernorm.weight"])


def start_from_draft(draft: DFlashDraft, path: Path, borrowed: EmbeddingAndHead) -> None:
    """Let the draft begin as one that is there already, of any format; all of it fits, or nothing is taken (W10).

    Raises:
        ModelInvalid: there is none, or it is of another target or shape.
    """
    from flowdflash.dflash.importing import check_borrowed, check_same_draft, load_draft

    found = load_draft(path, num_target_layers=draft.config.num_target_layers)
    check_same_draft(found, draft.config)
    check_borrowed(found, borrowed.embed, borrowed.head)
    draft.load_state_dict(found.tensors, strict=True)


def check_head(head: Head, probe: HeadProbe, target_dtype: torch.dtype) -> None:
    """Compare the borrowed head with the target's own logits (pitfall W1: a wrong head trains for nothing).

    Raises:
        ModelInvalid: they differ by more than the rounding of either dtype.
    """
    import torch

    logits = head.logits(probe.hidden.to(head.weight)).float().cpu()
    wanted = probe.logits.float().cpu()
    rounding = 1e-3 if target_dtype is head.weight.dtype is torch.float32 else 2e-2
    allowed = rounding * max(float(wanted.abs().max()), 1.0)
    worst = float((logits - wanted).abs().max()) if logits.shape == wanted.shape else float("inf")
    if not worst <= allowed:
        raise ModelInvalid(
            "the output head read for the draft is not the target's: "
            f"logits differ by {worst:.3g}, allowed is {allowed:.3g}"
        )
