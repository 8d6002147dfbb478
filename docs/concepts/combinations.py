"""Tables of docs/combinations.md: from the table of what a workload's settings exclude and need."""

from __future__ import annotations

import re

from concepts.page import page, table
from trainatomy.workload.features import FEATURES
from trainatomy.workload.support import BETWEEN_SECTIONS, WITHIN_SECTIONS, Rule, Subject
from trainatomy.workload.support import table as rules


def combinations_page() -> str:
    """Render docs/combinations.md."""
    parts = {"within": WITHIN_SECTIONS, "between": BETWEEN_SECTIONS}
    return page(
        "combinations.md",
        {name: "\n\n".join(map(_subject, rules()[part].values())) for name, part in parts.items()},
    )


def _subject(subject: Subject) -> str:
    """Return the heading and the table of a subject; what is refused alike shares a line."""
    alike: dict[tuple[str, str, str], list[Rule]] = {}
    for rule in subject.rules:
        alike.setdefault((rule.with_, rule.without, rule.message), []).append(rule)
    applies = f"Only {_with(subject.when)}.\n\n" if subject.when else ""
    head = ("refused", "with or without", "why, and what to do instead")
    return f"### {subject.title}\n\n{applies}{table(head, [_row(group) for group in alike.values()])}"


def _row(group: list[Rule]) -> tuple[str, ...]:
    rule = group[0]
    others = [_with(rule.with_)] if rule.with_ else []
    others += [f"without {_named(rule.without)}"] if rule.without else []
    why = re.sub(r"(?<!\{)\{[\w.]*?(\w+)\}(?!\})", r"*\1*", rule.message).replace("{{", "{").replace("}}", "}")
    return ", ".join(_named(each.refuse) for each in group), ", ".join(others), why.replace("|", "\\|")


def _with(name: str) -> str:
    if name.startswith("not ") and " and " not in name and " or " not in name:
        return f"without {_named(name.removeprefix('not '))}"
    return f"with {_named(name)}"


def _named(name: str) -> str:
    """Return a feature or a combination of features, with settings marked as code."""
    if name not in FEATURES:
        for word in (" or ", " and "):
            if word in name:
                return word.join(map(_named, name.split(word)))
        if name.startswith("not "):
            return f"not {_named(name.removeprefix('not '))}"
    return f"`{name}`" if name not in FEATURES or re.fullmatch(r"[\w.]+\.\w+", name) else name
