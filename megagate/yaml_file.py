"""YAML files that a user writes, read strictly: of a key that comes twice YAML would drop the first value."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from megagate.errors import UserError, reason


class _UniqueKeyLoader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if isinstance(key, Hashable) and seen.setdefault(key, line) != line:
                raise yaml.YAMLError(f"the key {key} is in line {seen[key]} and again in line {line}; keep one of them")
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path, what: str) -> Any:
    """Return the content of the YAML file `path`, which is `what` in messages.

    Raises:
        UserError: it cannot be read, is not valid, or has a key twice in a mapping.
    """
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)  # it is safe
    except OSError as error:
        raise UserError(f"cannot read {what} {path}: {error.strerror}; name a file that is there") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{what} {path} is not valid YAML: {reason(error)}") from error
