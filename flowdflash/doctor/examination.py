"""The phases of an examination, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flowdflash.doctor.finding import Finding, fault
from flowdflash.doctor.parity import leak, parity
from flowdflash.doctor.patient import Patient
from flowdflash.doctor.readings import readings
from flowdflash.doctor.structure import config, files, target, tensors
from flowdflash.doctor.symptoms import acceptance, data, training
from flowdflash.errors import ModelInvalid

Check = Callable[[Patient], Iterator[Finding]]
PHASES: dict[str, tuple[Check, str]] = {
    "config": (config, "correct the file, or export the draft again"),
    "tensors": (tensors, "export the draft again, or take another checkpoint"),
    "files": (files, "export the draft again, or take another checkpoint"),
    "target": (target, "name the target that the draft was trained for (--target), or fetch it again"),
    "leak": (leak, ""),
    "parity": (parity, ""),
    "readings": (readings, ""),
    "training": (training, ""),
    "acceptance": (acceptance, ""),
    "data": (data, ""),
}
"""Each check, and what to do if the thing that it looks at cannot even be read."""


def examine(patient: Patient) -> list[Finding]:
    """All findings; after a phase with a fault, which explains whatever comes after, the rest is skipped."""
    found: list[Finding] = []
    for name, (check, advice) in PHASES.items():
        if any(finding.status == "fault" for finding in found):
            found.append(Finding(name, "skipped", "not looked at: first put right what is above"))
            continue
        patient.report.info(f"looking at {name}")
        try:
            found += check(patient)
        except ModelInvalid as error:
            found.append(fault(name, str(error), advice or "see the message"))
    return found
