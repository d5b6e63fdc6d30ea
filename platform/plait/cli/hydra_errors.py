"""Converts Hydra's errors to Plait's form (value, rule, remedy), with the valid choices listed.

A seam: everything that depends on the texts of Hydra's errors, which change between its releases.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from plait.cli.hydra_globals import own_hydra
from plait.config.build import JOB_GROUPS, RUN_GROUPS, key_of
from plait.config.fields import likely, meant_by, unknown_key
from plait.config.overrides import is_sweep
from plait.core.errors import ConfigError, choices
from plait.data.sources import SOURCES
from plait.utils.paths import conf_dir
from plait.utils.spelling import NEAR, did_you_mean

# Names of a config group's choices, if the group's own name does not say.
KINDS = {"data": "data source", "search/stopping": "stopping rule", "sweeps": "named search or benchmark"}
SPACES = {  # an example of each function of a search space
    "choice": "adapter.rank=choice(4,8,16)",
    "range": "train.batch_size=range(4,20,4)",
    "interval": "train.lr=interval(1e-5,1e-3)",
    "tag": "train.lr=tag(log,interval(1e-5,1e-3))",
}
ELSEWHERE = {  # functions of other libraries, and Hydra's way to write them
    "log": "tag(log,{})",
    "loguniform": "tag(log,interval({}))",
    "log_uniform": "tag(log,interval({}))",
    "uniform": "interval({})",
    "randint": "range({})",
}
_UNKNOWN_KEY = re.compile(r"Could not override '([^']+)'")
_CALL = re.compile(r"([^=]+)=([A-Za-z_]\w*)\((.*)")
_IN_BRACES = re.compile(r"\{([^{}:]+,[^{}:]+)\}")
_LIMIT = re.compile(r"([\w./]+)\s*:?\s*(<=?|>=?)\s*([-+.\w]+)")
_SPACE_WITHIN = re.compile(rf"=choice\(.*\b(?:{'|'.join(SPACES)})\(")
_LEXER = "LexerNoViableAltException: "  # before the override in Hydra's error, with a ^ in the next line
_NOT_QUOTED = set("'\"$`\\!")  # what quotes of Hydra's grammar and a shell's would not keep as it is
_MISSING_PLUS = re.compile(r"To append to your default list use (\+\S+)")


def explain(error: HydraException, arguments: Sequence[str]) -> ConfigError:
    """The error as a ConfigError, with the keys that exist at this place of the command line."""
    text = str(error).strip()
    if isinstance(error, OverrideParseException):
        if unknown := _unknown_function(str(error.override)):
            return unknown
        if "=" not in str(error.override):
            rule = "This setting has no value."
            key, _, value = str(error.override).partition(":")
            return ConfigError(str(error.override), rule, f"Write {key}={value or 'VALUE'}.")
        return _unread(str(error.override), text)
    if isinstance(error, MissingConfigException) and error.options is not None:
        return _unknown_choice(error)
    if match := _UNKNOWN_KEY.search(text):
        key, there = match[1], _keys_beside(match[1], arguments)
        if key in there:
            given = _given(key, arguments)
            return ConfigError(given, f"{key} does not have all of these keys yet.", f"Add them: ++{given}")
        if not there:  # a mapping with any keys, such as a pruner's options
            parent = key.rpartition(".")[0]
            given = _given(key, arguments)
            return ConfigError(given, f"{parent} has no keys yet.", f"Add it: +{given}")
        if key.startswith("data.") and "data.source" in map(key_of, arguments):
            given = _given(key, arguments)
            return ConfigError(
                given, "The configuration of this data source does not define this key.", f"Add it: +{given}"
            )
        known, dotted = _all_keys(key, arguments), key.replace("/", ".")
        if "/" in key and dotted in known:
            given = _given(key, arguments)
            remedy = f"Write {given.replace('/', '.', key.count('/'))}."
            return ConfigError(given, "A dot comes between a group and its key.", remedy)
        if elsewhere := _of_another_choice(key, arguments):
            return elsewhere
        unknown = unknown_key(key, there, known) if "." in key else _no_group(key, known)
        added = _MISSING_PLUS.search(text)
        extra = f" To add your own group, use a plus: {added[1]}" if added else ""
        return ConfigError(unknown.value, unknown.rule, f"{unknown.remedy}{extra}")
    if "requires --multirun" in text or "Ambiguous value for argument" in text:
        return ConfigError(
            text.splitlines()[0],
            "`plait train` trains one adapter, so each key must have one value.",
            "Use `plait sweep` for several.",
        )
    return _unlisted(error.__cause__, arguments) or _as_it_is(error)


def _given(key: str, arguments: Sequence[str]) -> str:
    """The word that sets a key."""
    return next((word for word in arguments if key_of(word) == key), f"{key}=...")


def likely_keys(name: str) -> list[str]:
    """The keys that an option such as --lr means, if its name is near: it itself if a choice of its config
    group has it, else keys of the default configuration."""
    if _choices_with(name)[1]:
        return [name.replace("/", ".")]
    return likely(name, _all_keys(name, ()), cutoff=NEAR)


def explain_fault(error: Exception, arguments: Sequence[str]) -> ConfigError:
    """An error that Hydra does not raise as its own, as where a config group gets a number for a name."""
    for given in arguments:
        key, _, value = given.partition("=")
        names = [file.stem for file in _group_files(key)]
        if names and value not in names and not is_sweep(given):
            rule = f"{key} takes the name of a group of settings."
            return ConfigError(given, rule, f"Available: {choices(names)}.")
    return ConfigError(str(error), "Hydra cannot compose a configuration from these arguments.")


def _unread(override: str, text: str) -> ConfigError:
    """An override that Hydra's grammar does not read; its error points to a character, or names a part."""
    _, *points, _ = text.splitlines() or ["", ""]
    at = points[-1].find("^") - len(_LEXER) if points else -1
    rule = f"{override[at]!r} must be in quotes." if 0 <= at < len(override) else text.splitlines()[0]
    key, _, value = override.partition("=")
    if _SPACE_WITHIN.search(override):
        rule = "A choice holds single values, not intervals or ranges."
    if remedy := " ".join(filter(None, (_way_to_call(override), _way_to_write(key, value)))):
        return ConfigError(f"{override!r} cannot be read", rule, remedy)
    here = "" if _CALL.match(override) or set(value) & _NOT_QUOTED else f" Here: \"{key}='{value}'\""
    example = here or " For example key=\"'a,b'\"."
    return ConfigError(
        f"{override!r} cannot be read",
        rule,
        f"Write KEY=VALUE; quote values with special characters.{example}",
    )


def _way_to_write(key: str, value: str) -> str:
    """How to write a value that Hydra's grammar does not read, if it is plain what was meant; else ""."""
    if sum(map(value.count, "([{")) > sum(map(value.count, ")]}")):
        return f"A bracket is not closed. A setting with a blank must be in quotes as a whole: '{key}=...'."
    if key == "search.constraints" and (limits := _LIMIT.findall(value)):
        listed = ", ".join(f"{name}: '{sign[0]}= {limit}'" for name, sign, limit in limits)
        return f'Write {key}="{{{listed}}}".'
    if key.partition(".")[0] in JOB_GROUPS and (several := _IN_BRACES.fullmatch(value)):
        return f"To try several values, leave out the braces: {key}={several[1].replace(' ', '')}"
    return ""


def _way_to_call(override: str) -> str:
    """An example, if the value is a call of a function of search spaces; else ""."""
    called = _CALL.match(override)
    if called is None or called[2] not in SPACES:
        return ""
    return f"Write KEY=VALUE with {called[2]}(...) as in `{SPACES[called[2]]}`."


def _of_another_choice(key: str, arguments: Sequence[str]) -> ConfigError | None:
    """The error if other choices of the key's config group have it; None if no choice has."""
    group, having = _choices_with(key)
    if not having:
        return None
    given = _given(key, arguments)
    owners = [f"{group}={each}" for each in having]
    remedy = f"Write {' or '.join(f'`{owner} {given}`' for owner in owners)}."
    if swept := next((word for word in arguments if key_of(word) == group and is_sweep(word)), ""):
        remedy = (
            f"{swept} sweeps the group, so each choice needs its own file: in a folder, {group}/NAME.yaml "
            f"with `defaults: [{having[0]}]` and the key. Then add --config-dir FOLDER to {group}=NAME,..."
        )
    return ConfigError(given, f"This key exists only with {' or '.join(owners)}.", remedy)


def _choices_with(key: str) -> tuple[str, list[str]]:
    """The config group of a key, and the group's choices that have the key."""
    path = key.partition("[")[0].replace(".", "/")
    group, _, name = path.rpartition("/")
    while group and not _group_files(group):  # a key within a mapping, such as a pruner's options
        group, _, name = group.rpartition("/")
    return group, [file.stem for file in _group_files(group) if _has(file, name)]


def _group_files(group: str) -> list[Path]:
    """The files of one of Plait's own config groups, by name; of any other folder, none."""
    folder = (conf_dir() / group).resolve()
    return sorted(folder.glob("*.yaml")) if conf_dir().resolve() in folder.parents else []


def _has(file: Path, name: str) -> bool:
    """Whether a file of a config group defines the key itself."""
    content = OmegaConf.load(file)
    return isinstance(content, DictConfig) and name in list(content)  # also if it is "???"


def _no_group(key: str, known: Sequence[str]) -> ConfigError:
    """The error for a key outside every group."""
    meant = meant_by(key, known)
    groups = choices([*JOB_GROUPS, *RUN_GROUPS])
    listed = f"Settings are GROUP.KEY=VALUE, in {groups}; `plait sweep --help` lists them."
    return ConfigError(f"unknown key {key}", "There is no such key.", f"{meant}{listed}")


def _unlisted(cause: BaseException | None, arguments: Sequence[str]) -> ConfigError | None:
    """The error if a mapping was given for a list, else None."""
    key = getattr(cause, "full_key", None)
    if not key or "Cannot merge DictConfig with ListConfig" not in str(cause):
        return None
    given = _given(key, arguments)
    value = given.partition("=")[2]
    return ConfigError(given, f"{key} is a list.", f"Put it into brackets: '{key}=[{value}]'.")


def _as_it_is(error: HydraException) -> ConfigError:
    """The error with Hydra's own text."""
    first, *rest = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        rest = [line.strip() for line in str(cause).splitlines()]
    rule = "\n".join(rest) or "Hydra cannot compose a configuration from these arguments."
    return ConfigError(first, rule)


def _unknown_function(override: str) -> ConfigError | None:
    """The error if NAME in ``KEY=NAME(...)`` is not a function; None if it is, or the override has another
    form."""
    known = sorted(OverridesParser.create().functions.functions)
    called = _CALL.match(override)
    if called is None or called[2] in known:
        return None
    meant = did_you_mean(called[2], known)
    if (way := ELSEWHERE.get(called[2])) and called[3].endswith(")"):
        given = called[3][:-1]
        if called[2] == "log" and "(" not in given:  # two numbers, not an interval
            way = ELSEWHERE["loguniform"]
        meant = f"Did you mean {called[1]}={way.format(given)}? "
    remedy = f"{meant}Available: {choices(known)}. Quote a value that is not a function call: KEY=\"'a(b)'\"."
    return ConfigError(override, f"There is no function {called[2]}.", remedy)


def _unknown_choice(error: MissingConfigException) -> ConfigError:
    head, mark, address = str(error.missing_cfg_file).partition(
        "://"
    )  # an address stays whole, to be redacted
    group, _, name = head.rpartition("/")
    name += mark + address
    options = list(error.options or ())
    meant = did_you_mean(name, options, before=f"{group}=", cutoff=0.5)
    remedy = f"{meant}Available: {choices(options)}."
    if group == "data" and name in SOURCES:
        remedy = f"A source from another package has no config group: use data.source={name} +data.KEY=VALUE."
    if group == "model":
        remedy = (
            f"{meant}For a model of the Hugging Face hub or in a folder: model=hf model.id=ID. "
            f"Available: {choices(options)}."
        )
    return ConfigError(f"{group}={name}", f"Unknown {KINDS.get(group, group)} {name!r}.", remedy)


def _keys_beside(key: str, arguments: Sequence[str]) -> list[str]:
    """The keys of the deepest node on the way to ``key`` that exists."""
    node: Any = _without(key, arguments)
    path: list[str] = []
    for part in key.split(".")[:-1]:
        if not isinstance(node, DictConfig) or part not in node or not OmegaConf.is_dict(node[part]):
            break
        path.append(part)
        node = node[part]
    prefix = "".join(f"{part}." for part in path)
    return [f"{prefix}{name}" for name in node if path or name != "hydra"]


def _all_keys(key: str, arguments: Sequence[str]) -> list[str]:
    """Every key of this command line's configuration, and every config group; Hydra's own only if ``key`` is
    one of them."""
    config = OmegaConf.to_container(_without(key, arguments), resolve=False)
    assert isinstance(config, dict)
    if not key.startswith("hydra"):
        del config["hydra"]
    folders = (path for path in sorted(conf_dir().rglob("*")) if path.is_dir())
    groups = [path.relative_to(conf_dir()).as_posix() for path in folders]
    return [*map(str, config), *groups, *_dotted(config)]


def _dotted(node: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    for name, value in node.items():
        if "." in str(name):  # a search space by key, which is not a path in the configuration
            continue
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{name}.")


def _without(key: str, arguments: Sequence[str]) -> DictConfig:
    """The configuration of this command line without its overrides of ``key``; if necessary, the default
    one."""
    kept = []
    for argument in arguments:
        try:
            override = OverridesParser.create().parse_override(argument)
        except HydraException:
            continue
        if not override.is_sweep_override() and override.get_key_element().lstrip("+~") != key:
            kept.append(argument)
    with own_hydra():
        try:
            return compose("config", kept, return_hydra_config=True)
        except HydraException:
            return compose("config", return_hydra_config=True)
