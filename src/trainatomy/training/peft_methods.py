"""Methods of peft besides LoRA, which change a model by peft's own code.

Models are on the meta device: a method that looks at values while it is made cannot be built there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainatomy.errors import MissingLibrary, WorkloadError
from trainatomy.libraries import import_library
from trainatomy.workload.document import suggestion

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn


METHODS = (
    "ADALORA DELORA GRALORA HIRA HRA IA3 LN_TUNING LOHA LOKR MISS OFT PREFIX_TUNING PROMPT_TUNING P_TUNING RANDLORA "
    "ROAD TRAINABLE_TOKENS VBLORA VERA".split()
)
"""Methods that are simulated."""
_VALUES = "looks at values of weights while it is made, which do not exist without a GPU's memory"
_FFT = "computes with cuFFT, whose workspaces are not known"
_TASKS = "needs the number of a task in each batch"
REFUSED = {
    "LORA": "is `model.lora`, with the same arguments",
    **dict.fromkeys(("ADAMSS", "BOFT", "FROD", "SHIRA", "UNILORA"), _VALUES),
    **dict.fromkeys(("C3A", "FOURIERFT"), _FFT),
    **dict.fromkeys(("MULTITASK_PROMPT_TUNING", "POLY"), _TASKS),
    "CPT": "needs the types of its tokens in each batch",
    "XLORA": "needs adapters that are trained already",
}
"""Why others are not."""


NOTES = {
    "ADALORA": "AdaLoRA: ranks are not changed and importances not kept, for which a loop has to call peft's "
    "update_and_allocate; the Trainer does not"
}
"""What a user of a method should know."""


def adapt_by_method(model: nn.Module, given: Mapping[str, Any]) -> nn.Module:
    """Let a method of peft change a model: ``peft_type`` and the arguments of its configuration.

    Raises:
        WorkloadError: peft has no such method, it is not simulated, or peft refuses an argument.
        MissingLibrary: peft, or a library that the method needs, is not installed.
    """
    peft = import_library("peft", "model.peft")
    kinds = {getattr(kind, "value", kind): made for kind, made in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    name = str(given["peft_type"]).upper()
    if name not in kinds:
        raise WorkloadError(f"model.peft: peft has no method {name}{suggestion(name, kinds)}", key="model.peft")
    if name not in METHODS:
        reason = REFUSED.get(name, "has not been checked")
        raise WorkloadError(f"model.peft: {name}: is not simulated: {reason}", key="model.peft")
    arguments = {key: value for key, value in given.items() if key != "peft_type"}
    try:
        adapted: nn.Module = peft.get_peft_model(model, kinds[name](**arguments))
    except ImportError as error:
        raise MissingLibrary(f"model.peft: {name} needs a library: {error}") from error
    except (LookupError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise WorkloadError(f"model.peft: peft refuses {name}: {error}", key="model.peft") from error
    return adapted
