"""What a run will hold in memory and on disk, from facts alone: features, channels, checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowdflash.graph import Edge, Graph
from flowdflash.items import BatchTable, FeatureBatch, TokenBatch
from flowdflash.runtime.plan import window_of

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_TOKEN_BYTES = 8 + 1
"""Of a padded token: its id and its place in the loss mask."""

_BEHIND_REPLICAS = ("target-forward", "generator")


def memory(graph: Graph, table: BatchTable, ordering: str, folder: Path) -> dict[str, Any]:
    """Features per batch, most bytes per edge, checkpoints against the free space of ``folder``."""
    features = feature_bytes(graph, table)
    return {
        "features": features,
        "edges": [
            _edge(graph, edge, table, features, ordering)
            for edge in graph.edges
            if issubclass(edge.payload, TokenBatch | FeatureBatch)
        ],
        "checkpoints": _checkpoints(graph, folder),
    }


def feature_bytes(graph: Graph, table: BatchTable) -> dict[str, Any] | None:
    """Bytes of the target's features; None where the target does not say its width and taps without being opened.

    Where its precision is decided at run time, the smaller of the two is assumed.
    """
    for node in graph.of_kind("target-forward"):
        told = graph.returned.get(node.name, {})
        if not {"hidden_size", "layers"} <= set(told):
            return None
        dtype = str(told.get("dtype", "bfloat16"))
        columns = len(told["layers"]) * int(told["hidden_size"])
        per_token = columns * _ITEM_BYTES.get(dtype, 4)
        return {
            "dtype": dtype,
            "dtype_assumed": "dtype" not in told,
            "bytes_per_token": per_token,
            "mean_batch_bytes": float(table.padded_tokens.mean()) * per_token if len(table) else 0.0,
            "largest_batch_bytes": int(table.padded_tokens.max(initial=0)) * per_token,
            "epoch_bytes": int(table.tokens.sum()) * per_token,
        }
    return None


def _edge(
    graph: Graph, edge: Edge, table: BatchTable, features: Mapping[str, Any] | None, ordering: str
) -> dict[str, Any]:
    """Most items and bytes that may wait on an edge, were every batch the largest."""
    reader, writer = graph.nodes[edge.target], graph.nodes[edge.source]
    inboxes = _copies(graph, edge.target)
    items = edge.capacity
    ordered = writer.kind in _BEHIND_REPLICAS and ordering == "plan" and len(reader.inputs) == 1
    if ordered and _copies(graph, edge.source) > 1:
        # Batches that overtook the one that is due wait here, so that results do not depend on timing.
        items = max(items, 4 * _copies(graph, edge.source))
    largest = int(table.padded_tokens.max(initial=0)) * _TOKEN_BYTES + int(table.sizes.max(initial=0)) * 8
    known = True
    if issubclass(edge.payload, FeatureBatch):
        known = features is not None
        largest += features["largest_batch_bytes"] if features else 0
    most = items * largest
    if edge.capacity_bytes:
        # The batch that is due is never held up by bytes, nor is any batch of a drafter's first window.
        free = min(items, window_of(graph, reader.name)) if reader.kind == "drafter" else 1
        most = min(most, max(edge.capacity_bytes + largest, free * largest))
    return {
        "edge": edge.name,
        "capacity": items * inboxes,
        "capacity_bytes": edge.capacity_bytes,
        "most_bytes": most * inboxes if known else None,
    }


def _copies(graph: Graph, name: str) -> int:
    node = graph.nodes[name]
    return int(getattr(node.config, "replicas", 1)) if node.kind in _BEHIND_REPLICAS else 1


def _checkpoints(graph: Graph, folder: Path) -> list[dict[str, Any]]:
    """Per sink that says how large a checkpoint is: that, how many there are at once, and the room for them."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    found = []
    for node in graph.of_kind("sink"):
        told = graph.returned.get(node.name, {})
        if {"checkpoint_bytes", "checkpoints"} <= set(told):
            total = int(told["checkpoint_bytes"]) * int(told["checkpoints"])
            found.append(
                {
                    "sink": node.name,
                    "checkpoint_bytes": int(told["checkpoint_bytes"]),
                    "checkpoints": int(told["checkpoints"]),
                    "total_bytes": total,
                    "folder": str(folder),
                    "free_bytes": free,
                    "fits": total <= free,
                }
            )
    return found
