"""The frozen target: any decoder-only model of transformers, tapped at a few layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from flowdflash.dflash.config import layers_problem, resolve_layers
from flowdflash.errors import ModelInvalid
from flowdflash.items import FeatureBatch, HeadProbe, TokenBatch
from flowdflash.stage import Bytes, Check, ModelRef, OpenContext, PipelinePath, StageConfig, TargetForward
from flowdflash.target.catalogue import facts_of, ref_problem, same_model
from flowdflash.target.devices import ReplicaDevices, devices_problem

if TYPE_CHECKING:
    from torch import Tensor

    from flowdflash.target.features import FeatureCache
    from flowdflash.target.tapped import TappedTarget


class TransformersTarget(TargetForward):
    """Runs a transformers model without its head and keeps the outputs of some decoder layers."""

    type = "transformers"
    safe_to_change = frozenset({"replicas"})

    class Config(StageConfig):
        """Options of the target."""

        model: ModelRef = Field(
            description="The target: a folder (./model), a name (SmolLM2-135M-Instruct) or a Hugging Face id."
        )
        layers: Literal["auto"] | tuple[int, ...] = Field(
            "auto",
            description="Tapped decoder layers, 0-based, strictly increasing; auto spreads num_features evenly.",
        )
        num_features: int = Field(5, ge=1, description="Number of tapped layers where layers is auto.")
        last_hidden: bool = Field(
            False, description="Carry the states after the final norm too: a drafter's loss kl or tv needs them."
        )
        dtype: Literal["auto", "float32", "bfloat16"] = Field(
            "auto", description="Precision of weights and features; auto is bfloat16 where the device computes it fast."
        )
        device: ReplicaDevices = "auto"
        replicas: int = Field(1, ge=1, le=64, description="Copies of the target that work at once, one per GPU.")
        keep: Literal["none", "disk"] = Field(
            "none", description="disk keeps features after the first pass, so that later epochs and runs read them."
        )
        keep_dir: Literal["auto"] | PipelinePath = Field(
            "auto",
            description="Folder of the kept features; auto is one in the user's cache, by target, layers and dtype.",
        )
        max_bytes: Bytes = Field(
            50 << 30,
            description="Most bytes of kept features (20GiB); 0 for no limit. The rest is recomputed.",
        )

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._target: TappedTarget | None = None
        self._cache: FeatureCache | None = None
        self._probe_due = True
        self._epoch = 0
        self._computed = self._read = 0
        self._summary: dict[str, Any] = {}

    def check(self, check: Check) -> Mapping[str, Any]:
        """Facts of the target; refuses layers that it does not have and a source that tokenises for another model."""
        config = self.config
        message, hint = ref_problem(config.model)
        if message:
            check.refuse("model", message, hint)
        known = facts_of(config.model) or {}
        if "unfit" in known:
            check.refuse("model", f"{config.model} cannot be a target: {known['unfit']}")
        facts = {k: known[k] for k in ("hidden_size", "num_layers", "vocab_size", "mask_token_id") if k in known}
        facts |= {"model": config.model, "replicas": config.replicas, "last_hidden": config.last_hidden}
        if config.dtype != "auto":
            facts["dtype"] = config.dtype
        layers = self._check_layers(check, known.get("num_layers"))
        facts["num_features"] = len(layers) or config.num_features
        if layers:
            facts["layers"] = layers
        self._check_upstream(check, known.get("max_position_embeddings"))
        message, hint = devices_problem(config.device, config.replicas)
        if message:
            check.refuse("device", message, hint)
        for option in ("keep_dir", "max_bytes"):
            if config.keep == "none" and option in config.model_fields_set:
                check.refuse(option, f"{option} has no effect where nothing is kept", "add keep: disk, or remove it")
        return facts

    def _check_layers(self, check: Check, num_layers: int | None) -> tuple[int, ...]:
        config = self.config
        if config.layers != "auto":
            wrong = layers_problem(config.layers, num_layers)
            if wrong:
                check.refuse("layers", wrong)
                return ()
            if "num_features" in config.model_fields_set and config.num_features != len(config.layers):
                check.refuse(
                    "num_features",
                    f"num_features is {config.num_features}, layers names {len(config.layers)}",
                    "remove it",
                )
            return tuple(config.layers)
        if num_layers is None:
            return ()
        try:
            return resolve_layers("auto", config.num_features, num_layers)
        except ModelInvalid as error:
            check.refuse("num_features", str(error), "lower num_features or name the layers")
            return ()

    def _check_upstream(self, check: Check, max_positions: int | None) -> None:
        if check.facts.get("task", "train") != "train":
            check.refuse("", "the source gives prompts without answers", "set task: train in the source")
        tokenizer = check.facts.get("tokenizer")
        if tokenizer is not None and not same_model(tokenizer, self.config.model):
            check.refuse(
                "model",
                f"the data is tokenised for {tokenizer}, the target is {self.config.model}",
                "name the same model in the source's tokenizer",
            )
        max_length = check.facts.get("max_length")
        if max_length and max_positions and max_length > max_positions:
            check.refuse(
                "model",
                f"samples of up to {max_length} tokens, the target reads {max_positions}",
                "lower max_length of the source",
            )

    def open(self, ctx: OpenContext) -> None:
        """Resolve and load the target; a run whose features are all kept loads it only if one turns out missing."""
        from flowdflash.target.tapped import TappedTarget

        config = self.config
        self._target = TappedTarget.of(config.model, config, ctx)
        if config.keep == "disk":
            self._cache = self._open_cache(ctx)
            samples = ctx.plan.samples_per_epoch if ctx.plan else 0
            if 0 < samples <= len(self._cache) and self._cache.read_probe() is not None:
                ctx.report.info(
                    f"{ctx.stage}: {len(self._cache)} samples are kept; the target is loaded only if one is missing"
                )
                return
        self._target.load()

    def _open_cache(self, ctx: OpenContext) -> FeatureCache:
        from flowdflash.target.features import FeatureCache
        from flowdflash.target.fingerprint import fingerprint, fingerprint_id

        assert self._target is not None
        target, config = self._target, self.config
        facts = fingerprint(
            target.folder,
            config.model,
            target.layers,
            target.hidden_size,
            str(target.dtype).removeprefix("torch."),
            last_hidden=config.last_hidden,
        )
        folder = ctx.cache_dir / "features" / fingerprint_id(facts) if config.keep_dir == "auto" else config.keep_dir
        return FeatureCache(folder, facts, max_bytes=config.max_bytes, report=ctx.report)

    def forward(self, batch: TokenBatch) -> FeatureBatch:
        """Features of a batch, read if every row is kept, else computed."""
        assert self._target is not None, "forward before open"
        features = self._kept(batch)
        if features is None:
            features = self._target.features(batch)
            self._computed += len(batch.lengths)
            if self._cache is not None:
                self._cache.add(batch, features)
        else:
            self._read += len(batch.lengths)
        probe = self._first_probe(batch) if self._probe_due else None
        return self._target.feature_batch(batch, features, probe)

    def _kept(self, batch: TokenBatch) -> Tensor | None:
        if self._cache is None or self._target is None:
            return None
        if batch.info.epoch != self._epoch:
            # What this replica still holds back, another may need in the new epoch.
            self._cache.flush()
            self._epoch = batch.info.epoch
        features = self._cache.read(batch)
        return None if features is None else features.to(self._target.device)

    def _first_probe(self, batch: TokenBatch) -> HeadProbe:
        assert self._target is not None
        self._probe_due = False
        kept = self._cache.read_probe() if self._cache is not None else None
        if kept is not None:
            return replace(kept, hidden=kept.hidden.to(self._target.device), logits=kept.logits.to(self._target.device))
        probe = self._target.probe(batch)
        if self._cache is not None:
            self._cache.keep_probe(probe)
        return probe

    @property
    def on_cpu(self) -> bool:
        """It computes on the CPU."""
        return self._target is not None and self._target.device.type == "cpu"

    def close(self) -> None:
        """Write the features still pending and let go of the model."""
        if self._cache is not None:
            self._cache.close()
        self._summary = dict(self.summary())
        self._cache = None
        if self._target is not None:
            self._target.close()
            self._target = None

    def summary(self) -> Mapping[str, Any]:
        """How many samples were computed and how many read."""
        if self._target is None:
            return self._summary
        result: dict[str, Any] = {
            "samples_computed": self._computed,
            "samples_read": self._read,
            "tokens_per_sec": round(self._target.tokens / self._target.secs, 1) if self._target.secs else 0.0,
        }
        if self._cache is not None:
            result["kept_bytes"] = self._cache.kept_bytes
            if self._cache.full:
                result["keeping_stopped"] = self._cache.full
        return result
