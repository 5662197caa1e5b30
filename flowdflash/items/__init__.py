"""What travels between stages: frozen records of numpy columns and, after the dispatcher, tensors.

Two planes. On the planning plane a ``SampleTable`` and a ``BatchTable`` describe samples and batches as columns of
numbers; nothing there holds a token. On the data plane a ``TokenBatch`` and a ``FeatureBatch`` hold tensors. A
``BatchInfo`` rides with its batch from the plan to the optimizer step, so that loss, norm and latency can be told per
bucket without a counter on the side.

Standard library and numpy only: tensors are typed ``Any`` so that planning never imports torch.
"""

from flowdflash.items.batches import (
    Answer,
    BatchInfo,
    FeatureBatch,
    GeneratedBatch,
    HeadProbe,
    TokenBatch,
    batch_info,
)
from flowdflash.items.steps import Checkpoint, StepRecord
from flowdflash.items.tables import BatchTable, FloatArray, IntArray, SampleTable, read_only

__all__ = [
    "Answer",
    "BatchInfo",
    "BatchTable",
    "Checkpoint",
    "FeatureBatch",
    "FloatArray",
    "GeneratedBatch",
    "HeadProbe",
    "IntArray",
    "SampleTable",
    "StepRecord",
    "TokenBatch",
    "batch_info",
    "read_only",
]
