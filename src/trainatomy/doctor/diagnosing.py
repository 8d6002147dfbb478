"""All checks of a machine."""

from __future__ import annotations

from dataclasses import replace

from trainatomy.doctor.checks.gpus import check_gpus
from trainatomy.doctor.checks.host import check_host
from trainatomy.doctor.checks.links import check_links
from trainatomy.doctor.checks.software import check_software
from trainatomy.doctor.checks.training import check_training
from trainatomy.results.diagnosis import SEVERITIES, Diagnosis, Finding
from trainatomy.results.machine import MachineState

CHECKS = (check_software, check_gpus, check_links, check_host, check_training)


def diagnose(machine: MachineState) -> Diagnosis:
    """Return the findings on a machine, worst first; what several GPUs have in common is one finding."""
    found: list[Finding] = []
    for each in (finding for check in CHECKS for finding in check(machine)):
        same = next((one for one in found if replace(one, gpus=each.gpus) == each and each.gpus), None)
        if same is None:
            found.append(each)
        else:
            found[found.index(same)] = replace(same, gpus=tuple(sorted({*same.gpus, *each.gpus})))
    return Diagnosis(machine, tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))))
