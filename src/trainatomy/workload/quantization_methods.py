"""Methods of quantisation by transformers' names: which are simulated, and why the others are refused.

Source: transformers 5.17, quantizers/quantizer_*.py (``validate_environment``, ``is_trainable``).
"""

from __future__ import annotations

SIMULATED = ("bitsandbytes", "torchao")
DEQUANTISED = ("mxfp4", "fp8", "mxfp8", "compressed-tensors")
"""Methods whose weights transformers dequantises while it loads them where ``dequantize`` is true."""

LIBRARIES = {
    "gptq": "gptqmodel",
    "awq": "gptqmodel",
    "hqq": "hqq",
    "torchao": "torchao",
    "compressed-tensors": "compressed-tensors",
    "quanto": "optimum-quanto",
    "aqlm": "aqlm",
    "auto-round": "auto-round",
    "fbgemm_fp8": "fbgemm-gpu",
    "eetq": "the hub's kernels",
    "fp8": "the hub's kernels",
    "mxfp8": "the hub's kernels",
    "mxfp4": "the hub's kernels",
}
"""Where the kernels of a method come from."""

_FROZEN = frozenset(
    "auto-round fbgemm_fp8 fp8 mxfp8 gguf higgs metal mxfp4 nvfp4 quark spqr vptq".split(),
)
"""Methods whose models transformers' Trainer refuses to train, adapters included (``is_trainable`` is False)."""


def refusal(method: str, *, dequantize: bool) -> str | None:
    """Return why weights quantised by a method cannot be predicted; None where they can.

    Args:
        method: Its name in ``quantization_config``.
        dequantize: Whether weights are dequantised while they are loaded.
    """
    if method in SIMULATED or (method in DEQUANTISED and dequantize):
        return None
    choices = "choose bitsandbytes or torchao, or leave quantization out to predict the dense model"
    if method in DEQUANTISED:
        choices = f"set dequantize: true where the checkpoint is stored so, or {choices}"
    library = LIBRARIES.get(method)
    if method in _FROZEN:
        by = "" if library is None else f" (by {library})"
        return f"transformers does not train weights quantised by {method}{by}, and they are not simulated: {choices}"
    with_it = "" if library is None else f", with {library} installed or without"
    return f"weights quantised by {method} are not simulated{with_it}: {choices}"
