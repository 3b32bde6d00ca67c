"""Edits of YAML text that change or add one setting, and leave comments and layout as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from nemo_geomask.errors import ConfigError


def set_in_text(text: str, key: str, value: Any, shown: str) -> str:
    """Return the text of a file with a setting changed or added.

    Args:
        text: the file's text, valid YAML.
        key: dotted key, such as ``a.b[0].c``; sections that the file lacks are added.
        value: its new value.
        shown: the value as one line of YAML.

    Raises: ConfigError: an edit of the text can't do it: a value of several lines, an alias, a section that is none.
    """
    import yaml  # Comes with omegaconf.

    node = yaml.compose(text, Loader=yaml.SafeLoader)
    names = re.findall(r"[^.\[\]]+", key)
    rest = list(names)
    while rest and (child := _child(node, rest[0])) is not None:
        node = child
        rest.pop(0)
    edited = _insert(text, node, rest, shown) if rest else _replace(text, node, shown)
    expected = yaml.safe_load(text) or {}
    try:
        place = expected
        for name in names[:-1]:
            place = place[int(name)] if isinstance(place, list) else place.setdefault(name, {})
        place[int(names[-1]) if isinstance(place, list) else names[-1]] = value
        is_right = yaml.safe_load(edited) == expected
    except (yaml.YAMLError, AttributeError, LookupError, TypeError, ValueError):
        is_right = False
    if not is_right:
        raise ConfigError(f"{key}: the file's layout does not allow an edit of one line; set {key}: {shown} by hand")
    return edited


def rename_in_text(text: str, key: str, name: str) -> str:
    """Return the text of a file with the last part of a dotted key renamed.

    Raises: ConfigError: the file lacks the key, which it inherits, or has the new name beside it.
    """
    import yaml

    node = yaml.compose(text, Loader=yaml.SafeLoader)
    *sections, last = re.findall(r"[^.\[\]]+", key)
    for section in sections:
        node = _child(node, section)
    keys = [each for each, _ in node.value] if isinstance(node, yaml.MappingNode) else []
    marks = [(each.start_mark.index, each.end_mark.index) for each in keys if each.value == last]
    if not marks or any(each.value == name for each in keys):
        raise ConfigError(f"{key}: {'is beside' if marks else 'is inherited; rename it to'} {name}; do so by hand")
    return f"{text[: marks[0][0]]}{name}{text[marks[0][1] :]}"


def _child(node: Any, name: str) -> Any:
    """Return the value of a key, or the item of an index; None if there is none, or an alias stands in its place."""
    import yaml

    pairs: list[Any] = node.value if isinstance(node, yaml.MappingNode) else []
    if isinstance(node, yaml.SequenceNode):
        pairs = [(yaml.ScalarNode("", f"{index}", node.start_mark), item) for index, item in enumerate(node.value)]
    matches = [value for key, value in pairs if key.value == name and value.start_mark.index >= key.start_mark.index]
    return matches[0] if matches else None


def _replace(text: str, node: Any, shown: str) -> str:
    start, end = node.start_mark.index, node.end_mark.index
    space = "" if text[start - 1 : start].isspace() else " "  # `key:` without a value
    return f"{text[:start]}{space}{shown}{text[end:]}"


def _insert(text: str, node: Any, names: Sequence[str], shown: str) -> str:
    """Return the text with ``names``, each a section in the one before, and their value at the end of a mapping."""
    if getattr(node, "flow_style", False):
        inner = ": {".join(names) + f": {shown}" + "}" * (len(names) - 1)
        end = node.end_mark.index - 1
        return f"{text[:end].rstrip()}{', ' if node.value else ''}{inner}{text[end:]}"
    indent, line = 0, text.count("\n") + 1
    if isinstance(getattr(node, "value", None), list) and node.value:
        indent, line = node.value[0][0].start_mark.column, _last_line(node) + 1
    lines = text.splitlines(keepends=True)
    if lines and not lines[min(line, len(lines)) - 1].endswith("\n"):
        lines[min(line, len(lines)) - 1] += "\n"
    added = [f"{' ' * (indent + 2 * depth)}{name}:" for depth, name in enumerate(names)]
    lines[line:line] = "\n".join(added) + f" {shown}\n"
    return "".join(lines)


def _last_line(node: Any) -> int:
    """Return the last line of a node, counted from 0. A block's own end is where the next one begins."""
    if isinstance(node.value, list) and node.value and not node.flow_style:
        last = node.value[-1]
        return _last_line(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.line - (node.end_mark.column == 0 and node.end_mark.index > node.start_mark.index))
