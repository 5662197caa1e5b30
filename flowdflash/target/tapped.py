"""A frozen target as the stages use it: resolved in ``open``, loaded when first needed, checked when loaded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowdflash.dflash.config import resolve_layers
from flowdflash.errors import ModelInvalid
from flowdflash.items import FeatureBatch, HeadProbe, TokenBatch
from flowdflash.stage import OpenContext, Report
from flowdflash.target.hidden import batch_features, check_hooks, hidden_states, probe_head
from flowdflash.target.load import LoadedTarget, choose_dtype, load_target, replica_device, resolve_model
from flowdflash.target.packed import isolate
from flowdflash.target.weights import target_config_facts, text_config


class TappedTarget:
    """Turns batches of tokens into features of the tapped layers.

    Attributes:
        folder: the model's files.
        layers: the tapped layers, resolved.
        last_hidden: the states after the final norm are wanted too.
        hidden_size: width of one layer's output.
        device, dtype: where and in what the target computes.
        tokens, secs: real tokens computed so far, and the time that took.
    """

    def __init__(
        self,
        ref: str,
        cache_dir: Path,
        *,
        layers: Sequence[int] | str,
        num_features: int,
        last_hidden: bool,
        dtype: str,
        device: str,
        packed: bool,
        replica: int,
        report: Report,
    ) -> None:
        self._packed = packed
        self._ref, self._cache_dir, self._report, self._dtype_name = ref, cache_dir, report, dtype
        self.last_hidden, self.device = last_hidden, replica_device(device, replica)
        self.dtype = choose_dtype(dtype, self.device)
        self.folder = Path(resolve_model(ref, cache_dir, report))
        target_config_facts(ref, self.folder)
        config = text_config(self.folder)
        self.hidden_size = int(config.hidden_size)
        try:
            self.layers = resolve_layers(layers, num_features, int(config.num_hidden_layers))
        except ModelInvalid as error:
            raise ModelInvalid(f"{ref}: {error}") from None
        self.tokens, self.secs = 0, 0.0
        self._target: LoadedTarget | None = None

    @classmethod
    def of(cls, ref: str, config: Any, ctx: OpenContext) -> TappedTarget:
        """The target that the options of a stage name: taps, precision, device."""
        return cls(
            ref,
            ctx.cache_dir,
            layers=config.layers,
            num_features=config.num_features,
            last_hidden=config.last_hidden,
            dtype=config.dtype,
            device=config.device,
            packed=bool(ctx.facts.get("packed")),
            replica=ctx.replica,
            report=ctx.report,
        )

    def load(self, *, while_running: bool = False) -> LoadedTarget:
        """Load the model unless it is loaded; check its hooks, and where rows are packed that it can read them."""
        if self._target is None:
            target = load_target(
                self._ref,
                self._cache_dir,
                dtype=self._dtype_name,
                device=self.device,
                report=self._report,
                while_running=while_running,
            )
            check_hooks(target, self.layers)
            if self._packed:
                isolate(target, lambda ids, documents: hidden_states(target, self.layers, ids, documents=documents))
            self._target = target
        return self._target

    def features(self, batch: TokenBatch) -> Tensor:
        """``[b, S, K * D]`` features, or ``[b, S, (K + 1) * D]`` with the last states; zero on padding."""
        if batch.info.packed and not self._packed:
            raise ModelInvalid("the batch is packed, though the bucketer's check did not return the fact packed: True")
        target = self.load(while_running=True)
        started = time.monotonic()
        features = batch_features(target, self.layers, batch, last_hidden=self.last_hidden)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.secs += time.monotonic() - started
        self.tokens += int(batch.lengths.sum())
        return features

    def feature_batch(self, batch: TokenBatch, states: Tensor, probe: HeadProbe | None) -> FeatureBatch:
        """A batch with its states as ``features`` gives them."""
        width = len(self.layers) * self.hidden_size
        last = states[..., width:] if self.last_hidden else None
        return FeatureBatch(batch, states[..., :width], self.layers, probe, last)

    def probe(self, batch: TokenBatch) -> HeadProbe:
        """The target's own logits on the first few tokens of a batch."""
        return probe_head(self.load(while_running=True), batch)

    def close(self) -> None:
        """Let go of the model."""
        self._target = None
