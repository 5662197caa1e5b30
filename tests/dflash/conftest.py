"""Tiny random targets and drafts: hidden 32, four target layers, two draft layers, blocks of four."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from drafter_fakes import draft_config
from torch import Tensor

from flowdflash.dflash.anchors import draw_anchors
from flowdflash.dflash.head import Head
from flowdflash.dflash.loss import LossSums
from flowdflash.dflash.model import DFlashDraft, DraftConfig
from flowdflash.dflash.training import LossOptions, training_loss

CONFIG = draft_config()


@dataclass(frozen=True)
class Rows:
    """A batch of rows with everything that the loss wants."""

    input_ids: Tensor
    loss_mask: Tensor
    lengths: Tensor
    features: Tensor
    last_hidden: Tensor
    embed: Tensor
    head: Tensor
    sample_ids: tuple[int, ...]

    def take(self, rows: list[int], columns: int | None = None) -> Rows:
        wide = ("input_ids", "loss_mask", "features", "last_hidden")
        part = {name: getattr(self, name)[rows] for name in (*wide, "lengths")}
        if columns is not None:
            part.update({name: part[name][:, :columns] for name in wide})
        return replace(self, **part, sample_ids=tuple(self.sample_ids[i] for i in rows))

    def loss(self, draft: DFlashDraft, *, num_anchors: int = 8, options: LossOptions | None = None) -> LossSums:
        anchors, keep = draw_anchors(
            self.loss_mask.numpy(), self.lengths.numpy(), self.sample_ids, num_anchors=num_anchors, seed=7, epoch=0
        )
        return training_loss(
            draft,
            self.embed,
            Head(self.head),
            self.input_ids,
            self.loss_mask,
            self.lengths,
            self.features,
            anchors,
            keep,
            options or LossOptions(),
            last_hidden=self.last_hidden,
        )


def build_rows(lengths: list[int], prompt: int = 5, seed: int = 0, config: DraftConfig = CONFIG) -> Rows:
    """Random rows of the given lengths, supervised from ``prompt`` on, right-padded to the longest."""
    rng = torch.Generator().manual_seed(seed)
    b, S = len(lengths), max(lengths)
    sizes = torch.tensor(lengths)
    place = torch.arange(S)
    real = place < sizes[:, None]
    return Rows(
        input_ids=torch.randint(0, config.vocab_size - 20, (b, S), generator=rng) * real,
        loss_mask=real & (place >= prompt),
        lengths=sizes,
        features=torch.randn(b, S, config.num_features * config.hidden_size, generator=rng),
        last_hidden=torch.randn(b, S, config.hidden_size, generator=torch.Generator().manual_seed(seed + 1)),
        embed=torch.randn(config.vocab_size, config.hidden_size, generator=rng),
        head=torch.randn(config.vocab_size, config.hidden_size, generator=rng) * 0.2,
        sample_ids=tuple(range(10, 10 + b)),
    )


def build_draft(seed: int = 0, scale: float = 5.0, **changes: Any) -> DFlashDraft:
    """A draft whose random weights are large enough for its output to depend on everything it sees."""
    draft = DFlashDraft(replace(CONFIG, **changes), seed=seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return draft


def build_target(
    seed: int = 0,
    *,
    family: str = "llama",
    vocab_size: int = 272,
    tied: bool = False,
    attention: str = "sdpa",
    **changes: Any,
) -> Any:
    """A random Llama or Qwen3 in fp64, so that equal greedy choices do not hang on rounding."""
    import transformers

    names = {"llama": ("LlamaConfig", "LlamaForCausalLM"), "qwen3": ("Qwen3Config", "Qwen3ForCausalLM")}
    config_cls, model_cls = (getattr(transformers, name) for name in names[family])
    config = config_cls(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=vocab_size,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        attn_implementation=attention,
        **changes,
    )
    torch.manual_seed(seed)
    return model_cls(config).double().eval().requires_grad_(False)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors of a few hundred numbers lose more to threads than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def config() -> DraftConfig:
    return CONFIG


@pytest.fixture
def make_rows() -> Callable[..., Rows]:
    return build_rows


@pytest.fixture
def make_draft() -> Callable[..., DFlashDraft]:
    return build_draft


@pytest.fixture
def make_target() -> Callable[..., Any]:
    return build_target
