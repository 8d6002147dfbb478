"""Predict the networks with cuDNN's library and with the rules, before they are measured.

python benchmarks/cudnn/predict_networks.py --gpu h200 --torch 2.11.0

Each prediction becomes a line of ``predictions/GPU-library.jsonl`` or ``predictions/GPU-rules.jsonl`` at once; a second
call continues. ``README.md`` says how they are measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "everyday"))

import everyday_cases
import predict as everyday

from trainatomy.api import predict
from trainatomy.errors import TrainatomyError
from trainatomy.results.prediction import Prediction

HERE = Path(__file__).parent
SOURCES = ("library", "rules")


def predicted(case: everyday_cases.Case, gpu: str, source: str, torch: str | None) -> Prediction | TrainatomyError:
    """Return the prediction of a case with one of the sources of cuDNN's workspaces, or why there is none."""
    changes = {"software.cudnn": source} | ({"software.torch": torch} if torch else {})
    try:
        return predict(case.workload(gpu).replace(changes))
    except TrainatomyError as error:
        return error


def main() -> int:
    """Predict; return 1 where a case cannot be predicted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--torch", help="version of PyTorch on the GPU's machine (default: the installed one)")
    parser.add_argument("--names", help="cases, separated by commas")
    parser.add_argument("--sources", default=",".join(SOURCES))
    parser.add_argument("--cases", type=Path, default=HERE / "cases", help="folder of cases (default: the sixty)")
    parser.add_argument("--out", type=Path, default=HERE / "predictions", help="folder")
    options = parser.parse_args()
    commit, failed = everyday.commit_of(HERE), 0
    for source in options.sources.split(","):
        out = options.out / f"{options.gpu}-{source}.jsonl"
        done = {line["name"] for line in everyday_cases.lines(out) if "error" not in line}
        for case in everyday_cases.chosen(everyday_cases.cases(options.cases), options.names, None):
            if case.name in done:
                continue
            began = time.monotonic()
            found = predicted(case, options.gpu, source, options.torch)
            failed += isinstance(found, TrainatomyError)
            everyday_cases.append(out, everyday.line_of(case, found, commit, paced={}))
            shown = found if isinstance(found, TrainatomyError) else f"{found.memory.peak_reserved_bytes:,}"
            print(f"{source:8} {case.name:28} {shown} in {time.monotonic() - began:.1f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
