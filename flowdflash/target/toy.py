"""Tiny random targets, named by a string of the form ``toy:{...}``: for tests, demonstrations and scheduling studies.

The JSON after ``toy:`` holds the fields of ``ToyModel``; those left out take their defaults, so ``toy:{}`` is a model.
Wherever a model can be named, such a string can stand: target, drafter and evaluator then load the same weights, since
the first of them builds the folder in the cache and the others read it. A toy of at least 261 rows comes with a byte
tokenizer, so that it can be used from text to text.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

PREFIX = "toy:"
BYTE_TOKENS = {"pad": 256, "start": 257, "end": 258, "end_of_text": 259, "mask": 260}
"""Ids after the 256 bytes; rows above stay free."""

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class ToyModel:
    """Shape and seed of a random decoder. ``mask_token_id`` -1 takes 260, or the last row of a smaller vocabulary."""

    family: str = "llama"
    hidden_size: int = 32
    num_layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    intermediate_size: int = 64
    vocab_size: int = 272
    max_position_embeddings: int = 4096
    tied: bool = False
    seed: int = 0
    mask_token_id: int = -1

    def __post_init__(self) -> None:
        if self.family not in ("llama", "qwen3"):
            raise ValueError(f"unknown family {self.family!r} of a toy model (llama or qwen3)")
        for field in fields(self):
            if field.name in ("seed", "mask_token_id", "family", "tied"):
                continue
            if not isinstance(getattr(self, field.name), int) or getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} of a toy model must be a positive whole number")
        if self.heads % self.kv_heads:
            raise ValueError(f"a toy model's heads ({self.heads}) must be a multiple of its kv_heads ({self.kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"a toy model's head_dim ({self.head_dim}) must be even for rotary positions")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside a vocabulary of {self.vocab_size} rows")

    @classmethod
    def from_ref(cls, ref: str) -> ToyModel:
        """Read a reference.

        Raises:
            ValueError: it is not JSON, or has unknown or impossible fields.
        """
        try:
            options = json.loads(ref.removeprefix(PREFIX))
        except json.JSONDecodeError as error:
            raise ValueError(f"what follows 'toy:' is not JSON: {error}") from None
        if not isinstance(options, dict):
            raise ValueError("what follows 'toy:' must be a JSON object")
        unknown = set(options) - {f.name for f in fields(cls)}
        if unknown:
            known = ", ".join(f.name for f in fields(cls))
            raise ValueError(f"a toy model has no {', '.join(sorted(unknown))}; it has {known}")
        return cls(**options)

    @property
    def ref(self) -> str:
        """The reference, in one normal form."""
        return PREFIX + json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @property
    def has_tokenizer(self) -> bool:
        """There is room for the byte tokenizer."""
        return self.vocab_size > BYTE_TOKENS["mask"]

    def facts(self) -> dict[str, Any]:
        """The same facts as of a known model."""
        mask = self.mask_token_id
        if mask < 0:
            mask = BYTE_TOKENS["mask"] if self.has_tokenizer else self.vocab_size - 1
        return {
            "model_type": self.family,
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "tied": self.tied,
            "mask_token_id": mask,
        }


def build_toy(toy: ToyModel, models_dir: Path) -> Path:
    """The folder of a toy model, built from its seed if it is not there yet."""
    import torch
    import transformers
    from filelock import FileLock

    versions = f"{torch.__version__} {transformers.__version__}"
    name = f"toy-{hashlib.sha256(f'{toy.ref} {versions}'.encode()).hexdigest()[:16]}"
    folder = models_dir / name
    if (folder / "config.json").exists():
        return folder
    models_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(models_dir / f"{name}.lock"):
        if not (folder / "config.json").exists():
            from flowdflash.target.fetch import save_folder

            save_folder(folder, _toy_model(toy), _byte_tokenizer() if toy.has_tokenizer else None)
    return folder


def _toy_model(toy: ToyModel) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    byte = BYTE_TOKENS if toy.has_tokenizer else {}
    config_class, model_class = (
        (LlamaConfig, LlamaForCausalLM) if toy.family == "llama" else (Qwen3Config, Qwen3ForCausalLM)
    )
    config = config_class(
        hidden_size=toy.hidden_size,
        num_hidden_layers=toy.num_layers,
        num_attention_heads=toy.heads,
        num_key_value_heads=toy.kv_heads,
        head_dim=toy.head_dim,
        intermediate_size=toy.intermediate_size,
        vocab_size=toy.vocab_size,
        max_position_embeddings=toy.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=toy.tied,
        bos_token_id=None,
        eos_token_id=byte.get("end"),
        pad_token_id=byte.get("pad"),
        # Random layers of the usual 0.02 leave a small model's states close to its embeddings; taps would look alike.
        initializer_range=0.2,
    )
    model = model_class(config)
    # A generator of its own: the global one belongs to whoever else is running.
    draw = torch.Generator().manual_seed(toy.seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(
                    0.0, 0.2 if "embed" in name or "lm_head" in name else weight.shape[1] ** -0.5, generator=draw
                )
    return model


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-untyped]
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    symbols = bytes_to_unicode()
    raw = Tokenizer(models.BPE(vocab={symbols[byte]: byte for byte in range(256)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    names = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|mask|>"]
    raw.add_special_tokens(names)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token=names[0],
        eos_token=names[2],
        mask_token=names[4],
        additional_special_tokens=[names[1], names[3]],
    )
    tokenizer.chat_template = _CHATML
    return tokenizer
