"""Reads a policy from TOML. The keys are the parameters of the classes themselves, so that the two cannot differ."""

from __future__ import annotations

import inspect
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from router import _checks
from router.caps import Cap
from router.classes import TaskClass
from router.errors import PolicyError
from router.policy import Model, Policy, Retries
from router.prices import Price
from router.rules import Rule, by_class, by_score
from router.task import Task, Tier

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_T = TypeVar("_T")
_TIERS = get_args(Tier)

# TOML has no None: at these keys, where leaving out means something else, the word "none" stands for it.
_NONE = {"per", "per_attempt"}


def load(
    source: str | PathLike[str],
    *,
    clients: Mapping[str, AsyncOpenAI] | None,
    rules: Mapping[str, Callable[[Task], Any]],
) -> Policy:
    """Build a policy from a file or a string; see `Policy.from_toml`."""
    place, table = _read(source)
    _check_numbers(table, place)
    given = dict(_check_keys(table, Policy, place))
    for tier in ("strong", "cheap", "embedding"):
        if tier in table:
            given[tier] = _model(table[tier], clients, f"{place}, {tier}")
    for key, kind in (("caps", Cap), ("classes", TaskClass)):
        if key in table:
            given[key] = _list(table[key], kind, key, place)
    if "retries" in table:
        given["retries"] = _built(Retries, table["retries"], f"{place}, retries")
    if "rule" in table:
        given["rule"] = _rule(table["rule"], rules, f"{place}, rule")
    return _made(Policy, given, place)


def _read(source: str | PathLike[str]) -> tuple[str, dict[str, Any]]:
    if isinstance(source, str) and ("\n" in source or "=" in source):
        place = "the TOML text"
        text = source
    else:
        place = fspath(source)
        try:
            text = Path(source).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise PolicyError(f"{place} is not TOML: it is not UTF-8 text") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise PolicyError(f"{place} cannot be read: {reason}; give the path of a file, or TOML itself") from None
    try:
        return place, tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for a number of too many digits
        raise PolicyError(f"{place} is not TOML: {error}") from None


def _check_numbers(value: object, place: str, key: str = "") -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise PolicyError(f"{place}: {key} must be a finite number, not {value}")
    if isinstance(value, dict):
        for name, one in value.items():
            inside = isinstance(one, dict | list)
            _check_numbers(one, f"{place}, {name}" if inside else place, name)
    if isinstance(value, list):
        for number, one in enumerate(value):
            _check_numbers(one, f"{place}[{number}]", key)


def _check_keys(table: object, target: Callable[..., object] | Mapping[str, bool], place: str) -> dict[str, Any]:
    """Return a table that has no key but those of a callable (or of a mapping from key to whether it is needed)."""
    if not isinstance(table, dict):
        raise PolicyError(f"{place} must be a table, not {_checks.shown(table)}")
    needed = target if isinstance(target, Mapping) else _keys_of(target)
    for key in table:
        if key not in needed:
            near = _checks.hint(key, needed) or f": the keys here are {', '.join(needed)}"
            raise PolicyError(f"{place}: there is no key {key!r}{near}")
    for key, is_needed in needed.items():
        if is_needed and key not in table:
            raise PolicyError(f"{place}: the key {key!r} is missing")
    return table


def _keys_of(target: Callable[..., object]) -> dict[str, bool]:
    parameters = inspect.signature(target).parameters
    return {name: parameter.default is parameter.empty for name, parameter in parameters.items()}


def _built(target: Callable[..., _T], table: object, place: str) -> _T:
    keys = _check_keys(table, target, place)
    given = {key: None if key in _NONE and value == "none" else value for key, value in keys.items()}
    return _made(target, given, place)


def _made(target: Callable[..., _T], given: dict[str, Any], place: str) -> _T:
    try:
        return target(**given)
    except (TypeError, ValueError) as error:
        raise PolicyError(f"{place}: {error}") from None


def _list(tables: object, kind: Callable[..., _T], key: str, place: str) -> list[_T]:
    if not isinstance(tables, list):
        raise PolicyError(f"{place}: {key} must be a list of tables: begin each with [[{key}]]")
    return [_built(kind, table, f"{place}, {key}[{number}]") for number, table in enumerate(tables)]


def _model(table: object, clients: Mapping[str, AsyncOpenAI] | None, place: str) -> Model:
    given = dict(_check_keys(table, Model, place))
    if "client" in given:
        given["client"] = None if clients is None else _client(given["client"], clients, place)
    if "price" in given:
        given["price"] = _built(Price.per_million, given["price"], f"{place}.price")
    return _made(Model, given, place)


def _client(name: object, clients: Mapping[str, AsyncOpenAI], place: str) -> AsyncOpenAI:
    if isinstance(name, str) and name in clients:
        return clients[name]
    # The name is not quoted: what stands there by mistake may be a key.
    known = f"which are {_checks.listed(clients)}{_checks.hint(name, clients)}" if clients else "and none was"
    raise PolicyError(f"{place}: client must name one of those passed in as clients={{…}}, {known}")


def _rule(rule: object, named: Mapping[str, Callable[[Task], Any]], place: str) -> Rule | str:
    if isinstance(rule, str):
        if rule in _TIERS:
            return rule
        return _named(rule, named, [*_TIERS, *named], place)
    if isinstance(rule, dict) and "by_class" in rule:
        given = _check_keys(rule, {"by_class": True, "default": False}, place)
        return _made(by_class, {"tiers": given["by_class"], "default": given.get("default", "strong")}, place)
    if isinstance(rule, dict) and "by_score" in rule:
        given = _check_keys(rule, {"by_score": True, "threshold": True}, place)
        score = _named(given["by_score"], named, named, f"{place}, by_score")
        return _made(by_score, {"score": score, "threshold": given["threshold"]}, place)
    raise PolicyError(
        f"{place} must be a tier, the name of a rule, {{by_class = {{…}}, default = …}} or "
        f"{{by_score = …, threshold = …}}, not {_checks.shown(rule)}"
    )


def _named(name: object, named: Mapping[str, Callable[[Task], Any]], known: Iterable[str], place: str) -> Callable[[Task], Any]:
    if isinstance(name, str) and name in named:
        return named[name]
    words = tuple(known)
    if not words:
        raise PolicyError(f"{place}: {_checks.shown(name)} must be passed in as rules={{…}}, and nothing was")
    near = _checks.hint(name, words) or "; a function of your own is passed in as rules={…}"
    raise PolicyError(f"{place} must be {_checks.listed(words)}, not {_checks.shown(name)}{near}")
