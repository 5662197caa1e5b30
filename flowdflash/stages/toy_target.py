"""A tiny random target, for tests, demonstrations and scheduling studies without weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from flowdflash.dflash.config import resolve_layers
from flowdflash.errors import ModelInvalid
from flowdflash.items import FeatureBatch, TokenBatch
from flowdflash.stage import Check, OpenContext, StageConfig, TargetForward
from flowdflash.target.catalogue import facts_of, same_model
from flowdflash.target.devices import ReplicaDevices, devices_problem
from flowdflash.target.toy import ToyModel

if TYPE_CHECKING:
    from flowdflash.target.tapped import TappedTarget


class ToyTarget(TargetForward):
    """A random Llama or Qwen3 decoder built from a seed; downstream knows it as the model ``toy:{...}``."""

    type = "toy"
    safe_to_change = frozenset({"replicas"})

    class Config(StageConfig):
        """Shape and seed of the toy, and its taps."""

        family: Literal["llama", "qwen3"] = Field("llama", description="Architecture of the random model.")
        hidden_size: int = Field(32, ge=1, description="Width of the residual stream.")
        num_layers: int = Field(6, ge=2, description="Decoder layers.")
        heads: int = Field(4, ge=1, description="Attention heads.")
        kv_heads: int = Field(2, ge=1, description="Key and value heads.")
        head_dim: int = Field(8, ge=2, description="Size of one head.")
        intermediate_size: int = Field(64, ge=1, description="Width of the MLP.")
        vocab_size: int = Field(272, ge=2, description="Vocabulary rows; from 261 on the toy has a byte tokenizer.")
        max_position_embeddings: int = Field(4096, ge=1, description="Longest sequence, in tokens.")
        tied: bool = Field(False, description="The output head is the embedding.")
        model_seed: int = Field(0, ge=0, description="Seed of the weights.")
        mask_token_id: Literal["auto"] | Annotated[int, Field(ge=0)] = Field(
            "auto", description="Mask token; auto is 260, or the last row of a small vocabulary."
        )
        layers: Literal["auto"] | tuple[int, ...] = Field(
            "auto", description="Tapped decoder layers, 0-based, strictly increasing."
        )
        num_features: int = Field(2, ge=1, description="Number of tapped layers where layers is auto.")
        last_hidden: bool = Field(
            False, description="Carry the states after the final norm too: a drafter's loss kl or tv needs them."
        )
        dtype: Literal["float32", "bfloat16"] = Field("float32", description="Precision of weights and features.")
        device: ReplicaDevices = "cpu"
        replicas: int = Field(1, ge=1, le=64, description="Copies that work at once.")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._target: TappedTarget | None = None
        self._probe_due = True
        self._computed = 0

    def _toy(self) -> ToyModel:
        config = self.config
        same = (
            "family",
            "hidden_size",
            "num_layers",
            "heads",
            "kv_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
        )
        shape = {name: getattr(config, name) for name in (*same, "max_position_embeddings", "tied")}
        mask = -1 if config.mask_token_id == "auto" else config.mask_token_id
        return ToyModel(**shape, seed=config.model_seed, mask_token_id=mask)

    def check(self, check: Check) -> Mapping[str, Any]:
        """Facts of the toy; refuses shapes that cannot be, and data of a larger vocabulary."""
        config = self.config
        try:
            toy = self._toy()
        except ValueError as error:
            check.refuse("", str(error))
            return {}
        known = toy.facts()
        facts = {k: known[k] for k in ("hidden_size", "num_layers", "vocab_size", "mask_token_id")}
        facts |= {"model": toy.ref, "dtype": config.dtype, "replicas": config.replicas}
        facts["last_hidden"] = config.last_hidden
        message, hint = devices_problem(config.device, config.replicas)
        if message:
            check.refuse("device", message, hint)
        if config.layers != "auto" and "num_features" in config.model_fields_set:
            check.refuse("num_features", "layers says already which layers are tapped", "remove it")
        try:
            facts["layers"] = resolve_layers(config.layers, config.num_features, config.num_layers)
        except ModelInvalid as error:
            check.refuse("num_features" if config.layers == "auto" else "layers", str(error))
        facts["num_features"] = len(facts.get("layers", ())) or config.num_features
        tokenizer = check.facts.get("tokenizer", toy.ref)
        rows = (facts_of(tokenizer) or {}).get("vocab_size", 0)
        if not same_model(tokenizer, toy.ref) and rows > toy.vocab_size:
            hint = f"set vocab_size: {rows}, or tokenizer: 'toy:{{}}' in the source"
            check.refuse(
                "vocab_size",
                f"the data is tokenised for {tokenizer} with {rows} rows, the toy has {toy.vocab_size}",
                hint,
            )
        if check.facts.get("max_length", 0) > toy.max_position_embeddings:
            check.refuse("max_position_embeddings", f"samples of up to {check.facts['max_length']} tokens do not fit")
        return facts

    def open(self, ctx: OpenContext) -> None:
        """Build the toy, or read it if it was built before."""
        from flowdflash.target.tapped import TappedTarget

        self._target = TappedTarget.of(self._toy().ref, self.config, ctx)
        self._target.load()

    def forward(self, batch: TokenBatch) -> FeatureBatch:
        """Features of a batch."""
        assert self._target is not None, "forward before open"
        probe = self._target.probe(batch) if self._probe_due else None
        self._probe_due = False
        self._computed += len(batch.lengths)
        return self._target.feature_batch(batch, self._target.features(batch), probe)

    @property
    def on_cpu(self) -> bool:
        """It computes on the CPU."""
        return self._target is not None and self._target.device.type == "cpu"

    def close(self) -> None:
        """Let go of the model."""
        if self._target is not None:
            self._target.close()
            self._target = None

    def summary(self) -> Mapping[str, Any]:
        """How many samples were computed."""
        return {"samples_computed": self._computed}
