"""Lets the target write the responses that a draft should learn: a draft predicts its target best on its own words."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from flowdflash.items import GeneratedBatch, TokenBatch
from flowdflash.stage import Check, Generator, ModelRef, OpenContext, StageConfig
from flowdflash.target.catalogue import facts_of, ref_problem, same_model
from flowdflash.target.devices import ReplicaDevices, devices_problem

if TYPE_CHECKING:
    from flowdflash.target.load import LoadedTarget


class TransformersGenerator(Generator):
    """Answers batches of prompts with a transformers model. Batches of prompts of like length run fastest."""

    type = "transformers"

    class Config(StageConfig):
        """Options of the generator."""

        model: ModelRef = Field(
            description="Who answers: a folder (./model), a name (SmolLM2-135M-Instruct) or a Hugging Face id."
        )
        max_new_tokens: int = Field(512, ge=1, description="Most tokens of a response; one that reaches it is cut.")
        temperature: float = Field(0.0, ge=0, le=10, description="0 takes the likeliest token, above 0 samples.")
        top_p: float = Field(
            1.0, gt=0, le=1, description="Samples from the likeliest tokens of this total probability."
        )
        top_k: int = Field(0, ge=0, description="Samples from so many likeliest tokens; 0 for all.")
        seed: Literal["pipeline"] | int = Field(
            "pipeline", description="Seed of sampling; pipeline takes the pipeline's."
        )
        dtype: Literal["auto", "float32", "bfloat16"] = Field(
            "auto", description="Precision of the weights; auto is bfloat16 where the device computes it fast."
        )
        device: ReplicaDevices = "auto"
        replicas: int = Field(1, ge=1, le=64, description="Copies that answer at once, one per GPU.")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._target: LoadedTarget | None = None
        self._tokenizer: Any = None
        self._stops: tuple[int, ...] = ()
        self._seed = 0
        self._responses = self._tokens = self._cut = 0
        self._secs = 0.0

    def check(self, check: Check) -> Mapping[str, Any]:
        """Facts of the generator; refuses prompts made for another model, and training rows."""
        config = self.config
        message, hint = ref_problem(config.model)
        if message:
            check.refuse("model", message, hint)
        if check.facts.get("task", "generate") != "generate":
            check.refuse("", "the source gives whole conversations, not prompts", "set task: generate in the source")
        tokenizer = check.facts.get("tokenizer")
        if tokenizer is not None and not same_model(tokenizer, config.model):
            hint = "name the same model in the source's tokenizer"
            check.refuse("model", f"the prompts are tokenised for {tokenizer}, the model is {config.model}", hint)
        longest = check.facts.get("max_length", 0) + config.max_new_tokens
        limit = (facts_of(config.model) or {}).get("max_position_embeddings", longest)
        if longest > limit:
            hint = "lower max_new_tokens, or max_length of the source"
            check.refuse(
                "max_new_tokens", f"prompt and response of up to {longest} tokens exceed {limit} positions", hint
            )
        if config.temperature == 0:
            for option in sorted({"top_p", "top_k", "seed"} & config.model_fields_set):
                check.refuse(option, f"{option} has no effect at temperature 0", "raise temperature, or remove it")
        message, hint = devices_problem(config.device, config.replicas)
        if message:
            check.refuse("device", message, hint)
        return {"model": config.model, "max_new_tokens": config.max_new_tokens, "replicas": config.replicas}

    def open(self, ctx: OpenContext) -> None:
        """Load model and tokenizer."""
        from flowdflash.target.generate import stop_ids
        from flowdflash.target.load import load_target, load_tokenizer, replica_device

        config = self.config
        self._seed = ctx.seed if config.seed == "pipeline" else config.seed
        self._target = load_target(
            config.model,
            ctx.cache_dir,
            dtype=config.dtype,
            device=replica_device(config.device, ctx.replica),
            report=ctx.report,
        )
        self._tokenizer = load_tokenizer(config.model, ctx.cache_dir, ctx.report)
        self._stops = stop_ids(self._target, self._tokenizer)

    def generate(self, batch: TokenBatch) -> GeneratedBatch:
        """One response per prompt."""
        from flowdflash.target.generate import Sampling, generate_answers

        assert self._target is not None, "generate before open"
        config = self.config
        started = time.monotonic()
        answers = generate_answers(
            self._target,
            self._tokenizer,
            batch,
            stops=self._stops,
            max_new_tokens=config.max_new_tokens,
            sampling=Sampling(config.temperature, config.top_p, config.top_k),
            seed=_batch_seed(self._seed, batch.info.seq),
        )
        self._secs += time.monotonic() - started
        self._responses += len(answers)
        self._tokens += sum(answer.tokens for answer in answers)
        self._cut += sum(answer.finish_reason == "length" for answer in answers)
        return GeneratedBatch(
            batch.info,
            tuple(answer.text for answer in answers),
            tuple(answer.tokens for answer in answers),
            tuple(answer.finish_reason for answer in answers),
            batch.rows,
        )

    @property
    def on_cpu(self) -> bool:
        """It computes on the CPU."""
        return self._target is not None and self._target.device.type == "cpu"

    def close(self) -> None:
        """Let go of the model."""
        self._target = self._tokenizer = None

    def summary(self) -> Mapping[str, Any]:
        """How much was written, and how fast."""
        return {
            "responses": self._responses,
            "responses_cut": self._cut,
            "response_tokens": self._tokens,
            "tokens_per_sec": round(self._tokens / self._secs, 1) if self._secs else 0.0,
        }


def _batch_seed(seed: int, seq: int) -> int:
    """Unrelated seeds for the batches of a run; seeds one apart must not share a stream."""
    return int.from_bytes(hashlib.sha256(f"{seed} {seq}".encode()).digest()[:7], "big")
