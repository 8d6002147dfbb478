"""CUDA's autocast for meta tensors.

``torch.autocast("cuda")`` keeps its state in C++, and that state works everywhere; only the casts are made by dispatch
keys that meta tensors do not have.  This file makes them, before autograd sees the call, with the same lists and the
same cache as ``aten/src/ATen/autocast_mode.{h,cpp}`` (torch 2.9-2.13; ``rms_norm`` joined the fp32 list in 2.12).

``cross_entropy`` in its parts, so that autocast reaches them: ``log_softmax`` keeps the type, sums are in fp32.

Source: aten/src/ATen/native/LossNLL.cpp.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from trainatomy.catalog.versions import behaviour
from trainatomy.simulator.adapters.torchvision import IN_FP32
from trainatomy.simulator.storages import Storages

LOWER_PRECISION = (
    "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution "
    "prelu addmm addmv addr matmul __matmul__ __rmatmul__ einsum mm mv linalg_vecdot vecdot linear addbmm baddbmm "
    "bmm chain_matmul linalg_multi_dot multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
    "_scaled_dot_product_flash_attention scaled_dot_product_attention"
).split()
FP32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ softplus "
    "layer_norm native_layer_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss "
    "cosine_embedding_loss nll_loss nll_loss_nd nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss "
    "huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss "
    "multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d "
    "_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d "
    "upsample_bicubic2d _upsample_bicubic2d_aa"
).split()
FP32_BY_DTYPE = (
    "prod softmax log_softmax cumprod cumsum linalg_vector_norm vector_norm linalg_matrix_norm matrix_norm sum norm"
).split()
PROMOTE = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add".split()
BANNED = ["binary_cross_entropy"]

COMPOSITE = {
    "linalg_matmul": LOWER_PRECISION,
    **dict.fromkeys(("square", "special_expm1", "special_log1p", "special_logsumexp"), FP32),
    **dict.fromkeys(("special_softmax", "special_log_softmax", "linalg_norm"), FP32_BY_DTYPE),
}
"""Functions in no list whose implementation begins by calling one that is (``square`` is ``pow(2)``), and its list."""

_DTYPE_POSITION = {"softmax": 2, "log_softmax": 2, "special_softmax": 2}
"""Position of ``dtype`` in functions of ``FP32_BY_DTYPE`` that take it as a positional argument."""
_PARTS = ("_nn", "_linalg", "_special", "_VariableFunctions")
_NAMESPACES = (torch, torch.Tensor, *(getattr(torch._C, part) for part in _PARTS))


def _functions(names: list[str]) -> set[Callable[..., Any]]:
    """Return the builtins of these names in all namespaces that Python calls them from."""
    found: set[Callable[..., Any]] = set()
    for space in _NAMESPACES:
        found.update(getattr(space, name) for name in names if hasattr(space, name))
    return found


def _with_composites(names: list[str]) -> list[str]:
    return [*names, *(name for name, called in COMPOSITE.items() if called is names)]


class Autocast:
    """Casts and their cache.

    Args:
        storages: Location of tensors: only those on the GPU are cast.
        torch_version: Version of PyTorch that is simulated.
        on_copy: Called with each copy that enters the cache.
        cache: The cache: weights and their copies, by the identity of the weight.
    """

    def __init__(
        self,
        storages: Storages,
        torch_version: tuple[int, int],
        on_copy: Callable[[torch.Tensor], None],
        cache: dict[int, tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self._storages = storages
        self._on_copy = on_copy
        self._cache = cache
        later = ["rms_norm"] if behaviour("autocast_runs_rms_norm_in_fp32", torch_version) else []
        self._lower = _functions(_with_composites(LOWER_PRECISION))
        self._fp32 = _functions([*_with_composites(FP32), *later])
        self._by_dtype = _functions(_with_composites(FP32_BY_DTYPE))
        self._promote = _functions(PROMOTE)
        self._banned = _functions(BANNED)
        self._lists = (self._lower, self._fp32, self._by_dtype, self._promote)
        self._suspended = False

    @property
    def enabled(self) -> bool:
        """True if an ``autocast("cuda")`` context is open and not suspended."""
        return not self._suspended and torch.is_autocast_enabled("cuda")

    @contextlib.contextmanager
    def suspended_inside(self, func: Callable[..., Any]) -> Iterator[None]:
        """Do not cast inside a listed function: its kernel runs with autocast's dispatch key excluded."""
        before, self._suspended = self._suspended, self._suspended or any(func in names for names in self._lists)
        try:
            yield
        finally:
            self._suspended = before

    def clear(self) -> None:
        """Drop the 16-bit copies, as leaving the outermost context does."""
        self._cache.clear()

    def cast(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of ``func`` as its CUDA kernel would get them.

        Overloads with ``out`` are in none of autocast's lists.

        Raises:
            RuntimeError: Autocast refuses the function.
        """
        if kwargs.get("out") is not None:
            return args, kwargs
        if func in self._banned:
            raise RuntimeError(
                "binary_cross_entropy (nn.BCELoss) is refused under autocast: use binary_cross_entropy_with_logits, or "
                "run it in torch.autocast(..., enabled=False) with float32"
            )
        if func in self._lower:
            return self._to(torch.get_autocast_dtype("cuda"), args, kwargs)
        if func in self._fp32:
            return self._to(torch.float32, args, kwargs)
        if func in self._by_dtype:
            return args, self._with_dtype(func, args, kwargs)
        if func in self._promote:
            return self._to(self._widest(args, kwargs), args, kwargs)
        return args, kwargs

    @staticmethod
    def is_of_extension(func: Callable[..., Any]) -> bool:
        """Return whether a function is an operator of an extension that has a rule of its own for autocast."""
        return isinstance(func, torch._ops.OpOverloadPacket) and func._qualified_op_name in IN_FP32

    def in_fp32(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of an extension in float32; fractions in its results get the type of its first argument."""
        given = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        args, kwargs = self._to(torch.float32, args, kwargs)
        result = func(*args, **kwargs)
        results = result if isinstance(result, tuple) else (result,)
        converted = tuple(each.to(given.dtype) if each.is_floating_point() else each for each in results)
        return converted if isinstance(result, tuple) else converted[0]

    def _to(
        self, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cast all arguments, the last one first: compilers evaluate the casts of ``cached_cast``'s callers so."""
        cast_kwargs = {k: self._value(dtype, v) for k, v in reversed(kwargs.items())}
        return tuple([self._value(dtype, a) for a in reversed(args)][::-1]), cast_kwargs

    def _value(self, dtype: torch.dtype, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(dtype, value)
        if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            return type(value)(self._value(dtype, v) for v in value)
        return value

    def _eligible(self, tensor: torch.Tensor) -> bool:
        """Return whether autocast casts a tensor at all."""
        return (
            tensor.is_meta
            and tensor.is_floating_point()
            and tensor.dtype != torch.float64
            and self._storages.on_device(tensor)
        )

    def _tensor(self, dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == dtype or not self._eligible(tensor):
            return tensor
        lower = torch.get_autocast_dtype("cuda")
        cached = (
            dtype == lower
            and tensor.dtype == torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not cached:
            return tensor.to(dtype)
        if id(tensor) not in self._cache:
            copy = tensor.to(dtype)
            self._on_copy(copy)
            self._cache[id(tensor)] = (tensor, copy)
        return self._cache[id(tensor)][1]

    def _with_dtype(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Add ``dtype=float32`` where the caller names no dtype."""
        name = getattr(func, "__name__", "")
        positional = len(args) > _DTYPE_POSITION.get(name, len(args))
        has_dtype = positional or kwargs.get("dtype") is not None or kwargs.get("out") is not None
        first = args[0] if args else kwargs.get("input", kwargs.get("self"))
        if has_dtype or not isinstance(first, torch.Tensor) or not self._eligible(first):
            return kwargs
        return {**kwargs, "dtype": torch.float32}

    def _widest(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and self._eligible(v)]
        return torch.float32 if any(t.dtype == torch.float32 for t in tensors) else torch.get_autocast_dtype("cuda")


_nn: Any = torch._C._nn  # its stubs declare ``reduction`` as a string, which is an index there
_MEAN, _SUM = 1, 2


def cross_entropy_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the loss of logits against classes or, where the shapes are equal, against probabilities."""
    class_dim = 1 if input.dim() > 1 else 0
    log_probabilities = torch.log_softmax(input, class_dim, input.dtype)
    if input.shape == target.shape:
        return _of_probabilities(log_probabilities, target, weight, reduction, label_smoothing)
    loss: Tensor = _nn.nll_loss_nd(log_probabilities, target, weight, reduction, ignore_index)
    if not label_smoothing:
        return loss
    smooth = _smooth(log_probabilities, target, weight, reduction, ignore_index)
    return (1 - label_smoothing) * loss + smooth * (label_smoothing / input.shape[class_dim])


def _of_probabilities(
    log_probabilities: Tensor, target: Tensor, weight: Tensor | None, reduction: int, label_smoothing: float
) -> Tensor:
    class_dim = 1 if log_probabilities.dim() > 1 else 0
    classes = log_probabilities.shape[class_dim]
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / classes
    products = log_probabilities * target
    if weight is not None:
        products = products * _beside(weight, log_probabilities)
    if reduction == _MEAN:
        return -products.sum() / (log_probabilities.numel() / classes)
    return -products.sum() if reduction == _SUM else -products.sum(class_dim)


def _smooth(
    log_probabilities: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> Tensor:
    """Return the loss against equal probabilities, not yet divided by the number of classes."""
    class_dim = 1 if log_probabilities.dim() > 1 else 0
    weighed = log_probabilities if weight is None else log_probabilities * _beside(weight, log_probabilities)
    smooth = -weighed.sum(class_dim)
    del weighed
    ignored = target == ignore_index
    smooth.masked_fill_(ignored, 0.0)
    if reduction == _MEAN:
        kept = ~ignored
        return smooth.sum() / (kept if weight is None else weight.gather(0, target.masked_select(kept).flatten())).sum()
    return smooth.sum() if reduction == _SUM else smooth


def _beside(weight: Tensor, values: Tensor) -> Tensor:
    """Return the classes' weights with a dimension for each of the values'."""
    return weight.view([1, -1, *[1] * (values.dim() - 2)] if values.dim() > 1 else [-1])
