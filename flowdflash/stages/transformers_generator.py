"""Lets the target write the responses that a draft should learn: a draft predicts its target best on its own words."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from flowdflash.generation import (
    Message,
    SamplingOptions,
    answer_in_turn,
    answer_seed,
    check_generator,
    checked_rows,
)
from flowdflash.items import Answer, GeneratedBatch, IntArray, TokenBatch
from flowdflash.stage import Check, Generator, ModelRef, OpenContext
from flowdflash.target.catalogue import facts_of, ref_problem, same_model
from flowdflash.target.devices import ReplicaDevices, devices_problem

if TYPE_CHECKING:
    from flowdflash.target.load import LoadedTarget


class TransformersGenerator(Generator):
    """Answers batches of prompts with a transformers model. Batches of prompts of like length run fastest.

    A prompt with several turns of a user is answered turn by turn, all prompts of a batch at once.
    """

    type = "transformers"
    safe_to_change = frozenset({"replicas"})

    class Config(SamplingOptions):
        """Options of the generator."""

        model: ModelRef = Field(
            description="Who answers: a folder (./model), a name (SmolLM2-135M-Instruct) or a Hugging Face id."
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
        self._encoder: Any = None
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
        check_generator(check, config)
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
        message, hint = devices_problem(config.device, config.replicas)
        if message:
            check.refuse("device", message, hint)
        return {"model": config.model, "max_new_tokens": config.max_new_tokens, "replicas": config.replicas}

    def open(self, ctx: OpenContext) -> None:
        """Load model and tokenizer."""
        from flowdflash.data.encode import ChatEncoder, EncodeOptions
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
        # Later turns are rendered as the source has rendered the first.
        options = EncodeOptions(
            task="generate",
            prompt_until="end",
            max_length=(self._target.max_positions or 1 << 31) - config.max_new_tokens,
            template_options=ctx.facts.get("template_options", {}),
        )
        self._encoder = ChatEncoder(self._tokenizer, options)

    def generate(self, batch: TokenBatch) -> GeneratedBatch:
        """The answers to each prompt."""
        started = time.monotonic()
        rows = checked_rows(batch.rows, batch.info.samples)
        first = [batch.input_ids[place] for place in batch.info.places]

        def ask(turn: int, places: Sequence[int], said: Sequence[Sequence[Message]]) -> list[Answer]:
            prompts = [first[n] for n in places] if turn == 0 else self._rendered([rows[n] for n in places], said)
            seeds = [answer_seed(self._seed, batch.info.epoch, batch.info.sample_ids[n], turn) for n in places]
            return self._answers(prompts, seeds)

        answers = answer_in_turn(rows, ask)
        self._secs += time.monotonic() - started
        for answer in (answer for turns in answers for answer in turns if not answer.rejected):
            self._responses += 1
            self._tokens += answer.tokens
            self._cut += answer.finish_reason == "length"
        return GeneratedBatch(batch.info, answers, batch.rows)

    def _answers(self, prompts: Sequence[IntArray | Answer], seeds: Sequence[int]) -> list[Answer]:
        """An answer for each prompt; one that stands for a prompt which cannot be asked stays as it is."""
        from flowdflash.dflash.sampling import Sampling
        from flowdflash.target.generate import generate_answers

        assert self._target is not None, "generate before open"
        config = self.config
        asked = [(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True) if not isinstance(prompt, Answer)]
        made = iter(
            generate_answers(
                self._target,
                self._tokenizer,
                [prompt for prompt, _ in asked],
                stops=self._stops,
                max_new_tokens=config.max_new_tokens,
                sampling=Sampling(config.temperature, config.top_p, config.top_k),
                seeds=[seed for _, seed in asked],
            )
            if asked
            else ()
        )
        return [prompt if isinstance(prompt, Answer) else next(made) for prompt in prompts]

    def _rendered(
        self, rows: Sequence[Mapping[str, Any]], said: Sequence[Sequence[Message]]
    ) -> list[IntArray | Answer]:
        """Tokens of conversations that end in a question; an answer with the reason for one that cannot be asked."""
        from flowdflash.data.rows import Row

        values = [{**row, "messages": list(messages)} for row, messages in zip(rows, said, strict=True)]
        results = self._encoder.encode([Row(0, value) for value in values])
        return [
            result.samples[0].ids
            if result.samples
            else Answer("", 0, rejected=result.rejections[0].reason, detail=result.rejections[0].detail)
            for result in results
        ]

    @property
    def on_cpu(self) -> bool:
        """It computes on the CPU."""
        return self._target is not None and self._target.device.type == "cpu"

    def close(self) -> None:
        """Let go of the model."""
        self._target = self._tokenizer = self._encoder = None

    def summary(self) -> Mapping[str, Any]:
        """How much was written, and how fast."""
        return {
            "responses": self._responses,
            "responses_cut": self._cut,
            "response_tokens": self._tokens,
            "tokens_per_sec": round(self._tokens / self._secs, 1) if self._secs else 0.0,
        }
