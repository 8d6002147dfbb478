"""``from_pretrained`` of transformers, diffusers and timm: models are built from their configuration, without weights.

Configurations and tokenizers come from the hub's cache on this machine (or the hub, with the network on); else from the
architectures that ship with trainatomy, with a tokenizer of the right size whose words mean nothing.

Quantised weights in a dry run: load them, and say where a script asks for them and gets others.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from trainatomy.catalog.architectures import architecture, conversation_markers, has_chat_template, quantization_of_copy
from trainatomy.errors import SimulationError
from trainatomy.scripts.job import current_place
from trainatomy.scripts.standins import device_maps
from trainatomy.scripts.standins.notes import StandIns
from trainatomy.simulator.live import loading
from trainatomy.training.process import check_transformers
from trainatomy.training.quantization import load_quantised, quantisation_notes
from trainatomy.training.stored_weights import is_dequantised, library_of
from trainatomy.workload.quantization import refusal

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.simulator.process import SimulatedProcess


_NO_OUTLIERS = 0.0


def _put_check(stand_ins: StandIns, module: Any) -> None:
    """Say it where a script asks for quantised weights and gets others: a library may leave them out silently."""
    original, notes = module.BitsAndBytesConfig.__init__, stand_ins.process.notes
    asked: list[str] = []

    def make(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        bits = 4 if self.load_in_4bit else 8 if self.load_in_8bit else 0
        if bits and not asked:
            asked.append(f"weights of {bits} bits are asked for at {current_place(stand_ins.script) or 'the script'}")

    def check() -> None:
        if asked and not any("quantised weights" in note for note in notes):
            notes.append(f"{asked[0]}, and no layer has them: the figures are those of weights in 16 or 32 bits")

    stand_ins.put(module.BitsAndBytesConfig, "__init__", make)
    stand_ins.stack.callback(check)


def load(process: SimulatedProcess, model: Any, settings: Any, *, stored: bool = False) -> nn.Module:
    """Load a model that was built in host memory with quantised weights on the GPU, as ``from_pretrained`` does.

    Args:
        process: The simulated process.
        model: The model with its weights in 16 or 32 bits.
        settings: A ``BitsAndBytesConfig`` or ``TorchAoConfig``, or its content.
        stored: Whether the checkpoint is stored so; else its weights are quantised while it is loaded.

    Raises:
        SimulationError: Another library quantises the weights.
    """
    from transformers.integrations import is_deepspeed_zero3_enabled

    arguments = settings if isinstance(settings, Mapping) else settings.to_dict()
    why = refusal(library_of(arguments), dequantize=False)
    if why is None and is_deepspeed_zero3_enabled():
        why = (
            "weights that DeepSpeed's ZeRO-3 partitions are not simulated with quantised weights: use stage 2, or FSDP"
        )
    if why is not None:
        raise SimulationError(f"quantization_config: {why}")
    with loading(process.on_host):
        loaded = load_quantised(model, dict(arguments), "cuda", stored=stored)
    process.modules.learn(loaded)
    process.notes.extend(quantisation_notes(loaded, _NO_OUTLIERS))
    return loaded


UNREAD = (OSError, ValueError)
"""Errors that transformers raises where the hub has no file, or cannot be reached."""


def install(stand_ins: StandIns) -> None:
    """Put them in place, each when its library is imported."""
    _install_transformers(stand_ins)
    stand_ins.when("transformers.utils.quantization_config", partial(_put_check, stand_ins))
    stand_ins.when("diffusers.models.modeling_utils", partial(_put_diffusers, stand_ins))
    stand_ins.when("timm.models._builder", partial(_put_timm, stand_ins))
    stand_ins.when("torchvision.models._api", partial(_put_torchvision, stand_ins))


def _put_timm(stand_ins: StandIns, builder: Any) -> None:
    stand_ins.put(builder, "load_pretrained", lambda *_, **__: stand_ins.note("pretrained weights", "timm"))


def _put_torchvision(stand_ins: StandIns, api: Any) -> None:
    """Let torchvision's models start from random weights."""

    def get(weights: Any, *_: Any, **__: Any) -> dict[str, Any]:
        stand_ins.note("pretrained weights", str(weights))
        return {}

    stand_ins.put(api.WeightsEnum, "get_state_dict", get)
    original = torch.nn.Module.load_state_dict

    def load(self: torch.nn.Module, state: Any, *rest: Any, **more: Any) -> Any:
        return original(self, state, *rest, **more) if state else original(self, {}, strict=False)

    stand_ins.put(torch.nn.Module, "load_state_dict", load)


# -- transformers ------------------------------------------------------------------------------------------------------


def _install_transformers(stand_ins: StandIns) -> None:
    """Put the stand-ins of transformers' modules in place, each where its class is; refuse an old release."""
    # The first module that any release imports: libraries beside an old one may be too new for the others.
    stand_ins.when("transformers.dependency_versions_table", lambda _: check_transformers())

    def put(name: str, owner: str, method: str, made: Callable[[Any], Any], *, of_class: bool = True) -> None:
        def replace(module: Any) -> None:
            kind = getattr(module, owner)
            original = vars(kind)[method]
            replacement = made(getattr(original, "__func__", original))
            stand_ins.put(kind, method, classmethod(replacement) if of_class else replacement)

        stand_ins.when(name, replace)

    models, generation = "transformers.modeling_utils", "transformers.generation.configuration_utils"
    put(models, "PreTrainedModel", "from_pretrained", partial(_from_pretrained, stand_ins))
    put(models, "PreTrainedModel", "save_pretrained", lambda _: _configuration_saved(stand_ins), of_class=False)
    for module, owner in _CONFIGURATIONS.items():
        put(module, owner, "from_pretrained", partial(_shipped_configuration, stand_ins))
    put(
        "transformers.models.auto.tokenization_auto", "AutoTokenizer", "from_pretrained", partial(_tokenizer, stand_ins)
    )
    put(generation, "GenerationConfig", "from_pretrained", lambda _: lambda cls, *_, **__: cls())
    stand_ins.when("transformers.utils", partial(_put_telemetry, stand_ins))


_CONFIGURATIONS = {
    "transformers.configuration_utils": "PreTrainedConfig",
    "transformers.models.auto.configuration_auto": "AutoConfig",
}
"""Classes of configurations by the module that defines each."""


def _put_telemetry(stand_ins: StandIns, utilities: Any) -> None:
    if not hasattr(utilities, "send_example_telemetry"):  # examples of releases before 5 import it
        stand_ins.stack.callback(delattr, utilities, "send_example_telemetry")
        utilities.send_example_telemetry = lambda *_, **__: None


def _configuration_saved(stand_ins: StandIns) -> Callable[..., Any]:
    """Return a ``save_pretrained`` that saves what a later ``from_pretrained`` of the script builds the model from."""

    def save(self: Any, save_directory: Any, *_: Any, **__: Any) -> tuple[()]:
        stand_ins.files.note(save_directory)
        self.config.dtype = str(self.dtype).removeprefix("torch.")
        self.config.architectures = [type(self).__name__.removeprefix("FSDP")]
        self.config.save_pretrained(save_directory)
        return ()

    return save


def _left_out(stand_ins: StandIns) -> Callable[..., Any]:
    """Return a ``save_pretrained`` that only lists its folder, and what the host would hold of a model."""

    def save(self: Any, save_directory: Any, *_: Any, **options: Any) -> tuple[()]:
        stand_ins.files.note(save_directory)
        if isinstance(self, torch.nn.Module):
            given = options.get("state_dict")
            tensors = _adapters(self) if hasattr(self, "peft_config") else (given or self.state_dict()).values()
            stand_ins.saved.save(save_directory, tensors, at_once=True)
        return ()

    return save


def _adapters(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return what peft saves of a model: what it trains."""
    return [one for one in model.parameters() if one.requires_grad]


_CONFIGURED = ("num_labels", "id2label", "label2id", "use_cache", "hidden_dropout_prob", "problem_type")


def _from_pretrained(stand_ins: StandIns, original: Any) -> Callable[..., Any]:
    """Return ``PreTrainedModel.from_pretrained`` that builds a model from its configuration.

    Weights that are to be quantised are loaded by the original, from what was built.
    """

    def build(cls: Any, name: Any, *_: Any, config: Any = None, **options: Any) -> Any:
        from transformers import PreTrainedConfig, modeling_utils
        from transformers.integrations import is_deepspeed_zero3_enabled

        stand_ins.note("pretrained weights", f"{cls.__name__} {_repository(str(name))}")
        if not isinstance(config, PreTrainedConfig):
            known = {
                key: value for key, value in options.items() if key in _CONFIGURED or hasattr(cls.config_class, key)
            }
            config = cls.config_class.from_pretrained(config or name, **{**_place(options), **known})
        settings = options.get("quantization_config")
        if is_dequantised(getattr(config, "quantization_config", None), settings):
            del config.quantization_config
            config.dtype = getattr(config, "dtype", None) or torch.bfloat16  # that of the checkpoint's plain weights
            settings = None
            stand_ins.process.notes.append(f"{name} is stored quantised; what dequantising takes is not counted")
        stored = getattr(config, "quantization_config", None)
        if stored is not None:
            settings = _stored_settings(str(name), stored)
            del config.quantization_config
        attention = options.get("attn_implementation")
        more = {} if attention is None else {"attn_implementation": attention}
        place = contextlib.nullcontext() if is_deepspeed_zero3_enabled() else stand_ins.process.on_host()
        host, dtype, stored_dtype = (
            stand_ins.process.storages.host_memory,
            _dtype(config, options),
            _in_file(name, config),
        )
        is_cast = dtype != stored_dtype and options.get("device_map") in (None, "cpu")  # else each goes to the GPU
        with place, mock.patch.object(stand_ins, "draws", False), host.reading(is_mapped=not is_cast):
            model = cls._from_config(config, dtype=dtype, **more)
        if is_cast:
            host.pass_through(sum(each.numel() for each in model.parameters()) * stored_dtype.itemsize)
        if cls.__name__ not in (config.architectures or ()) or options.get("ignore_mismatched_sizes"):
            _draw_head(model)
        if settings is not None:
            with mock.patch.object(modeling_utils.PreTrainedModel, "from_pretrained", classmethod(original)):
                model = load(stand_ins.process, model, settings, stored=stored is not None)
        model.name_or_path = model.config._name_or_path = str(name)
        model.eval()
        if settings is None and options.get("device_map") not in (None, "cpu"):
            device_maps.spread(stand_ins, model, options)
        if options.get("output_loading_info"):
            return model, {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": [], "error_msgs": []}
        return model

    return build


def _stored_settings(name: str, stored: Any) -> dict[str, Any]:
    """Return how a checkpoint is stored.

    Raises:
        SimulationError: By another library than bitsandbytes, whose packed weights are simulated.
    """
    settings: dict[str, Any] = dict(stored if isinstance(stored, Mapping) else stored.to_dict())
    if library_of(settings) != "bitsandbytes":
        method = settings.get("quant_method", "another method")
        raise SimulationError(
            f"{name} is stored quantised ({method}); of such checkpoints, those of bitsandbytes are simulated in "
            "scripts.\nName the checkpoint that is not quantised, or describe the training by a workload"
        )
    return settings


def _draw_head(model: Any) -> None:
    """Draw what a checkpoint of another class lacks: all that is outside the model that both have in common."""
    for name, part in model.named_children():
        if name != model.base_model_prefix:
            for tensor in part.parameters():
                tensor._is_hf_initialized = False
            part.apply(model._init_weights)


def _place(options: dict[str, Any]) -> dict[str, Any]:
    return {key: options[key] for key in ("subfolder", "revision", "trust_remote_code") if options.get(key)}


def _dtype(config: Any, options: dict[str, Any]) -> torch.dtype:
    """Return the dtype of the weights: as asked for, else the checkpoint's (transformers 5)."""
    asked = options.get("dtype", options.get("torch_dtype"))
    if isinstance(asked, torch.dtype):
        return asked
    if isinstance(asked, str) and asked != "auto":
        found: torch.dtype = getattr(torch, asked)
        return found
    return _named_dtype(getattr(config, "dtype", None))


def _named_dtype(named: Any) -> torch.dtype:
    """Return the dtype that a configuration names; float32 if it names none."""
    return named if isinstance(named, torch.dtype) else getattr(torch, str(named or "float32").removeprefix("torch."))


def _in_file(name: Any, config: Any) -> torch.dtype:
    """Return the dtype of a checkpoint's weights; where nobody knows it, that of the configuration as it is asked for.

    What a script asks for replaces the dtype in a configuration that is read (``PreTrainedConfig.from_dict``).
    """
    file, known = Path(str(name), "config.json"), architecture(str(name))
    if file.is_file():
        fields: Any = json.loads(file.read_text(encoding="utf-8"))
    elif known is not None:
        fields = known.config
    else:
        fields = {"dtype": getattr(config, "dtype", None)}
    return _named_dtype(fields.get("dtype", fields.get("torch_dtype")))


def _shipped_configuration(stand_ins: StandIns, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``from_pretrained`` of a configuration that falls back to those that ship."""

    def read(cls: Any, name: Any, *rest: Any, **options: Any) -> Any:
        try:
            return original(cls, name, *rest, **options)
        except UNREAD:
            known = architecture(str(name))
            if known is None:
                raise
        from transformers import AutoConfig

        stand_ins.note("configuration", str(name))
        fields = {key: value for key, value in known.config.items() if key != "model_type"}
        wants_rest = options.pop("return_unused_kwargs", False)
        config = AutoConfig.for_model(known.entry.model_type, **fields)
        config._name_or_path = str(name)
        config.architectures = [known.class_name]
        stored = quantization_of_copy(str(name))
        if stored is not None:
            config.quantization_config = stored
        unused = {key: value for key, value in options.items() if key not in _HUB and not _set(config, key, value)}
        return (config, unused) if wants_rest else config

    return read


_HUB = frozenset(
    "cache_dir code_revision force_download local_files_only proxies revision subfolder token trust_remote_code "
    "user_agent _commit_hash _from_auto _from_pipeline".split()
)
"""Options that say where a file comes from."""


def _set(config: Any, key: str, value: Any) -> bool:
    """Set a field of a configuration that it has; return whether it has it."""
    if not hasattr(config, key):
        return False
    setattr(config, key, value)
    return True


_SMALLEST_VOCABULARY = 200
"""Tokens below which a tokenizer is one that transformers made without the files of its vocabulary."""


def _tokenizer(stand_ins: StandIns, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``AutoTokenizer.from_pretrained`` that falls back to a tokenizer of the right size."""

    def read(cls: Any, name: Any, *rest: Any, **options: Any) -> Any:
        repository = _repository(str(name))
        known = architecture(repository)
        try:
            found = original(cls, name, *rest, **options)
            if known is None or len(found) >= _SMALLEST_VOCABULARY:
                return found
        except (*UNREAD, KeyError, TypeError, AttributeError):
            if known is None:
                raise
        stand_ins.note("tokenizer", repository)
        return made_tokenizer(known.config, repository, options)

    return read


def _repository(name: str) -> str:
    """Return the repository of a folder in the hub's cache, which is named after it; else the name itself."""
    found = re.search(r"(?:^|/)models--([^/]+)/snapshots/[^/]+/?$", name)
    return found[1].replace("--", "/", 1) if found else name


_OF_FILES = _HUB | {"config", "use_fast", "tokenizer_type", "tokenizer_file", "vocab_file", "merges_file", "gguf_file"}
"""Options of ``from_pretrained`` that say where a tokenizer's files are, and of which kind they are."""
_SPECIAL = ("[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>", "<|endoftext|>")
_CHAT = (
    "{% for m in messages %}<s> {{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)


def made_tokenizer(config: Any, name: str, options: Mapping[str, Any] | None = None) -> Any:
    """Return a tokenizer whose words are the vocabulary's numbers (``w17``), one token for each word of a text.

    It has a chat template where the model's own has one: libraries take texts for messages then.  ``options`` are those
    of ``from_pretrained``, such as ``model_max_length`` and ``padding_side``.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    size = int(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 32000)
    letters = [chr(code) for code in range(33, 127)]
    words = (f"w{number}" for number in range(size))
    names = list(dict.fromkeys([*_SPECIAL, *letters, *conversation_markers(), *words]))[:size]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(names)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    is_encoder = "mask" in str(config.get("architectures", "")).lower() or config.get("type_vocab_size")
    if is_encoder:
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    end = "[SEP]" if is_encoder else "<|endoftext|>"
    longest = int(config.get("max_position_embeddings") or config.get("n_positions") or 2048)
    settings: dict[str, Any] = {
        "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "bos_token": "<s>",
        "eos_token": end, "model_max_length": longest, "name_or_path": name,
    }  # fmt: skip
    if is_encoder or config.get("pad_token_id") is not None:
        settings["pad_token"] = "[PAD]"
    if has_chat_template(name):
        settings["chat_template"] = _CHAT
    settings |= {key: value for key, value in (options or {}).items() if key not in _OF_FILES}
    return PreTrainedTokenizerFast(tokenizer_object=made, **settings)


# -- diffusers ---------------------------------------------------------------------------------------------------------


def _put_diffusers(stand_ins: StandIns, modeling: Any) -> None:
    def build(cls: Any, /, name: Any, *_: Any, subfolder: str | None = None, **options: Any) -> Any:
        stand_ins.note("pretrained weights", f"{cls.__name__} {name}")
        config = cls.load_config(name, **({"subfolder": subfolder} if subfolder else {}))
        with stand_ins.process.on_host():
            model = cls.from_config(config)
        if (dtype := options.get("torch_dtype")) is not None:
            model.to(dtype)
        return model.eval()

    stand_ins.put(modeling.ModelMixin, "from_pretrained", classmethod(build))
    stand_ins.put(modeling.ModelMixin, "save_pretrained", _left_out(stand_ins))
