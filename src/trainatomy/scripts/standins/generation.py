"""``generate()`` of transformers: no sequence ends before the maximum length, because nobody knows the tokens.

Layers that do the same for a token are copies of each other, as in workloads.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from trainatomy.scripts.standins.notes import StandIns
from trainatomy.simulator.repeated_layers import RepeatedLayers


def install(stand_ins: StandIns) -> None:
    """Put it in place once transformers' generation is imported."""
    stand_ins.when(_MODULES, functools.partial(_put, stand_ins))


_MODULES = ("transformers.generation.stopping_criteria", "transformers.generation.utils")


def _put(stand_ins: StandIns, criteria: Any, utils: Any) -> None:
    values = stand_ins.process.recorder.values
    is_finished = criteria.StoppingCriteriaList.__call__
    goes_on = utils.GenerationMixin._beam_search_has_unfinished_sequences

    layers = RepeatedLayers(stand_ins.process.recorder)
    generate = utils.GenerationMixin.generate

    @functools.wraps(generate)
    def generating(self: Any, *args: Any, **options: Any) -> Any:
        if layers.model is not None:
            return generate(self, *args, **options)
        layers.begin(self)
        try:
            return generate(self, *args, **options)
        finally:
            layers.end()

    def learn(result: torch.Tensor, *, value: bool) -> None:
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            values.learn(result, torch.full(result.shape, value, device="cpu"))

    def is_known(tensor: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return not tensor.is_meta or values.of(tensor) is not None

    def finished(self: Any, tokens: torch.Tensor, scores: Any, **options: Any) -> Any:
        layers.token_begin()
        result = is_finished(self, tokens, scores, **options)
        if not is_known(result):
            limits = [one.max_length for one in self if isinstance(one, criteria.MaxLengthCriteria)]
            is_full = any(tokens.shape[1] >= limit for limit in limits)
            learn(result, value=is_full)
            if is_full:
                stand_ins.note("generation")
        return result

    def beams_go_on(improvable: Any, done: Any, stopped: torch.Tensor, early_stopping: Any) -> Any:
        result = goes_on(improvable, done, stopped, early_stopping)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            known = values.of(stopped)
        if not is_known(result) and known is not None:
            learn(result, value=not bool(known.all()))
        return result

    stand_ins.put(utils.GenerationMixin, "generate", generating)
    stand_ins.put(criteria.StoppingCriteriaList, "__call__", finished)
    stand_ins.put(utils.GenerationMixin, "_beam_search_has_unfinished_sequences", staticmethod(beams_go_on))
