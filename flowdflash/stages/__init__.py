"""The built-in stages, one file each, registered through the same hook as those of any plugin."""

from __future__ import annotations

from flowdflash.plugin import hookimpl
from flowdflash.plugin.registry import Registry


@hookimpl
def flowdflash_register(registry: Registry) -> None:
    """Add the built-in stages."""
    from flowdflash.stages.acceptance import AcceptanceSink
    from flowdflash.stages.chat_jsonl import ChatJsonl
    from flowdflash.stages.chat_parquet import ChatParquet
    from flowdflash.stages.dflash_drafter import DFlashDrafter
    from flowdflash.stages.equal_token import EqualTokenBucketer
    from flowdflash.stages.hf_dataset import HfDataset
    from flowdflash.stages.jsonl import Jsonl
    from flowdflash.stages.least_outstanding import LeastOutstanding
    from flowdflash.stages.length import LengthBucketer
    from flowdflash.stages.mix import Mix
    from flowdflash.stages.openai_generator import OpenAIGenerator
    from flowdflash.stages.optimal import OptimalBucketer
    from flowdflash.stages.pull import Pull
    from flowdflash.stages.responses import Responses
    from flowdflash.stages.round_robin import RoundRobin
    from flowdflash.stages.shuffle import Shuffle
    from flowdflash.stages.sorted_budget import SortedBudgetBucketer
    from flowdflash.stages.synthetic_lengths import SyntheticLengths
    from flowdflash.stages.tokens import Tokens
    from flowdflash.stages.toy_target import ToyTarget
    from flowdflash.stages.transformers_generator import TransformersGenerator
    from flowdflash.stages.transformers_target import TransformersTarget

    for stage in (
        ChatJsonl,
        ChatParquet,
        HfDataset,
        Tokens,
        Mix,
        SyntheticLengths,
        LengthBucketer,
        EqualTokenBucketer,
        OptimalBucketer,
        SortedBudgetBucketer,
        Shuffle,
        Pull,
        LeastOutstanding,
        RoundRobin,
        TransformersTarget,
        ToyTarget,
        TransformersGenerator,
        OpenAIGenerator,
        DFlashDrafter,
        Jsonl,
        AcceptanceSink,
        Responses,
    ):
        registry.register(stage)
