"""``generate()`` of transformers: no sequence ends before the maximum length, because nobody knows the tokens.

As in workloads, layers that do the same for a token are copies of each other, and the operations of the middle token
stand for those of all further ones; a call that is like the one before is a copy of it as a whole.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch

from trainatomy.results.script import StandInKind
from trainatomy.scripts.standins.notes import StandIns
from trainatomy.simulator.generation import CallOfGenerate, RepeatedGeneration


def install(stand_ins: StandIns) -> None:
    """Put it in place once transformers' generation is imported."""
    stand_ins.when(_MODULES, functools.partial(_put, stand_ins))


_MODULES = ("transformers.generation.stopping_criteria", "transformers.generation.utils")


def _put(stand_ins: StandIns, criteria: Any, utils: Any) -> None:
    values = stand_ins.process.recorder.values
    is_finished = criteria.StoppingCriteriaList.__call__
    goes_on = utils.GenerationMixin._beam_search_has_unfinished_sequences

    call = CallOfGenerate(stand_ins.process.recorder)
    repeated = RepeatedGeneration(stand_ins.process.recorder)
    generate = utils.GenerationMixin.generate
    begun, noted = 0, Counter[tuple[StandInKind, str]]()

    @functools.wraps(generate)
    def generating(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal begun, noted
        if call.runs:
            return generate(self, *args, **options)
        # In eval mode, each call of the model may be an evaluation, which a copy would not report.
        tokens = repeated.repeat(self, args, options) if self.training else None
        if tokens is not None:
            stand_ins.used.update(noted)
            return tokens
        call.begin(self)
        begun, before = 0, stand_ins.used.copy()
        try:
            tokens = generate(self, *args, **options)
            noted = stand_ins.used - before
        finally:
            call.end()
            repeated.end(tokens)
        return tokens

    def token_begin(conditions: Any, tokens: torch.Tensor, limits: list[int]) -> None:
        """Begin a further token; how many there will be is known where only length and end tokens end a sequence."""
        nonlocal begun
        plain = all(isinstance(each, (criteria.MaxLengthCriteria, criteria.EosTokenCriteria)) for each in conditions)
        begun += 1
        call.token_begin(begun, min(limits) - tokens.shape[1] + begun if plain and limits else None)

    def learn(result: torch.Tensor, *, value: bool) -> None:
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            values.learn(result, torch.full(result.shape, value, device="cpu"))

    def is_known(tensor: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return not tensor.is_meta or values.of(tensor) is not None

    def finished(self: Any, tokens: torch.Tensor, scores: Any, **options: Any) -> Any:
        result = is_finished(self, tokens, scores, **options)
        limits = [one.max_length for one in self if isinstance(one, criteria.MaxLengthCriteria)]
        is_full = any(tokens.shape[1] >= limit for limit in limits)
        if not is_known(result):
            learn(result, value=is_full)
            if is_full:
                stand_ins.note("generation")
        if call.runs and not is_full:
            token_begin(self, tokens, limits)
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
