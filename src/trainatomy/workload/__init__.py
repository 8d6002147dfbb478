"""The description of a training as a value, and the ways to write one.

A YAML file (``read``), command-line flags over it (``merge``), a mapping (``Workload.from_mapping``), a changed copy
(``Workload.replace``), the nine training runs of Hugging Face's guide (``notebook``). Nothing here imports torch or
transformers, and no user code is loaded.
"""

from trainatomy.workload.builtin import notebook
from trainatomy.workload.overrides import FLAGS, Flag, merge
from trainatomy.workload.reading import read, read_all
from trainatomy.workload.schema import (
    DEFAULT_SEQUENCE_LENGTH,
    DataSpec,
    GPUOverride,
    LoraSpec,
    ModelSpec,
    SoftwareSpec,
    TrainSpec,
    Workload,
)

__all__ = [
    "DEFAULT_SEQUENCE_LENGTH",
    "FLAGS",
    "DataSpec",
    "Flag",
    "GPUOverride",
    "LoraSpec",
    "ModelSpec",
    "SoftwareSpec",
    "TrainSpec",
    "Workload",
    "merge",
    "notebook",
    "read",
    "read_all",
]
