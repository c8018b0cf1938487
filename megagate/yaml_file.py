"""YAML files that a user writes, read strictly: of a key that comes twice YAML would drop the first value."""

from pathlib import Path
from typing import Any

import yaml

from megagate.errors import UserError, reason

MERGE = "<<"
"""The key that takes in other mappings, as often as one likes."""


class _UniqueKeyLoader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        places: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == MERGE:
                continue
            line = key.start_mark.line + 1
            if key.value in places:
                raise yaml.YAMLError(f"the key {key.value} is in line {places[key.value]} and again in line {line}")
            places[key.value] = line
        return node


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
        raise UserError(f"{what} {path} is not valid YAML: {reason(error)}; mend it there") from error
