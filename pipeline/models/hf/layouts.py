"""Weights that files hold in another layout than the model does: experts one by one, for example.

transformers 5 merges the matrices of a layer's experts to one parameter on loading, and has rules
for it (`conversion_mapping.py` there); a rule is used here in both directions, for one parameter
(or one group of parameters) at a time.
"""

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Some tensors of files, and the parameters that a rule makes of them.

    `sources` are (name on disk, name in the rule's terms, pattern of the rule), in the rule's
    order. `produces` are names of the whole model.
    """

    rule: Any
    target: str
    sources: tuple[tuple[str, str, str], ...]
    produces: tuple[str, ...]

    @property
    def stored(self) -> list[str]:
        """The names on disk."""
        return [name for name, _, _ in self.sources]

    def from_disk(self, stored: Mapping[str, Tensor], whole: Any) -> dict[str, Tensor]:
        """Parameters from tensors of files, by name; either may lie on the meta device."""
        rule = copy.deepcopy(self.rule)
        for name, _, pattern in self.sources:
            rule.add_tensor(self.target, name, pattern, stored[name])
        return self._convert(rule, self.target, whole)

    def to_disk(self, parameters: Mapping[str, Tensor], whole: Any) -> dict[str, Tensor]:
        rule = self.rule.reverse_transform()
        first = None
        for name in self.produces:
            renamed, pattern = rule.rename_source_key(name)
            first = first or renamed
            rule.add_tensor(first, name, pattern, parameters[name])
        names = {inner: name for name, inner, _ in self.sources}
        return {names[inner]: tensor for inner, tensor in self._convert(rule, first, whole).items()}

    def _convert(self, rule: Any, target: str | None, whole: Any) -> dict[str, Tensor]:
        try:
            made = rule.convert(target, model=whole, config=whole.config)
        except (RuntimeError, TypeError, IndexError, KeyError) as error:
            raise ValueError(f"{', '.join(self.produces)}: {error}") from error
        return {
            name: (value[0] if isinstance(value, list) else value) for name, value in made.items()
        }


@dataclass
class Matched:
    """Where the parameters of a whole model are on disk."""

    plain: dict[str, str] = field(default_factory=dict)  # parameter -> name on disk
    layouts: list[Layout] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)  # name on disk -> what it became


def match_names(stored: Iterable[str], whole: Any) -> Matched:
    """Match names on disk to the parameters of a whole model, which may lie on the meta device."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(whole)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    names, prefix = whole.state_dict(), whole.base_model_prefix
    found = Matched()
    groups: dict[str, list[tuple[str, str, str]]] = {}
    for name in sorted(stored, key=_natural):
        target, pattern = rename_source_key(name, renamings, converters, prefix, names)
        inner, _ = rename_source_key(name, renamings, [], prefix, names)
        if inner in names:  # already in the model's layout
            found.plain[inner] = name
        elif pattern is not None and target in names:
            if target.startswith(f"{prefix}.") and not inner.startswith(f"{prefix}."):
                inner = f"{prefix}.{inner}"
            groups.setdefault(target, []).append((name, inner, pattern))
        else:
            found.unknown[name] = target
    for target, sources in groups.items():
        rule = by_pattern[sources[0][2]]
        # the rule's first pattern names the target, the others its siblings
        patterns = [pattern.strip("^$") for pattern in rule.target_patterns]
        made = dict.fromkeys(target.replace(patterns[0], pattern, 1) for pattern in patterns)
        produces = tuple(name for name in made if name in names)
        found.layouts.append(Layout(rule, target, tuple(sources), produces))
    return found


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort by numbers as numbers: the order in which experts are merged."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
