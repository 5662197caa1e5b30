"""What a run will hold in host memory at its peak, where it computes on the CPU: an estimate from facts alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowdflash.graph import Graph, Node
from flowdflash.items import BatchTable, Checkpoint
from flowdflash.target.catalogue import facts_of

_PROGRAM_BYTES = 700 << 20
"""Python, torch, transformers and a tokenizer, with nothing loaded yet (measured)."""
_KERNEL_BYTES, _MOST_KERNELS = 700 << 10, 1024
"""In bfloat16 oneDNN keeps a compiled kernel per matrix shape (measured), at most so many."""
_SHAPES_PER_BATCH = 20
"""Matrix shapes that change with the tokens of a batch: forward, backward by input and by weight."""
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def host_memory(graph: Graph, table: BatchTable, memory: Mapping[str, Any]) -> dict[str, int] | None:
    """Bytes by what holds them; None if a target does not tell its size. ``memory`` is what the edges hold at most."""
    targets = graph.of_kind("target-forward")
    sizes = {node.name: _parameters(graph, node) for node in targets}
    if not targets or None in sizes.values():
        return None
    parts = {"program": _PROGRAM_BYTES}
    for node in targets:
        held = int(sizes[node.name] or 0) * _item_bytes(node, "dtype") * int(getattr(node.config, "replicas", 1))
        parts[f"weights of {node.name}"] = held
    for node in graph.of_kind("drafter"):
        parts |= _of_drafter(graph, node, table)
    for node in graph.of_kind("sink"):
        parts |= _of_evaluator(graph, node)
    parts["batches on edges"] = sum(int(edge["most_bytes"] or 0) for edge in memory["edges"])
    if any(_item_bytes(node, "dtype") == 2 for node in targets):
        shapes = _SHAPES_PER_BATCH * len(set(table.padded_tokens.tolist()))
        parts["compiled kernels"] = min(shapes, _MOST_KERNELS) * _KERNEL_BYTES
    parts |= _kept_features(graph, memory)
    return {name: held for name, held in parts.items() if held}


def _of_drafter(graph: Graph, node: Node, table: BatchTable) -> dict[str, int]:
    """Draft with gradient and moments, the target's tables, a chunk of logits; snapshots on their way to sinks."""
    told, facts, config = graph.returned.get(node.name, {}), node.facts, node.config
    draft = int(told.get("draft_parameters", 0))
    vocab, width = int(facts.get("vocab_size", 0)), int(facts.get("hidden_size", 0))
    slots = int(table.sizes.max(initial=0)) * int(told.get("num_anchors", 0)) * (int(told.get("span", 1)) - 1)
    chunk = min(slots, int(getattr(config, "chunk_slots", 0)) or slots)
    waiting = sum(edge.capacity + 1 for edge in graph.outputs(node.name) if edge.payload is Checkpoint)
    tables = 2 * vocab * width * _item_bytes(node, "precision")
    return {
        # Weight, gradient and two moments in fp32; a snapshot has no gradient.
        f"{node.name} with its optimizer": draft * 16 + tables + 2 * 4 * chunk * vocab,
        "checkpoints on their way": draft * 12 * waiting,
    }


def _of_evaluator(graph: Graph, node: Node) -> dict[str, int]:
    """A copy of the target of its own, and the logits of the blocks that it verifies at once."""
    size = _parameters(graph, node)
    if Checkpoint not in node.cls.reads or getattr(node.cls, "saves", True) or size is None:
        return {}
    rows = int(getattr(node.config, "batch_size", 1)) * int(node.facts.get("span", 1))
    item = _ITEM_BYTES.get(str(getattr(node.config, "dtype", "float32")), 4)
    return {f"target of {node.name}": size * item + 2 * 4 * rows * int(node.facts.get("vocab_size", 0))}


def _kept_features(graph: Graph, memory: Mapping[str, Any]) -> dict[str, int]:
    """Features that are read back from disk are mapped; the system may drop them when it needs the room."""
    features = memory["features"]
    keeps = [n.config.max_bytes for n in graph.of_kind("target-forward") if getattr(n.config, "keep", "") == "disk"]
    again = any(int(node.facts.get("epochs", 1)) > 1 for node in graph.of_kind("target-forward"))
    if not (features and keeps and again):
        return {}
    return {"kept features, mapped": min(int(features["epoch_bytes"]), max(keeps) or int(features["epoch_bytes"]))}


def _parameters(graph: Graph, node: Node) -> int | None:
    """Of the target that a stage loads, from its shape; None where that is not known without opening it."""
    told = graph.returned.get(node.name, {}).get("model")
    ref = getattr(node.config, "model", None) or told or node.facts.get("model")
    facts = (facts_of(ref) if isinstance(ref, str) else None) or {}
    if "num_experts" in facts:
        return None
    try:
        width, heads, kv = int(facts["hidden_size"]), int(facts["num_heads"]), int(facts["num_kv_heads"])
        head_dim, inner, vocab = int(facts["head_dim"]), int(facts["intermediate_size"]), int(facts["vocab_size"])
        layers, tied = int(facts["num_layers"]), bool(facts.get("tied", False))
    except KeyError:
        return None
    layer = width * head_dim * 2 * (heads + kv) + 3 * width * inner + 2 * width
    return layers * layer + vocab * width * (1 if tied else 2) + width


def _item_bytes(node: Node, option: str) -> int:
    named = _ITEM_BYTES.get(str(getattr(node.config, option, "float32")))
    return named if named is not None else 2 if _fast_bfloat16() else 4


def _fast_bfloat16() -> bool:
    """This CPU computes bfloat16 itself, so that ``auto`` chooses it."""
    cpu = Path("/proc/cpuinfo")
    text = cpu.read_text(encoding="utf-8", errors="replace") if cpu.is_file() else ""
    return any(flag in text for flag in ("avx512_bf16", "amx_bf16"))
