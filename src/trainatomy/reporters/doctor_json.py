"""A diagnosis as a JSON object: what ``trainatomy doctor --json`` prints."""

from __future__ import annotations

from typing import Any

from trainatomy.records.document import to_plain
from trainatomy.reporters.doctor_sentences import cost_sentence, fix_sentence, found_sentence, meaning_sentence
from trainatomy.results.diagnosis import Diagnosis, Finding

DIAGNOSIS = "trainatomy/diagnosis/1"


def diagnosis_to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return findings, each with its sentences, and all facts that were found."""
    return {
        "schema": DIAGNOSIS,
        "healthy": diagnosis.healthy,
        "findings": [_finding(finding) for finding in diagnosis.findings],
        "machine": to_plain(diagnosis.machine),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        **to_plain(finding),
        "costs": [{**to_plain(cost), "sentence": cost_sentence(cost)} for cost in finding.costs],
        "found": found_sentence(finding),
        "means": meaning_sentence(finding),
        "fix": fix_sentence(finding),
    }
