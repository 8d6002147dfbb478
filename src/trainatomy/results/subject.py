"""What was predicted: the model, precision, optimizer, attention, loop and batch that a training is known by."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Subject:
    """The training that was predicted, as people name it; None, False or empty: there is none, or it is not known.

    Attributes:
        models: Classes of the models, without peft's wrapper.
        mode: ``training``, ``inference`` or ``generation``.
        loop: Name of the loop (``trainer``, ``pytorch``, ``sft``), or ``script`` for one of the user's own.
        weights_dtype: The dtype of the weights that are not quantised.
        autocast: The dtype that mixed precision computes in, ``fp16`` or ``bf16``.
        tf32: Whether matrix products of float32 run in TF32.
        quantization: How weights are quantised, such as ``nf4``, ``int8`` or the name of a method.
        lora_rank: Rank of the adapters.
        trained_share: The share of the parameters that is trained, where it is not all of them.
        optimizer: Name in ``TrainingArguments.optim``, the path of a class, or classes (``AdamW + Muon``).
        attention: transformers' name of the attention, such as ``sdpa``.
        attention_kernels: PyTorch's kernels that a step calls: ``flash``, ``efficient``, ``cudnn`` or ``flex``.
        batch_size: Samples of each GPU in one forward pass.
        inputs: Shape of each input of a sample, by the name of the model's argument.
        lengths: Fewest and most tokens of samples that differ in length.
        new_tokens: Tokens that are generated for each prompt.
        beams: Beams of beam search.
        accumulation_steps: Micro-batches of an optimizer step.
        checkpointing: The layers that are checkpointed: every so many; 0: none.
        compiled: Whether ``torch.compile`` compiles the model.
        keeps_gradients: Whether gradients are filled with zeros instead of released.
        torch: The version of PyTorch that is simulated, where it is not the installed one.
        era: The year whose libraries are emulated.
    """

    models: tuple[str, ...]
    mode: str
    loop: str
    weights_dtype: str
    batch_size: int
    autocast: str | None = None
    tf32: bool = False
    quantization: str | None = None
    lora_rank: int | None = None
    trained_share: float | None = None
    optimizer: str | None = None
    attention: str | None = None
    attention_kernels: tuple[str, ...] = ()
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    lengths: tuple[int, int] | None = None
    new_tokens: int | None = None
    beams: int = 1
    accumulation_steps: int = 1
    checkpointing: int = 0
    compiled: bool = False
    keeps_gradients: bool = False
    torch: str | None = None
    era: str | None = None
