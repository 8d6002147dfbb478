"""``mode: generation``: transformers' own ``generate()`` with prompts of the batch.

Every sequence gets all its new tokens.  Which token ends a sequence depends on values, so the loop of ``generate()``
still reads whether all are finished, as it does on a GPU, but goes on until the last token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainatomy.errors import WorkloadError
from trainatomy.training.batch import Batch, build_batch
from trainatomy.training.loops.pytorch import prepare, to_device
from trainatomy.training.model import unwrap
from trainatomy.training.positions import lengths, position_limits
from trainatomy.training.process import autocast

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from trainatomy.training.observer import Observer
    from trainatomy.training.run import Run
    from trainatomy.workload.schema import Workload

_CACHES = ("cache", "past_key_values", "cache_params")
"""Names of a cache of keys and values: that of transformers 5.24, and those of earlier releases."""
_OF_THE_DECODER = ("decoder_input_ids", "decoder_attention_mask", "labels")
"""Entries of a batch that ``generate()`` makes itself."""


def generate(run: Run) -> None:
    """Call the model's ``generate()``, once for each step."""
    from transformers import GenerationConfig

    workload, model, observer = run.workload, run.model, run.observer
    check_generation(workload, model)
    batch = build_batch(workload, model, run.make_batch)
    prompts = {name: value for name, value in batch.items() if name not in _OF_THE_DECODER}
    prepare(run)
    settings = GenerationConfig(**special_tokens(model), **workload.generation.settings())
    for step in range(run.steps):
        if step and observer.repeat_generation(step):
            continue
        observer.step_begin(step)
        with generating(model, observer, workload.generation.max_new_tokens or 1):
            _generate(run, to_device(prompts, run.device), settings)
        observer.step_end(step)


def special_tokens(model: Any) -> dict[str, Any]:
    """Return the model's special tokens; a decoder without a first token begins with the padding, as T5's does."""
    own = getattr(unwrap(model), "generation_config", None)
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    tokens = {name: getattr(own, name, None) for name in names}
    if tokens["decoder_start_token_id"] is None and tokens["bos_token_id"] is None:
        tokens["decoder_start_token_id"] = tokens["pad_token_id"] or 0
    return tokens


def _generate(run: Run, prompts: Batch, settings: GenerationConfig) -> None:
    model: Any = run.model
    with torch.no_grad(), autocast(run.workload.train, torch.device(run.device).type):
        model.generate(**prompts, generation_config=settings)


def check_generation(workload: Workload, model: nn.Module) -> None:
    """Raise ``WorkloadError`` for a model that cannot generate, or not as many tokens."""
    inner: Any = unwrap(model)
    name = type(inner).__name__
    if not hasattr(inner, "generate") or not getattr(inner, "can_generate", lambda: True)():
        raise WorkloadError(f"mode: {name} cannot generate: it has no generate()", key="mode")
    new = workload.generation.max_new_tokens or 0
    limits, decodes = position_limits(inner), bool(getattr(inner.config, "is_encoder_decoder", False))
    limit = limits.target if decodes else limits.sequence
    prompt = 1 if decodes or workload.data.factory is not None else lengths(workload, inner).total
    if limit is not None and prompt + new - 1 > limit:
        raise WorkloadError(
            f"generation.max_new_tokens: {new} tokens after {prompt} are more than the {limit} positions of {name}",
            key="generation.max_new_tokens",
        )


@contextmanager
def full_length(model: nn.Module, tokens: int, token_begin: Callable[[int], object] | None = None) -> Iterator[None]:
    """Let a call of ``generate()`` go on until ``tokens`` tokens are generated; report each but the first."""
    inner: Any = unwrap(model)
    original = inner._has_unfinished_sequences
    generated = 0

    def has_unfinished(*arguments: Any, **keywords: Any) -> bool:
        nonlocal generated
        original(*arguments, **keywords)  # reads whether all sequences are finished
        if token_begin is not None and 0 < generated < tokens:
            token_begin(generated)
        generated += 1
        return generated <= tokens

    inner._has_unfinished_sequences = has_unfinished
    try:
        yield
    finally:
        del inner._has_unfinished_sequences


@contextmanager
def generating(model: nn.Module, observer: Observer, tokens: int) -> Iterator[None]:
    """Tell ``observer`` of each token of ``generate()``, and let it go on until ``tokens`` tokens are generated."""
    inner: Any = unwrap(model)

    def begin(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        observer.cached(cached_tensors(keywords))

    def end(module: nn.Module, arguments: Any, keywords: dict[str, Any], outputs: Any) -> None:
        observer.cached(cached_tensors(outputs))

    handles = (
        inner.register_forward_pre_hook(begin, with_kwargs=True),
        inner.register_forward_hook(end, with_kwargs=True),
    )
    observer.generation_begin(tokens)
    try:
        with full_length(model, tokens, observer.token_begin):
            yield
    finally:
        for handle in handles:
            handle.remove()
    observer.generation_end()


def cached_tensors(named: Any) -> list[torch.Tensor]:
    """Return the keys and values in the arguments or outputs of a forward."""
    # outputs of transformers 5.24 answer to the old names too, with a warning: only the dictionary itself is asked
    found = (dict.get(named, name) for name in _CACHES) if isinstance(named, dict) else ()
    return [tensor for cache in found if cache is not None for tensor in _tensors_of(cache)]


def _tensors_of(cache: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a cache: of its layers, and of the two caches of an encoder-decoder."""
    for name in ("self_attention_cache", "cross_attention_cache"):
        if hasattr(cache, name):
            yield from _tensors_of(getattr(cache, name))
    for layer in getattr(cache, "layers", ()):
        yield from (value for value in vars(layer).values() if isinstance(value, torch.Tensor) and value.dim() > 1)


def cache_size(tensors: list[torch.Tensor]) -> tuple[int, int, int]:
    """Return the number of sequences in a cache, its bytes, and the bytes of one token of one sequence.

    Keys and values are ``[sequences, heads, tokens, size]``; other states do not grow with the tokens.
    """
    growing = [tensor for tensor in tensors if tensor.dim() == 4 and tensor.shape[0] and tensor.shape[2]]
    return (
        max((int(tensor.shape[0]) for tensor in tensors), default=0),
        sum(tensor.nbytes for tensor in tensors),
        sum(tensor.nbytes // (tensor.shape[0] * tensor.shape[2]) for tensor in growing),
    )
