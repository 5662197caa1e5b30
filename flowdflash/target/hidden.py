"""Hidden states of a frozen target: hooks on decoder layers, and the checks that they are the right ones.

A hook on layer ``l`` sees the residual stream that leaves the layer. It is independent of the version of transformers
and of the final norm. Nothing is kept between calls, and the forward ends at the deepest tapped layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowdflash.errors import ModelInvalid
from flowdflash.items import HeadProbe, TokenBatch
from flowdflash.target.load import LoadedTarget

PROBE_TOKENS = 8


class _Deep(Exception):
    """The deepest tapped layer has been reached."""


def hidden_states(
    target: LoadedTarget,
    layers: Sequence[int],
    ids: Tensor,
    *,
    last_hidden: bool = False,
    documents: Sequence[slice] = (),
) -> Tensor:
    """Outputs of the given decoder layers, concatenated in their order.

    Args:
        target: the model; must be in eval mode.
        layers: 0-based ids of decoder layers, strictly increasing.
        ids: ``[b, S]`` token ids on the target's device, padded on the right if at all.
        last_hidden: append what the output head reads, the state after the final norm.
        documents: where in a packed row its documents are, end to end; positions restart at each.

    Returns:
        ``[b, S, K * D]``, or ``[b, S, (K + 1) * D]`` with the last, in the target's dtype, without gradient.
    """
    if target.base.training:
        raise ModelInvalid(f"{target.ref} was switched to train mode: its dropout would change the features")
    taken: dict[int, Tensor] = {}
    packed: dict[str, Any] = {}
    if documents:
        positions = [torch.arange(at.stop - at.start, device=ids.device) for at in documents]
        packed = {"position_ids": torch.cat(positions)[None], "documents": documents}

    def take(layer: int, output: Any) -> None:
        taken[layer] = output[0] if isinstance(output, tuple) else output
        if layer == layers[-1] and not last_hidden:
            raise _Deep

    with torch.no_grad(), ExitStack() as hooks:
        for layer in layers:
            handle = target.layers[layer].register_forward_hook(
                lambda module, args, output, layer=layer: take(layer, output)
            )
            hooks.callback(handle.remove)
        try:
            last = target.base(input_ids=ids, use_cache=False, **packed).last_hidden_state
        except _Deep:
            last = None
    if layers[-1] not in taken:
        raise ModelInvalid(f"{target.ref}: its forward never reached decoder layer {layers[-1]}")
    return torch.cat([*(taken[layer] for layer in layers), *([last] if last_hidden else [])], dim=-1)


def check_hooks(target: LoadedTarget, layers: Sequence[int]) -> None:
    """Compare the hooks with what transformers returns as hidden states, bit by bit, on a few tokens (pitfall L5).

    Raises:
        ModelInvalid: they differ, so features would come from other layers than the config says; or the target keeps a
            state that cannot be rolled back, so no draft for it could be served.
    """
    if getattr(target.model, "_is_stateful", False):
        raise ModelInvalid(
            f"{target.ref} cannot be a target: it keeps a recurrent state, which cannot be rolled back after a "
            "rejected draft"
        )
    ids = torch.arange(min(PROBE_TOKENS, target.vocab_size), device=target.device)[None]
    hooked = hidden_states(target, layers, ids)
    with torch.no_grad():
        states = target.base(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    if len(states) != target.num_layers + 1:
        raise ModelInvalid(f"{target.ref} returned {len(states)} hidden states for {target.num_layers} decoder layers")
    for place, layer in enumerate(layers):
        mine = hooked[..., place * target.hidden_size : (place + 1) * target.hidden_size]
        if not torch.equal(mine, states[layer + 1]):
            raise ModelInvalid(
                f"{target.ref}: the output of decoder layer {layer} is not hidden_states[{layer + 1}] of transformers; "
                "features of this model cannot be trusted"
            )


def probe_head(target: LoadedTarget, batch: TokenBatch) -> HeadProbe:
    """The target's own logits on the first few tokens of a batch, with the hidden states that they come from."""
    count = min(PROBE_TOKENS, int(batch.lengths[0]))
    ids = torch.from_numpy(batch.input_ids[:1, :count].astype(np.int64)).to(target.device)
    with torch.no_grad():
        out = target.model(input_ids=ids, use_cache=False, output_hidden_states=True)
    return HeadProbe(hidden=out.hidden_states[-1][0].float(), logits=out.logits[0].float())


def batch_features(
    target: LoadedTarget, layers: Sequence[int], batch: TokenBatch, *, last_hidden: bool = False
) -> Tensor:
    """``[b, S, K * D]`` features of a right-padded or packed batch, and the last states after them; zero on padding.

    Raises:
        ModelInvalid: a token id is outside the target's vocabulary, or a sample is longer than the target can read.
    """
    S, longest = batch.input_ids.shape[1], int(batch.lengths.max())
    highest = int(batch.input_ids.max(initial=0))
    if highest >= target.vocab_size or int(batch.input_ids.min(initial=0)) < 0:
        raise ModelInvalid(
            f"token id {highest} is outside the vocabulary of {target.ref} ({target.vocab_size} rows): "
            "the data was tokenised for another model"
        )
    if 0 < target.max_positions < longest:
        raise ModelInvalid(
            f"a sample of {longest} tokens is longer than {target.ref} reads, {target.max_positions} (lower max_length)"
        )
    ids = torch.from_numpy(batch.input_ids.astype(np.int64, copy=False)).to(target.device)
    if batch.info.packed:
        documents = [columns for _, columns in batch.info.places]
        return hidden_states(target, layers, ids, last_hidden=last_hidden, documents=documents)
    real = torch.from_numpy(np.arange(S)[None, :] < batch.lengths[:, None]).to(target.device)
    # Padding is on the right of causal attention: no real token sees it, so no mask is needed, and the kernel without
    # one is faster.
    features = hidden_states(target, layers, ids, last_hidden=last_hidden)
    return features if bool((batch.lengths == S).all()) else features.masked_fill_(~real[..., None], 0)
