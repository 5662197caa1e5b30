"""What the sources of conversations share, whatever their rows lie in: options, checks and the encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from flowdflash.data.chat import RESERVED_OPTIONS
from flowdflash.data.encode import ChatEncoder, EncodeOptions
from flowdflash.data.split import Split
from flowdflash.data.stored import StoredOptions, StoredSource
from flowdflash.stage import Check, ModelRef, OpenContext
from flowdflash.target.catalogue import ref_problem


class ChatOptions(StoredOptions):
    """Options of every source of conversations."""

    tokenizer: ModelRef = Field(description="the target, whose tokenizer and chat template are used; as its `model`")
    task: Literal["train", "generate"] = Field(
        "train",
        description="train: conversations with a loss mask; generate: prompts for the target to answer, never cut",
    )
    prompt_until: Literal["first_answer", "last_answer", "every_answer"] = Field(
        "first_answer",
        description="task generate: a prompt is everything before the first or the last answer of its row; "
        "every_answer: all its questions, asked one after the other",
    )
    surrogates: Literal["reject", "replace"] = Field(
        "reject", description="half a surrogate pair makes its row a bad one, or becomes U+FFFD"
    )
    generation_marks: Literal["check", "ignore"] = Field(
        "check",
        description="the loss mask must agree with the template's generation marks, or they are not looked at",
    )
    template_options: dict[str, bool | int | float | str] = Field(
        {},
        description="switches of the chat template, such as enable_thinking, for rows that do not say otherwise in "
        "chat_template_kwargs; a template that writes the date of today gets 1 January 2025 on any day",
    )
    split: Literal["all", "train", "held_out"] = Field(
        "all", description="which part of the rows; a prompt, with all its answers, is always in one part"
    )
    held_out_share: float = Field(0.0, ge=0, lt=1, description="share of the distinct prompts that is held out")
    held_out_rows: int = Field(0, ge=0, description="or the number of distinct prompts that is held out")


class ChatSource(StoredSource):
    """Renders conversations with the chat template of the target.

    What the target would have written itself is supervised: the text of each answer and its end-of-turn token, nothing
    that the template or its generation prompt supplies.
    """

    config: ChatOptions

    def check(self, check: Check) -> Mapping[str, Any]:
        """The options fit each other."""
        config = self.config
        message, hint = ref_problem(config.tokenizer)
        if message:
            check.refuse("tokenizer", message, hint)
        self._check_task(check)
        self._check_split(check)
        for name in sorted(RESERVED_OPTIONS & set(config.template_options)):
            check.refuse(f"template_options.{name}", f"{name} is no switch of a chat template", "remove it")
        return {
            "tokenizer": config.tokenizer,
            "max_length": config.max_length,
            "epochs": config.epochs,
            "task": config.task,
            "template_options": dict(config.template_options),
        }

    def _check_task(self, check: Check) -> None:
        config, given = self.config, self.config.model_fields_set
        if config.task == "train" and "prompt_until" in given:
            check.refuse(
                "prompt_until", "only prompts have it, but the task is train", "remove it, or set task: generate"
            )
        if config.task == "generate" and "over_long" in given and config.over_long == "truncate":
            check.refuse("over_long", "a prompt cut short would ask something else", "set over_long: drop")
        if config.task == "generate" and "generation_marks" in given:
            check.refuse("generation_marks", "prompts have no loss mask to compare", "remove it, or set task: train")

    def _check_split(self, check: Check) -> None:
        config = self.config
        named = [name for name in ("held_out_share", "held_out_rows") if getattr(config, name)]
        if len(named) == 2:
            check.refuse("held_out_rows", "held_out_share says already how much is held out", "keep one of the two")
        if config.split == "all":
            for name in named:
                check.refuse(name, "nothing is held out with split: all", "set split: train or split: held_out")
        elif not named:
            check.refuse("split", f"split: {config.split} needs to know how much is held out", "set held_out_share")

    def _encoder(self, ctx: OpenContext) -> ChatEncoder:
        from flowdflash.target.load import load_tokenizer

        config = self.config
        split = Split(config.split, share=config.held_out_share, prompts=config.held_out_rows, rows=self._input.read)
        options = EncodeOptions(**{name: getattr(config, name) for name in EncodeOptions.__dataclass_fields__})
        return ChatEncoder(load_tokenizer(config.tokenizer, ctx.cache_dir, ctx.report), options, split)

    def _mask_hint(self) -> str:
        return f"that the chat template of {self.config.tokenizer} writes a header before each turn"
