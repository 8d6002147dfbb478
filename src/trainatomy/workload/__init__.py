"""What is trained: the description of a training as a value, and the ways to write one.

A YAML file (``read``), flags over it (``merge``), a mapping (``Workload.from_mapping``), the notebook's nine rows
(``notebook``).  Nothing here imports torch or transformers, and no code of the user's is loaded.
"""

from trainatomy.workload.flags import FLAGS, Flag
from trainatomy.workload.notebook import notebook
from trainatomy.workload.overrides import merge
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
