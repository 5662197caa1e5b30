"""A byte tokenizer, chat templates and rows that the tests of the data layer share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

START, END = 257, 258
SPECIALS = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|mask|>")

HEAD = "{{ '<|im_start|>' + m['role'] + '\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
T_PLAIN = "{% for m in messages %}" + HEAD + "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}" + PROMPT
MARKED = (
    "{% if m['role'] == 'assistant' %}GEN{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)
ANSWER = "{{ m['content'] + '<|im_end|>' }}"
T_GEN = (
    "{% for m in messages %}"
    + HEAD
    + MARKED.replace("GEN", "{% generation %}" + ANSWER + "{% endgeneration %}")
    + PROMPT
)
T_GENWS = (
    "{% for m in messages %}"
    + HEAD
    + MARKED.replace("GEN", " {%- generation -%} " + ANSWER + " {%- endgeneration -%} ")
    + PROMPT
)
# Drops what an answer thought, from all but the last answer.
T_THINK = (
    "{% for m in messages %}"
    + HEAD
    + "{% if m['role'] == 'assistant' and not loop.last and '</think>' in m['content'] %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    + PROMPT
)
# Puts an empty think block before an answer without one; with thinking off, the generation prompt brings it along.
T_EMPTY_THINK = (
    "{% for m in messages %}" + HEAD + "{% if m['role'] == 'assistant' and '<think>' not in m['content'] %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    + PROMPT
    + "{% if add_generation_prompt and thinking is defined and not thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)
T_TOOLS = (
    "{% if tools %}{{ 'tools ' + (tools | tojson) + '\n' }}{% endif %}{% for m in messages %}"
    + HEAD
    + "{{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
    "{{ c['function']['name'] + (c['function']['arguments'] | tojson) }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    + PROMPT
)


def byte_names() -> list[str]:
    """The printable stand-in of each byte, in the order of the bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    names = {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [names[byte] for byte in range(256)]


def make_tokenizer(template: str | None = T_PLAIN, merges: tuple[tuple[str, str], ...] = ()) -> Any:
    """Ids 0-255 are bytes, 256 and up the special tokens, after these one id per merge."""
    names = byte_names()
    vocabulary = {name: number for number, name in enumerate([*names, *SPECIALS])}
    for number, (left, right) in enumerate(merges):
        vocabulary[left + right] = 261 + number
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.chat_template = template
    return tokenizer


def say(*turns: str, system: str = "") -> dict[str, Any]:
    """A row whose turns alternate between user and assistant."""
    messages = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    messages += [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]
    return {"messages": messages}


def f_row(user: int, answer: int) -> dict[str, Any]:
    """One user and one assistant message of so many letters: 21 + user + answer tokens under T_PLAIN."""
    return say("u" * user, "a" * answer)


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path
