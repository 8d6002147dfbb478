"""Writes the pages that follow from the code: ``python docs/generate.py``; with ``--check``, only says which are out of
date.

docs/cli.md              every command and option, from the parser
docs/exit-codes.md       every exit code, from trainatomy.errors
docs/workload.md         every key of a workload file, from its schema
docs/schema/*.json       what --json prints, from the dataclasses
docs/context.md, .svg    from docs/concepts/context.md, the cards' data, and records
docs/time.md             from docs/concepts/time.md, the commands' output, and the clock's data; with its two figures
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path

from concepts import context, context_figure, step, step_figures

from trainatomy import errors
from trainatomy.cli.app import COMMANDS, load
from trainatomy.cli.exits import BROKEN_PIPE, BUG, INTERRUPTED
from trainatomy.cli.manual import Entry, panels, paragraphs, usage
from trainatomy.reporters import schema
from trainatomy.reporters.operations_json import anatomy_schema
from trainatomy.workload.reference import reference as workload_page

HERE = Path(__file__).parent
MARK = "<!-- Written by `make docs`; change the code it follows from. -->\n"


def cli_page() -> str:
    """The reference of the command line, as Markdown."""
    parts = ["# Command line\n", MARK, _ABOUT_CLI]
    said: set[Entry] = set()
    for entry in COMMANDS:
        command = load(entry.name)
        parts.append(f"## `{usage(command, f'trainatomy {entry.name}')}`\n")
        parts += [f"{paragraph}\n" for paragraph in paragraphs(command)]
        for name, entries in panels(command).items():
            rows = [f"| `{_cell(row.usage)}` | {_cell(row.help)} |" for row in entries if row not in said]
            if rows:
                parts.append("\n".join([f"### {name} ({entry.name})\n", "| | |", "| --- | --- |", *rows]) + "\n")
            said.update(entries)
        if entry.name in ("compare", "measure"):
            parts.append("And every other option of `predict` that describes a training.\n")
    return "\n".join(parts)


_ABOUT_CLI = """\
`trainatomy --help` lists the commands; `trainatomy COMMAND --help` says what is below.

- An option may be written with hyphens or underscores: `--per_device_train_batch_size 4` is
`--per-device-train-batch-size 4`.
- A switch is given as `--fp16`, `--no-fp16`, `--fp16 true` or `--fp16 false`.
- Data goes to stdout; notes, progress and errors go to stderr. Exit codes: [exit-codes.md](exit-codes.md).
- `--json` prints one object: [json.md](json.md). Keys of a workload file: [workload.md](workload.md).
- `--debug`, anywhere on the line, shows tracebacks and what the libraries say.
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def exit_codes_page() -> str:
    """Every exit code with its meaning, as Markdown."""
    found = [
        kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.TrainatomyError)
    ]
    rows = [
        (kind.exit_code, f"`{kind.__name__}`", _first(kind)) for kind in sorted(found, key=lambda kind: kind.exit_code)
    ]
    rows.insert(0, (0, "", "Done."))
    rows += [
        (BUG, "", "A bug of trainatomy; run again with `--debug` and report what it prints."),
        (INTERRUPTED, "", "Interrupted with Ctrl-C."),
        (BROKEN_PIPE, "", "Nobody reads the output any more, as in `trainatomy gpus | head -1`."),
    ]
    table = [f"| {code} | {name} | {_cell(meaning)} |" for code, name, meaning in rows]
    head = ["# Exit codes\n", MARK, "| code | exception in Python | meaning |", "| --- | --- | --- |", *table]
    return "\n".join([*head, _ABOUT_EXITS])


_ABOUT_EXITS = """
An unknown command or option, or one without its value, is 2 as well. With any code but 0 and 8, stdout is empty: also
under `--json`, an error is text on stderr. With 8 (`--check`) the prediction was made and is on stdout. `measure` exits
with 0 where the training ran out of memory: that is what was to be found out, and stands under `status`.
"""


def _first(kind: type) -> str:
    text = " ".join((inspect.getdoc(kind) or "").split()).replace("``", "`")
    return text[:1].upper() + text[1:]


def _json(make: Callable[[], dict[str, object]]) -> Callable[[], str]:
    return lambda: json.dumps(make(), indent=2, ensure_ascii=False) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": cli_page,
    "exit-codes.md": exit_codes_page,
    "workload.md": workload_page,
    "context.md": context.context_page,
    "context.svg": context_figure.context_picture,
    "time.md": step.time_page,
    "clocks.svg": step_figures.clocks_picture,
    "roofline.svg": step_figures.roofline_picture,
    "schema/prediction.schema.json": _json(schema.prediction_schema),
    "schema/comparison.schema.json": _json(schema.comparison_schema),
    "schema/measurement.schema.json": _json(schema.measurement_schema),
    "schema/record.schema.json": _json(schema.record_schema),
    "schema/operations.schema.json": _json(anatomy_schema),
}


def outdated() -> list[str]:
    """The pages whose file does not say what the code says."""
    return [
        name for name, make in PAGES.items() if not (HERE / name).exists() or (HERE / name).read_text("utf-8") != make()
    ]


def main() -> int:
    """Write the pages, or with ``--check`` return 1 where one is out of date."""
    if "--check" in sys.argv[1:]:
        stale = outdated()
        print(
            f"out of date: {', '.join(stale)}; run `make docs`" if stale else "documentation is up to date",
            file=sys.stderr,
        )
        return 1 if stale else 0
    for name, make in PAGES.items():
        (HERE / name).parent.mkdir(exist_ok=True)
        (HERE / name).write_text(make(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
