"""A draft in training: forward and backward of a micro-batch, the optimizer step of a window, weights and moments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowdflash.dflash.head import Head
from flowdflash.dflash.loss import LossSums
from flowdflash.dflash.model import DFlashDraft
from flowdflash.dflash.optim import Schedule, clip_gradients, scale_gradients, set_lr
from flowdflash.dflash.training import LossOptions, training_loss
from flowdflash.errors import ModelInvalid
from flowdflash.items import FeatureBatch
from flowdflash.training.window import WindowSums


@dataclass(frozen=True, slots=True)
class Update:
    """What closing a window came to.

    Attributes:
        lr: learning rate of the step.
        grad_norm, grad_norm_clipped: before and after clipping.
        skipped: why no step was taken; empty if one was.
    """

    lr: float
    grad_norm: float
    grad_norm_clipped: float
    skipped: str


@dataclass(frozen=True, slots=True, eq=False)
class Trainer:
    """A draft with all that its training needs. Nothing of the target is trained.

    Attributes:
        draft: in train mode, its parameters in fp32 on ``device``.
        embed: ``[V, D]`` the target's embedding, frozen, in ``dtype``.
        head: the target's head, frozen, over the tokens that the training softmax runs over.
        full_head: the whole head, for comparing it with what the target says.
        loss: how the loss is computed.
        optimizer, schedule, peak_lr, clip: how the weights move; ``clip`` is the largest gradient norm.
        device: where it trains.
        dtype: of the forward pass; bf16 by autocast.
    """

    draft: DFlashDraft
    embed: Tensor
    head: Head
    full_head: Head
    loss: LossOptions
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    peak_lr: float
    clip: float
    device: torch.device
    dtype: torch.dtype

    def backward(self, batch: FeatureBatch, anchors: Tensor, keep: Tensor) -> LossSums:
        """Add the gradients of one micro-batch to those of its window; ``anchors, keep`` as ``draw_anchors`` gives."""
        tokens = batch.tokens
        return self._backward(
            self._placed(tokens.input_ids),
            self._placed(tokens.loss_mask),
            self._placed(tokens.lengths),
            self._placed(anchors.numpy()),
            self._placed(keep.numpy()),
            batch.features,
            batch.last_hidden,
        )

    def _backward(
        self,
        ids: Tensor,
        loss_mask: Tensor,
        lengths: Tensor,
        anchors: Tensor,
        keep: Tensor,
        features: Tensor,
        last_hidden: Tensor | None,
    ) -> LossSums:
        taught = None if self.loss.kind == "ce" or last_hidden is None else self._moved(last_hidden)
        inputs = (ids, loss_mask, lengths, self._moved(features), anchors, keep)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype is torch.bfloat16):
            sums = training_loss(self.draft, self.embed, self.head, *inputs, self.loss, last_hidden=taught)
        torch.autograd.backward(sums.num)
        return sums

    def compile(self) -> None:
        """Compile the draft, forward and backward, on blank rows; later batches may have any size.

        Batches of one row are a case of their own to the compiler. To be called while no other thread runs a model:
        compiling is not thread-safe.

        Raises:
            ModelInvalid: torch cannot compile here.
        """
        config = self.draft.config
        S, width = 2 * config.block_size, config.num_features * config.hidden_size
        self.draft.compile(dynamic=True)
        try:
            for rows in (2, 1):
                # The mask token is in every training vocabulary.
                ids = torch.full((rows, S), config.mask_token_id, device=self.device)
                anchors = torch.tensor([[1, 2, 3]], device=self.device).expand(rows, -1)
                states = torch.zeros(rows, S, width + config.hidden_size, dtype=self.dtype, device=self.device)
                lengths = torch.full((rows,), S, device=self.device)
                inputs = (ids, ids >= 0, lengths, anchors, anchors > 0)
                self._backward(*inputs, states[..., :width].contiguous(), states[..., width:])
        except Exception as error:  # whatever the compiler, its C++ or its CUDA tools raise
            cause = getattr(error, "inner_exception", error)
            raise ModelInvalid(f"compile: true does not work here: {type(cause).__name__}: {cause}") from error
        self.drop_gradients()

    def update(self, window: WindowSums, step: int) -> Update:
        """Close a window: mean over its slots, clip, step number ``step`` (0-based) of the optimizer unless refused."""
        parameters = list(self.draft.parameters())
        scale_gradients(parameters, window.den)
        norm, clipped = clip_gradients(parameters, self.clip)
        skipped = _refusal(window, norm)
        lr = set_lr(self.optimizer, self.peak_lr, self.schedule, step)
        if not skipped:
            self.optimizer.step()
        self.drop_gradients()
        return Update(lr, norm, clipped, skipped)

    def drop_gradients(self) -> None:
        """Forget the gradients of a window that is closed, or never will be."""
        self.optimizer.zero_grad(set_to_none=True)

    def weights(self) -> dict[str, Tensor]:
        """The draft's tensors, copied to the host."""
        return {name: _copied(tensor) for name, tensor in self.draft.state_dict().items()}

    def moments(self) -> dict[str, Any]:
        """State of the optimizer: tensors, copied to the host, and plain values."""
        inner = self.optimizer.state_dict()
        return {
            "state": {i: {k: _copied(v) for k, v in slot.items()} for i, slot in inner["state"].items()},
            "param_groups": [dict(group) for group in inner["param_groups"]],
        }

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take up weights that ``weights`` gave.

        Raises:
            ModelInvalid: they are of another draft.
        """
        try:
            self.draft.load_state_dict(dict(weights), strict=True)
        except RuntimeError as error:
            raise ModelInvalid(f"the saved weights are not of this draft: {error}") from error

    def load_moments(self, moments: Mapping[str, Any]) -> None:
        """Take up what ``moments`` gave; it is copied, never shared.

        Raises:
            ModelInvalid: it is of another optimizer, or of another draft.
        """
        try:
            own = {i: {k: _copied(v) for k, v in slot.items()} for i, slot in moments["state"].items()}
            self.optimizer.load_state_dict({**moments, "state": own})
        except (KeyError, ValueError, AttributeError) as error:
            raise ModelInvalid(f"the saved state of the optimizer is not of this draft: {error}") from error

    def _moved(self, states: Tensor) -> Tensor:
        # From another GPU the copy is queued behind the kernels that made the states.
        return states.to(self.device, non_blocking=self.device.type == "cuda")

    def _placed(self, array: NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(array)
        # A copy from pageable memory would hold this thread until the GPU has done all that it was given.
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _refusal(window: WindowSums, norm: float) -> str:
    """Why no optimizer step may be taken, empty if it may."""
    if window.terms == 0:
        return "no supervised slot in the window"
    if not math.isfinite(window.loss):
        return f"loss is {window.loss}"
    return "" if math.isfinite(norm) else f"gradient norm is {norm}"
