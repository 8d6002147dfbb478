"""Read every example configuration of a framework, and count what becomes of them.

    python lab/dialects/examples.py /path/to/axolotl axolotl
    python lab/dialects/examples.py /path/to/axolotl axolotl --set lora_mlp_kernel=false
    python lab/dialects/examples.py /path/to/ms-swift swift --list

Where a configuration asks for several GPUs without saying how many, it is read with two.
"""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from collections import Counter, defaultdict
from pathlib import Path

import yaml

from trainatomy.errors import TrainatomyError
from trainatomy.workload.dialects.recognise import command_in, dialect_of
from trainatomy.workload.dialects.translation import dialect
from trainatomy.workload.reading import read

PATTERNS = {
    "axolotl": ["examples/**/*.y*ml"],
    "swift": ["examples/**/*.sh", "examples/**/*.yaml"],
    "llamafactory": ["examples/**/*.yaml"],
    "automodel": ["examples/**/*.yaml"],
    "trl": ["examples/**/*.y*ml", "examples/**/*.sh", "examples/cli_configs/*"],
}
NO_TRAINING = re.compile("trains nothing")
NEEDS_GPUS = re.compile(r"several GPUs|set parallel\.gpus|shards over")
GPUS = 2


def main() -> None:
    """Read the examples, and print how many are workloads, why others are refused, and what crashed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path)
    parser.add_argument("dialect", choices=sorted(PATTERNS))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys to set in each file")
    parser.add_argument("--list", action="store_true", help="print what becomes of each file")
    options = parser.parse_args()
    found = {path for pattern in PATTERNS[options.dialect] for path in options.repository.glob(pattern)}
    files = [path for path in sorted(found) if _is_of(path, options.dialect)]
    read_files, crashes = Counter[str](), []
    reasons: dict[str, list[str]] = defaultdict(list)
    for path in files:
        name = str(path.relative_to(options.repository))
        kind, message = _read(_with_keys(path, options.dialect, options.set))
        read_files[kind] += 1
        if kind == "refused":
            reasons[_reason(message, path)].append(name)
        elif kind == "crash":
            crashes.append(f"{name}: {message}")
        if options.list:
            print(f"{kind:8} {name}: {message}")
    total = len(files) - read_files.pop("no training", 0)
    print(f"{total} configurations of {dialect(options.dialect).name}")
    for kind, count in read_files.most_common():
        print(f"  {kind:24} {count:4}  {count / max(total, 1):.0%}")
    for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(f"{len(names):4}  {reason}    e.g. {names[0]}")
    for crash in crashes:
        print(crash)
    sys.exit(bool(crashes))


def _is_of(path: Path, name: str) -> bool:
    """Return whether a file holds a training of a framework."""
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    if path.suffix == ".sh":
        command = command_in(text)
        return command is not None and command.table.id == name
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:
        return False
    table = dialect_of(content) if isinstance(content, dict) else None
    return table is not None and table.id == name


def _with_keys(path: Path, name: str, keys: list[str]) -> Path | str:
    """Return a file, or with keys to set the command that trains with it."""
    command = next(command for command, own in dialect(name).commands.items() if not isinstance(own, str))
    return f"{command} {path} {' '.join(keys)}" if keys and path.suffix != ".sh" else path


def _read(source: Path | str) -> tuple[str, str]:
    """Return what becomes of a file, and the message where it is refused."""
    try:
        read(source)
    except TrainatomyError as error:
        if NO_TRAINING.search(str(error)):
            return "no training", ""
        if not all(NEEDS_GPUS.search(line) for line in str(error).splitlines()):
            return "refused", str(error)
    except Exception:  # whatever it is, it is counted
        return "crash", " | ".join(traceback.format_exc().splitlines()[-3:])
    else:
        return "read", ""
    try:
        read(source, {"gpus": GPUS})
    except TrainatomyError as error:
        return "refused", str(error)
    except Exception:
        return "crash", " | ".join(traceback.format_exc().splitlines()[-3:])
    return f"read with --gpus {GPUS}", ""


def _reason(message: str, path: Path) -> str:
    """Return the first line of a message without the file, its line and figures."""
    first = message.splitlines()[0].replace(str(path), "").lstrip(":")
    return re.sub(r"^\d+: ", "", re.sub(r"\b\d[\d,.]*\b", "N", first)).strip()[:170]


if __name__ == "__main__":
    main()
