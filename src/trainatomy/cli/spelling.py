"""How an option may be spelt: ``--per_device_train_batch_size``, ``--fp16 true``, as in a training script."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_ON = frozenset({"true", "yes", "on", "1"})
_OFF = frozenset({"false", "no", "off", "0"})


def canonical(arguments: Sequence[str], switches: Collection[str], set_aside: Collection[str] = ()) -> list[str]:
    """Bring ``arguments`` into the one spelling that the parser knows.

    Names of options take hyphens; ``--fp16 true``, ``--fp16=True`` become ``--fp16``, and with false ``--no-fp16``, for
    the options named in ``switches`` (``{"--fp16", ...}``).  Those of ``set_aside``, whose value does not matter, may
    come with or without one (``--do_train``).  Everything after ``--`` stays as it is.

    >>> canonical(["--max_steps=3", "--bf16", "False", "file_a.yaml"], {"--bf16"})
    ['--max-steps=3', '--no-bf16', 'file_a.yaml']
    """
    spelt: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return [*spelt, argument, *rest]
        if not argument.startswith("--"):
            spelt.append(argument)
            continue
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")
        if name in set_aside and not equals:
            given = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
            spelt.append(f"{name}={given}")
        elif name not in switches:
            spelt.append(name + equals + value)
        elif not equals:
            given = rest.pop(0) if rest and rest[0].lower() in _ON | _OFF else "true"
            spelt.append(_switched(name, given))
        else:
            spelt.append(_switched(name, value) if value.lower() in _ON | _OFF else name + equals + value)
    return spelt


def _switched(name: str, value: str) -> str:
    return name if value.lower() in _ON else f"--no-{name.removeprefix('--')}"
