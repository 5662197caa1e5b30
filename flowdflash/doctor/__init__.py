"""Says whether a draft on disk is what was trained and what will be served; and if not, what is wrong with it.

``examine`` looks at a checkpoint in phases, from its files to its behaviour. A phase that finds a fault is the last:
what comes after would only show the same fault again. ``overfit`` is the other direction: can a pipeline train at all?
"""

from flowdflash.doctor.examination import examine
from flowdflash.doctor.finding import Finding
from flowdflash.doctor.gate import GateResult, overfit
from flowdflash.doctor.patient import Patient

__all__ = ["Finding", "GateResult", "Patient", "examine", "overfit"]
