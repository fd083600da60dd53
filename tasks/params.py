"""Profiles: `conf/<profile>.yaml` composed into `params.yaml`.

    python -m tasks profile tiny      (or: make profile NAME=tiny)

A profile may say `extends: other`; its keys are then merged over the other's, mapping by mapping. Everything in the
result gives results their identity, so machines, ports and paths of tools do not belong there.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import yaml

from tasks.files import atomic_write

ROOT = Path(__file__).resolve().parent.parent
HEADER = """# Composed from conf/{name}.yaml by `make profile NAME={name}`: edit the profile, not this file.
# As composed: {digest}
"""


class _UniqueLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice: the second would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise ValueError(
                    f"{key_node.start_mark.name}:{key_node.start_mark.line + 1}: key {key!r} is given twice"
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 1e-3 as text; numbers in the field are written that way, so read them as numbers.
_UniqueLoader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_UniqueLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def load_yaml(path: Path) -> dict:
    """Read a mapping from a YAML file. Errors name the file and the line."""
    path = Path(path)
    try:
        with open(path, encoding="utf-8") as handle:
            loader = _UniqueLoader(handle)
            try:
                value = loader.get_single_data()
            finally:
                loader.dispose()
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not readable as YAML: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a mapping at the top, found {type(value).__name__}")
    return value


def merge(base: dict, over: dict) -> dict:
    """`over` laid on `base`: mappings merge key by key, anything else replaces."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def profiles(conf: Path = ROOT / "conf") -> list[str]:
    """Names of the profiles in `conf`: every YAML file there with a `profile:` key."""
    return sorted(p.stem for p in conf.glob("*.yaml") if "profile" in load_yaml(p))


def compose(name: str, conf: Path = ROOT / "conf", _chain: tuple[str, ...] = ()) -> dict:
    """The parameters of a profile with everything it extends. ValueError for an unknown name or a circle."""
    path = conf / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(f"unknown profile {name!r}: {conf.name}/ has {', '.join(profiles(conf))}")
    if name in _chain:
        raise ValueError(f"profiles extend each other in a circle: {' -> '.join((*_chain, name))}")
    own = load_yaml(path)
    parent = own.pop("extends", None)
    return merge(compose(parent, conf, (*_chain, name)), own) if parent else own


def dump(params: dict, name: str) -> str:
    """The text of params.yaml."""

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    body = yaml.dump(params, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
    return HEADER.format(name=name, digest=_digest(body)) + body


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]


def edited(root: Path = ROOT) -> bool:
    """Whether somebody has changed params.yaml since a profile was composed into it."""
    target = root / "params.yaml"
    if not target.is_file():
        return False
    found = re.match(r"# Composed from .*\n# As composed: (\w+)\n", text := target.read_text(encoding="utf-8"))
    return found is not None and _digest(text[found.end() :]) != found[1]


def use_profile(name: str, root: Path = ROOT) -> str:
    """As `write_profile`, but edits made in params.yaml itself under this profile are kept. Returns a line that says what
    was done, "" when nothing was. ValueError when both the file and its profile have changed, or another profile is wanted."""
    if not edited(root):
        return f"params.yaml now holds profile {name}" if write_profile(name, root) else ""
    text = dump(compose(name, root / "conf"), name)
    same = text.splitlines()[:2] == (root / "params.yaml").read_text(encoding="utf-8").splitlines()[:2]
    if not same:
        raise ValueError(
            f"params.yaml has been edited by hand and is not what conf/{name}.yaml would give: move the edits to a profile, "
            f"or discard them with `make profile NAME={name}`"
        )
    return f"params.yaml has edits of its own on top of profile {name}; kept"


def write_profile(name: str, root: Path = ROOT) -> bool:
    """Compose a profile into params.yaml. Returns whether the file changed."""
    text = dump(compose(name, root / "conf"), name)
    target = root / "params.yaml"
    if target.is_file() and target.read_text(encoding="utf-8") == text:
        return False
    atomic_write(target, text)
    return True


def load_params(root: Path = ROOT) -> dict:
    """The active parameters."""
    return load_yaml(root / "params.yaml")
