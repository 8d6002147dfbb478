"""Does the search with permissions find what fits?  20 models cut to a few layers, on GPUs of eight sizes.

    PYTHONPATH=src python benchmarks/fit/permissions.py [--models 20] [--layers 4] [--allow lora,quantization]

For each model, one simulation of a candidate serves all sizes.  A row says on how many sizes something fits.  A size is
a failure if the candidate with all that saves memory fits and nothing was found.  Its best candidate is missed if one
that was executed for another size fits and is faster by more than a hundredth.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import cast

import fit_cases
from fit_search import Remembering, under_limits

from trainatomy.results.fit import Permission
from trainatomy.runs.predicting import prediction_pool
from trainatomy.search.execution import Observer
from trainatomy.search.explore import Exploration
from trainatomy.search.fitting import explore
from trainatomy.search.options import SearchOptions
from trainatomy.search.outcomes import outcome_of
from trainatomy.workload.schema import Workload

LIMITS_GIB = (2, 3, 4, 5, 6, 8, 12, 16)
"""Sizes of GPUs, for models of four layers about what 8 to 80 GB are for whole ones."""
MODELS = {
    "meta-llama/Llama-3.1-8B": ("num_hidden_layers", "bfloat16", 4096),
    "mistralai/Mistral-7B-v0.1": ("num_hidden_layers", "bfloat16", 2048),
    "meta-llama/Llama-3.2-1B": ("num_hidden_layers", "bfloat16", 4096),
    "meta-llama/Llama-3.2-3B": ("num_hidden_layers", "bfloat16", 2048),
    "meta-llama/Llama-2-7b-hf": ("num_hidden_layers", "float16", 2048),
    "meta-llama/Llama-2-13b-hf": ("num_hidden_layers", "bfloat16", 2048),
    "Qwen/Qwen2.5-1.5B": ("num_hidden_layers", "bfloat16", 2048),
    "Qwen/Qwen2.5-7B": ("num_hidden_layers", "bfloat16", 2048),
    "Qwen/Qwen3-4B": ("num_hidden_layers", "bfloat16", 2048),
    "Qwen/Qwen3-8B": ("num_hidden_layers", "bfloat16", 1024),
    "google/gemma-2b": ("num_hidden_layers", "bfloat16", 2048),
    "google/gemma-3-1b-pt": ("num_hidden_layers", "bfloat16", 2048),
    "microsoft/phi-2": ("num_hidden_layers", "bfloat16", 1024),
    "facebook/opt-1.3b": ("num_hidden_layers", "float32", 1024),
    "facebook/opt-6.7b": ("num_hidden_layers", "bfloat16", 1024),
    "EleutherAI/pythia-2.8b": ("num_hidden_layers", "float32", 1024),
    "EleutherAI/pythia-6.9b": ("num_hidden_layers", "bfloat16", 1024),
    "openai-community/gpt2-xl": ("n_layer", "float32", 1024),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": ("num_hidden_layers", "float32", 2048),
    "google-bert/bert-large-uncased": ("num_hidden_layers", "float32", 512),
}
"""Key of the number of layers, dtype of the weights, and tokens of a sample."""
FASTER = 0.01


def workload_of(model: str, layers: int, gib: int) -> Workload:
    """Return the training of a model cut to some layers on a GPU of that size."""
    key, dtype, length = MODELS[model]
    return Workload.from_mapping(
        {
            "model": {"id": model, "dtype": dtype, "config": {key: layers}},
            "data": {"sequence_length": length},
            "gpu": fit_cases.limited(gib),
        }
    )


def searched(model: str, layers: int, options: SearchOptions, jobs: int) -> str:
    """Search for a model on every size, and return what came out as a row."""
    began = time.perf_counter()
    with prediction_pool(lambda workload: under_limits(LIMITS_GIB, None, workload), jobs) as pool:
        executor = Remembering(pool, LIMITS_GIB)
        found = {gib: explore(workload_of(model, layers, gib), options, executor, Observer()) for gib in LIMITS_GIB}
        failures = [gib for gib, each in found.items() if each.best is None and _leanest_fits(each)]
        missed = [gib for gib, each in found.items() if _is_missed(each, list(found.values()), executor)]
    fits = sum(each.best is not None for each in found.values())
    executed = max(len(each.outcomes) for each in found.values())
    return (
        f"{model:36} fits {fits} of {len(LIMITS_GIB)} sizes; failures {failures or '-'}; missed {missed or '-'}; "
        f"at most {executed} candidates executed; {len(executor.known)} in all; {time.perf_counter() - began:.0f} s"
    )


def _leanest_fits(found: Exploration) -> bool:
    point = found.space.leanest()
    found.execute([point])
    return point in found.outcomes and found.outcomes[point].fits


def _is_missed(found: Exploration, all_found: Sequence[Exploration], executor: Remembering) -> bool:
    """Return whether a candidate that another size executed fits this one too, and is faster than its choice."""
    if found.best is None:
        return False
    others = {point for each in all_found for point in each.outcomes} - set(found.outcomes)
    per_token = "sequence-length" in found.space.allowed
    for point in others:
        prediction = executor.submit(found.space.workload_at(point)).result()
        if isinstance(prediction, Exception):
            continue
        outcome = outcome_of(point, prediction, found.usable_bytes, per_token=per_token)
        if outcome.fits and outcome.seconds < found.best.seconds * (1 - FASTER):
            print("    missed:", found.usable_bytes // fit_cases.GIB, point, outcome.seconds / found.best.seconds)
            return True
    return False


def main() -> None:
    """Search for the first models of the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=len(MODELS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--allow", default="lora,quantization,optimizer")
    parser.add_argument("--samples", type=int, default=8, help="effective batch size")
    given = parser.parse_args()
    allow = cast("tuple[Permission, ...]", tuple(filter(None, given.allow.split(","))))
    options = SearchOptions(given.samples, allow=allow, prices=False)
    for model in list(MODELS)[: given.models]:
        print(searched(model, given.layers, options, jobs=1), flush=True)


if __name__ == "__main__":
    main()
