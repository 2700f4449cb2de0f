"""From YAML files and command-line overrides to checked dataclasses.  `config.load_config` feeds it and gets a Config.

    file, file, overrides ──► ConfigTree.add (merge, remember who set what) ──► ConfigTree.build (check, construct)

Nothing here knows what a config holds: the dataclasses given as the root say which keys, types and sections exist.
Every error is one ConfigError that names where the value was set, its dotted key, the value and what to write instead.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import pydantic
import yaml

import configs

Tree = dict[str, Any]
T = TypeVar("T")


class ConfigError(ValueError):
    """A wrong file, key, type or value; the command line answers it with exit code 2."""


# ------------------------------------------------------------------------------------------------ sources


def shipped_presets() -> list[str]:
    """Names that `--config` takes beside paths."""
    root = Path(configs.__path__[0])
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml"))


def find_file(name: Path | str) -> Path:
    """A path as it stands, else the shipped preset of that name; raises ConfigError with the presets' names."""
    if Path(name).is_file():
        return Path(name)
    preset = str(name).removeprefix("configs/").removesuffix(".yaml")
    if preset in shipped_presets():
        return Path(configs.__path__[0]) / f"{preset}.yaml"
    raise ConfigError(f"--config {name}: no such file; shipped presets are {', '.join(shipped_presets())}")


def read_yaml(path: Path) -> Tree:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected `key: value` lines at the top, found a {type(tree).__name__}")
    return tree


def parse_overrides(tokens: Sequence[str]) -> list[Tree]:
    """`--a-b.c value` or `--a-b.c=value` -> {"a_b": {"c": "value"}}, one tree per override, in order.

    Values stay text, which pydantic converts to the field's type; lists and null are read as YAML.
    """
    trees: list[Tree] = []
    rest = list(tokens)
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        if not flag.startswith("--"):
            raise ConfigError(f"command line: {flag!r} is not an option; overrides look like --actor-learner.lr 1e-4")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"command line: {flag} needs a value, as in --actor-learner.lr 1e-4")
            text = rest.pop(0)
        try:
            value: Any = yaml.safe_load(text) if text.startswith(("[", "{")) or text in ("null", "~") else text
        except yaml.YAMLError as error:
            raise ConfigError(f"command line: {flag} {text}: {' '.join(str(error).split())}") from None
        for part in reversed(flag[2:].replace("-", "_").split(".")):
            value = {part: value}
        trees.append(value)
    return trees


# ------------------------------------------------------------------------------------------------ the tree


def load_tree(root: type[T], files: Sequence[Path | str], overrides: Sequence[str]) -> T:
    """`root`'s defaults, then each file, then the overrides; later wins.  Raises ConfigError."""
    tree = ConfigTree(root)
    for file in files:
        path = find_file(file)
        tree.add(read_yaml(path), str(path))
    for values in parse_overrides(overrides):
        tree.add(values, "command line")
    return tree.build()


class ConfigTree(Generic[T]):
    """Layers of values over a root dataclass's defaults, each value with its origin.

    >>> tree = ConfigTree(Config)
    >>> tree.add({"env": {"kind": "reach"}}, "configs/debug.yaml")
    >>> tree.build().env
    ReachConfig(...)
    """

    def __init__(self, root: type[T]) -> None:
        self._root = root
        self._defaults = root()
        self._tree: Tree = {}
        self._origins: dict[str, str] = {}

    def add(self, values: Mapping[str, Any], source: str) -> None:
        """Merge `values` over what is there; a section that names another `kind` replaces the one below it whole."""
        self._merge(self._tree, values, "", source)

    def build(self) -> T:
        built: T = self._build(self._root, self._tree, "")
        return built

    def _merge(self, base: Tree, new: Mapping[str, Any], prefix: str, source: str) -> None:
        for name, value in new.items():
            path = f"{prefix}{name}"
            self._origins[path] = source
            if not isinstance(value, dict):
                base[str(name)] = value
                continue
            old = base.get(str(name), {})
            kind = value.get("kind")
            replaces = kind is not None and isinstance(old, dict) and kind != old.get("kind", self._default_kind(path))
            base[str(name)] = {} if replaces or not isinstance(old, dict) else old
            self._merge(base[str(name)], value, f"{path}.", source)

    def _default_kind(self, path: str) -> str | None:
        node: Any = self._defaults
        for part in path.split("."):
            node = getattr(node, part, None)
        return getattr(node, "kind", None)

    def _build(self, cls: type[Any], tree: Tree, prefix: str, members: tuple[type, ...] = ()) -> Any:
        """`members`: the union that `cls` was chosen from, if there was a choice."""
        hints = typing.get_type_hints(cls)
        values: Tree = {}
        for name, value in tree.items():
            path = f"{prefix}{name}"
            source = self._origins[path]
            if name not in hints:
                remedy = _of_other_kind(name, prefix, members) or self._nearest(path, prefix, list(hints))
                raise ConfigError(f"{source}: unknown key {path}; {remedy}")
            sections = _sections(hints[name])
            if not sections:
                values[name] = _check(hints[name], value, f"{source}: {path} = {value!r}")
            elif isinstance(value, dict):
                values[name] = self._build(self._member(sections, value, path), value, f"{path}.", sections)
            else:
                key = "kind" if len(sections) > 1 else "NAME"
                raise ConfigError(f"{source}: {path} = {value!r}: is a section, set its keys ({path}.{key})")
        try:
            return cls(**values)
        except ValueError as error:
            # A component's message starts with its key; in front of it goes who set that key, if anyone did.
            message = f"{prefix}{error}" if str(error).partition(" ")[0] in hints else str(error)
            origin = self._origins.get(message.partition(" ")[0]) or self._origins.get(prefix.rstrip("."))
            raise ConfigError(f"{origin}: {message}" if origin else message) from None

    def _member(self, sections: tuple[type, ...], value: Tree, path: str) -> type:
        if len(sections) == 1:
            return sections[0]
        kinds = _kinds(sections)
        kind = value.get("kind", self._default_kind(path))
        if kind not in kinds:
            source = self._origins[f"{path}.kind"]
            raise ConfigError(f"{source}: {path}.kind = {kind!r}: use one of {', '.join(kinds)}{_close(kind, kinds)}")
        return kinds[kind]

    def _nearest(self, path: str, prefix: str, siblings: list[str]) -> str:
        """What was probably meant: a sibling spelt alike, the same name in another section, or any key spelt alike."""
        name = path.removeprefix(prefix)
        everything = _leaf_keys(dataclasses.asdict(self._defaults), "")  # type: ignore[call-overload]
        guesses = (
            [prefix + sibling for sibling in difflib.get_close_matches(name, siblings, n=1)]
            or [key for key in everything if key.rpartition(".")[2] == name]
            or difflib.get_close_matches(path, everything, n=1)
        )
        if guesses:
            return f"did you mean {' or '.join(guesses)}?"
        return f"valid keys are {', '.join(prefix + sibling for sibling in siblings)}"


def _sections(hint: Any) -> tuple[type, ...]:
    """The dataclasses a field may hold: itself, the members of a union, or none for a plain value."""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return tuple(member for member in members if dataclasses.is_dataclass(member) and isinstance(member, type))


def _kinds(sections: tuple[type, ...]) -> dict[str, type]:
    """The members of a union by their `kind`."""
    return {typing.get_args(typing.get_type_hints(section)["kind"])[0]: section for section in sections}


def _of_other_kind(name: str, prefix: str, members: tuple[type, ...]) -> str:
    """What to say of a key that another member of the union has; empty if none has it."""
    alternatives = _kinds(members) if len(members) > 1 else {}
    owners = [kind for kind, member in alternatives.items() if name in typing.get_type_hints(member)]
    return f"it belongs to kind {' or '.join(owners)}, set {prefix}kind {owners[0]}" if owners else ""


def _check(hint: Any, value: Any, what: str) -> Any:
    """`value` as the field's type: text becomes a number where one is wanted, because YAML reads 1e-3 as text."""
    try:
        checked = pydantic.TypeAdapter(hint).validate_python(value)
    except pydantic.ValidationError as error:
        reason = error.errors()[0]["msg"]
        choices = [str(choice) for choice in typing.get_args(hint)]
        raise ConfigError(f"{what}: {reason[0].lower()}{reason[1:]}{_close(value, choices)}") from None
    if isinstance(checked, float) and not math.isfinite(checked):
        raise ConfigError(f"{what}: use a finite number")
    if isinstance(value, bool) and not isinstance(checked, bool):  # pydantic would read `true` as 1
        raise ConfigError(f"{what}: use a number")
    return checked


def _close(value: object, choices: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(str(value), list(choices), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _leaf_keys(tree: Mapping[str, Any], prefix: str) -> list[str]:
    keys: list[str] = []
    for name, value in tree.items():
        keys += _leaf_keys(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"]
    return keys
