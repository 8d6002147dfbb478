"""How much of a mask of choices is true where nobody knows the choices: each choice is taken equally often.

A router of a mixture of experts chooses by ``topk``, a quantiser by ``argmin``, a policy by ``multinomial``.  Scripts
then select what belongs to one of n choices (``torch.where(chosen == i)``): an n-th of it, as routers are trained to
balance.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch

from trainatomy.simulator.storages import forgetting

_CHOOSE_ONE = {"aten::argmax": 0, "aten::argmin": 0, "aten::max": 1, "aten::min": 1, "aten::topk": 1}
"""Operators that choose along a dimension: which of their results holds the choices."""
_COPIES = frozenset({"aten::clone", "aten::_to_copy", "aten::gt", "aten::ne"})
CHOICES = frozenset(
    {*_CHOOSE_ONE, *_COPIES, "aten::multinomial", "aten::eq", "aten::scatter", "aten::scatter_", "aten::any"}
)
"""Operators that ``EqualShares.learn`` may learn from."""


class EqualShares:
    """Tensors of choices, by their storages, and masks of which a known share is true."""

    def __init__(self) -> None:
        self._choices: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._shares: dict[int, tuple[weakref.ref[torch.UntypedStorage], Fraction]] = {}

    def share(self, mask: torch.Tensor) -> Fraction | None:
        """Return how much of a mask is true; None if it does not follow from choices."""
        found = self._shares.get(mask.untyped_storage()._cdata)
        return None if found is None else found[1]

    def learn(self, name: str, args: tuple[Any, ...], outputs: Sequence[torch.Tensor]) -> None:
        """Note what the results of an operation hold."""
        if name in _CHOOSE_ONE or name == "aten::multinomial":
            self._learn_choices(name, args, outputs)
        elif not isinstance(args[0], torch.Tensor):
            return
        elif name in _COPIES:
            self._learn_copy(name, args, outputs[0])
        elif name in ("aten::scatter", "aten::scatter_"):
            self._learn_marks(args, outputs[0])
        elif len(args) < 2 or not isinstance(args[1], int):
            return
        elif name == "aten::eq" and (number := self._number(args[0])) is not None:
            self._keep(outputs[0], Fraction(1, number))
        elif name == "aten::any" and (share := self.share(args[0])) is not None:
            self._keep(outputs[0], min(Fraction(1), share * args[0].shape[args[1]]))

    def _learn_choices(self, name: str, args: tuple[Any, ...], outputs: Sequence[torch.Tensor]) -> None:
        """Note among how many was chosen: the size of the dimension that was reduced."""
        position = {"aten::topk": 2, "aten::multinomial": len(args)}.get(name, 1)
        dimension = args[position] if len(args) > position else -1
        which = _CHOOSE_ONE.get(name, 0)
        whole = name in ("aten::argmax", "aten::argmin") and len(args) < 2
        if len(outputs) <= which or not isinstance(dimension, int) or whole or not args[0].dim():
            return
        self._remember(self._choices, outputs[which], args[0].shape[dimension])

    def _learn_copy(self, name: str, args: tuple[Any, ...], result: torch.Tensor) -> None:
        """Note that a copy, or what is not 0, holds what the original held."""
        if name in ("aten::gt", "aten::ne") and (isinstance(args[1], torch.Tensor) or args[1] != 0):
            return
        if (share := self.share(args[0])) is not None:
            self._keep(result, share)
        elif name in ("aten::clone", "aten::_to_copy") and (number := self._number(args[0])) is not None:
            self._remember(self._choices, result, number)

    def _learn_marks(self, args: tuple[Any, ...], result: torch.Tensor) -> None:
        """Note the share of a tensor in which a number is written at each choice, as ``one_hot`` does."""
        data, dimension, index = args[:3]
        number = self._number(index)
        if number is not None and number == data.shape[dimension] and isinstance(args[3], (int, float)) and args[3]:
            self._keep(result, min(Fraction(1), Fraction(index.shape[dimension], number)))

    def _number(self, choices: torch.Tensor) -> int | None:
        found = self._choices.get(choices.untyped_storage()._cdata)
        return None if found is None else found[1]

    def _keep(self, mask: torch.Tensor, share: Fraction) -> None:
        self._remember(self._shares, mask, share)

    @staticmethod
    def _remember(table: dict[int, Any], tensor: torch.Tensor, what: object) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        table[key] = weakref.ref(storage, forgetting(table, key)), what
