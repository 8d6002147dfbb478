"""A sentence-transformer of a transformers model, its loss, and texts of random words to train it on."""

from __future__ import annotations

import inspect
import random
import tempfile
from typing import TYPE_CHECKING, Any
from unittest import mock

from trainatomy.errors import WorkloadError
from trainatomy.libraries import import_library
from trainatomy.training.model import unwrap
from trainatomy.training.positions import lengths
from trainatomy.training.trl import check_size, dataset_of, make_tokenizer, vocabulary
from trainatomy.workload.document import suggestion
from trainatomy.workload.sentence_transformers import LOOP, model_on_hub

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.workload.schema import Workload


def _library() -> Any:
    return import_library("sentence_transformers", f"loop: {LOOP}", install="'trainatomy[sentence-transformers]'")


def as_sentence_transformer(workload: Workload, model: nn.Module, device: str) -> nn.Module:
    """Return a model as a ``SentenceTransformer`` on a device: with a tokenizer, its pooling and normalisation.

    The library makes all but the weights and the tokenizer, for which it would read a checkpoint.
    """
    modules = _library().sentence_transformer.modules
    transformer = modules.Transformer
    config, pooling = unwrap(model).config, pooling_of(workload, model)
    with tempfile.TemporaryDirectory(prefix="trainatomy-") as folder:
        _tokenizer(model, left=pooling == "lasttoken").save_pretrained(folder)
        with (
            mock.patch.object(transformer, "_load_config", lambda *arguments: (config, False)),
            mock.patch.object(transformer, "_load_model", lambda *arguments, **keywords: model),
        ):
            first = transformer(folder)
    parts = [first, modules.Pooling(first.get_embedding_dimension(), pooling)]
    if normalizes(workload):
        parts.append(modules.Normalize())
    made = _library().SentenceTransformer(modules=parts, device=device)
    made.max_seq_length = lengths(workload, unwrap(model)).sequence
    return made


def pooling_of(workload: Workload, model: nn.Module) -> str:
    """Return how a model's token embeddings become one.

    Source of the default: sentence-transformers 6.2, sentence_transformer/model.py (``_load_default_modules``).
    """
    asked, known = workload.sentence_transformers.pooling, model_on_hub(workload)
    if asked is not None:
        return asked
    if known is not None:
        return known.pooling
    config = unwrap(model).config
    is_causal = (config.architectures or [""])[0].endswith("ForCausalLM") and getattr(config, "is_causal", True)
    return "lasttoken" if is_causal else "mean"


def normalizes(workload: Workload) -> bool:
    """Return whether embeddings are normalised."""
    asked, known = workload.sentence_transformers.normalize, model_on_hub(workload)
    return asked if asked is not None else known is not None and known.normalize


def _tokenizer(model: nn.Module, *, left: bool) -> Any:
    """Return a tokenizer of random words with the inputs of the model's own."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    own = tokenizer_class_from_name(TOKENIZER_MAPPING_NAMES.get(unwrap(model).config.model_type) or "")
    names = {} if own is None else {"model_input_names": list(own.model_input_names)}
    return make_tokenizer(model, "left" if left else "right", **names)


def loss_of(workload: Workload, model: nn.Module) -> nn.Module:
    """Return the loss with its arguments, around which is ``MatryoshkaLoss`` if dimensions are given.

    Raises:
        WorkloadError: Its constructor does not have an argument, or refuses a value.
    """
    spec, losses = workload.sentence_transformers, _library().sentence_transformer.losses
    kind, given = getattr(losses, spec.loss), spec.arguments()
    known = inspect.signature(kind.__init__).parameters  # those of a class that is deprecated are of its __new__
    for name, value in given.items():
        key = f"sentence_transformers.{'loss_kwargs.' if name in spec.loss_kwargs else ''}{name}"
        if name not in known:
            raise WorkloadError(f"{key}: {spec.loss} has no such argument{suggestion(name, known)}", key=key)
        if callable(known[name].default) and value is not None:
            raise WorkloadError(f"{key}: is a function, which a workload cannot name: leave it out", key=key)
    try:
        loss = kind(model, **given)
        return losses.MatryoshkaLoss(model, loss, list(spec.matryoshka_dims)) if spec.matryoshka_dims else loss
    except (TypeError, ValueError) as error:
        raise WorkloadError(f"{LOOP}: {spec.loss}: {error}", key=LOOP) from error


def texts(workload: Workload, model: nn.Module, count: int) -> Any:
    """Return a data set of ``count`` samples: texts of random words, and the label that the loss needs."""
    spec, drawn = workload.sentence_transformers, random.Random(0)
    length, words = lengths(workload, unwrap(model)).sequence, vocabulary(model)[2:]
    check_size(length * count * spec.columns)
    names = ("anchor", "positive", *(f"negative_{number}" for number in range(1, spec.columns - 1)))
    samples: dict[str, list[Any]] = {
        name: [" ".join(drawn.choices(words, k=length)) for _ in range(count)] for name in names
    }
    if spec.row.label is not None:
        samples["label"] = [drawn.random() if spec.row.label == "number" else place % 2 for place in range(count)]
    return dataset_of(samples)
