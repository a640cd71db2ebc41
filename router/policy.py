"""The policy: everything that someone has to own, in one place, as data that is checked when it is built."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from decimal import Decimal
from fractions import Fraction
from os import PathLike
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from router import _checks
from router.caps import Cap
from router.classes import OnModelError, TaskClass
from router.errors import PolicyError, TaskError
from router.prices import Price, UnknownPrice, price_of
from router.rules import Rule, always, classes_of, resolve, version_of
from router.task import Task, Tier
from router.windows import Period

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = ["Model", "Policy", "Retries"]

_T = TypeVar("_T")

OnEnd = Literal["release", "charge"]
HiddenReasoning = Literal["observed", "reserved"]
UnseenInput = Literal["hold", "refuse"]
PriceAs = Literal["policy", "served"]


@dataclass(frozen=True, slots=True, repr=False)
class Model:
    """Name a model, and the client that serves it.

    Args:
        name: as the provider calls it.
        client: an `openai.AsyncOpenAI`; its own retries are not used.
        price: an own price; None for the one in genai-prices, which a policy looks up when it is built.
        provider: whose price it is, as genai-prices names providers, where the name alone is not enough.
        encoding: the tiktoken encoding that counts its tokens, where the name does not say it.
        context_window: tokens that go in at most; None for the figure in genai-prices.
        output_limit: tokens that it can generate at most.

    Raises:
        PolicyError: one of them is not as said here.
    """

    name: str
    client: AsyncOpenAI | None = field(default=None, kw_only=True)
    price: Price | None = field(default=None, kw_only=True)
    provider: str | None = field(default=None, kw_only=True)
    encoding: str | None = field(default=None, kw_only=True)
    context_window: int | None = field(default=None, kw_only=True)
    output_limit: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _checks.text(self.name, what="the name of a model")
        if isinstance(self.client, str | Mapping):
            # Never quoted: what stands here by mistake may be a key.
            kind = type(self.client).__name__
            raise PolicyError(f"the client of model {self.name!r} must be an AsyncOpenAI, not a {kind}")
        if self.price is not None and not isinstance(self.price, Price):
            raise PolicyError(f"the price of model {self.name!r} must be made by Price.per_million(input=…, output=…)")
        for what in ("provider", "encoding"):
            if getattr(self, what) is not None:
                _checks.text(getattr(self, what), what=what)
        for what in ("context_window", "output_limit"):
            if getattr(self, what) is not None:
                _checks.whole(getattr(self, what), what=what, least=1)

    def __repr__(self) -> str:
        price = "price not looked up" if self.price is None else str(self.price)
        client = "no client" if self.client is None else type(self.client).__name__
        return f"<Model {self.name}: {price}, {client}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """Limit the attempts of one call, all of which share its reservation.

    Args:
        attempts: how many there are at most, the first included.
        per_attempt: seconds that one may take; None for no limit.
        total: seconds that all may take with the waits between them; None for no limit but the task's deadline.
        base, cap: seconds of the first wait, which doubles each time, and of the longest.

    Raises:
        PolicyError: one of them is not as said here.
    """

    attempts: int = 3
    per_attempt: float | None = 600.0
    total: float | None = None
    base: float = 0.5
    cap: float = 8.0

    def __post_init__(self) -> None:
        _checks.whole(self.attempts, what="attempts", least=1)
        for what in ("per_attempt", "total"):
            if getattr(self, what) is not None:
                _checks.seconds(getattr(self, what), what=what)
        _checks.seconds(self.base, what="base", zero=True)
        _checks.seconds(self.cap, what="cap", zero=True)
        if self.cap < self.base:
            raise PolicyError(f"cap, the longest wait, must not be below base, the first: {self.cap} < {self.base}")


@dataclass(frozen=True, slots=True, init=False, repr=False, eq=False)
class Policy:
    """Say which models there are, what may be spent on them, and what happens when something gives way.

    Args:
        strong, cheap: the models of the two tiers; they may be the same.
        embedding: the model that embeddings are metered at; None where there are none.
        caps: every limit that holds; without any, everything is admitted and still recorded.
        classes: the classes of tasks; without any there is one, "default".
        default_class: the class of a task that names none; needed where there are several.
        envelope: the largest prompt in tokens, with its headroom, that may go to the strong tier; None for any.
        headroom: the part by which a prompt is taken to be larger than its estimate, for the envelope.
        rule: which tier a task wants: a tier, or a rule.
        retries: the limits on the attempts of one call.
        tree: the label under which every cap nests, so that its values may live apart; None for one tree.
        lease: seconds that a hold outlives its owner.
        on_lease_end: whether such a hold is given back or counted as spent.
        on_unanswered: whether an attempt that was sent and never answered is given back or charged.
        on_model_error: what follows when the strong model fails for good: its error, or the cheap model.
        hidden_reasoning: what is settled where no usage came, as when a stream was left: the tokens that came by
            ("observed"), or all that was reserved, for reasoning that was hidden ("reserved").
        unseen_input: whether input that cannot be counted holds the context window or is refused.
        output_limit: tokens of output when neither request nor class names a limit.
        settle_timeout: seconds that the end of a call may wait for its settle; later it goes on without the caller.
        price_as: whether usage is priced as the policy's model or as the one that the reply names.
        max_open: open calls and settles in the backlog, together, above which nothing more is admitted.
        max_waiting: tasks that may wait for budget, all lines together; what comes above gets its class's answer at once.
        max_waiting_bytes: bytes that their requests may have together, about.

    Raises:
        PolicyError: something in it is not as said here, or does not fit together.
    """

    strong: Model
    cheap: Model
    embedding: Model | None
    caps: tuple[Cap, ...]
    classes: tuple[TaskClass, ...]
    default_class: str
    envelope: int | None
    headroom: Fraction
    rule: Rule
    retries: Retries
    tree: str | None
    lease: float
    on_lease_end: OnEnd
    on_unanswered: OnEnd
    on_model_error: OnModelError
    hidden_reasoning: HiddenReasoning
    unseen_input: UnseenInput
    output_limit: int
    settle_timeout: float
    price_as: PriceAs
    max_open: int
    max_waiting: int
    max_waiting_bytes: int
    rule_version: str
    """12 hex digits of what the rule is."""
    net_version: str
    """12 hex digits of everything else, clients apart."""

    def __init__(
        self,
        *,
        strong: Model,
        cheap: Model,
        embedding: Model | None = None,
        caps: Sequence[Cap] = (),
        classes: Sequence[TaskClass] = (),
        default_class: str | None = None,
        envelope: int | None = None,
        headroom: float | str | Decimal | Fraction = 0.2,
        rule: Rule | Tier = "strong",
        retries: Retries | None = None,
        tree: str | None = None,
        lease: float = 60,
        on_lease_end: OnEnd = "release",
        on_unanswered: OnEnd = "release",
        on_model_error: OnModelError = "error",
        hidden_reasoning: HiddenReasoning = "observed",
        unseen_input: UnseenInput = "hold",
        output_limit: int = 4096,
        settle_timeout: float = 5.0,
        price_as: PriceAs = "policy",
        max_open: int = 10_000,
        max_waiting: int = 10_000,
        max_waiting_bytes: int = 256 * 1024 * 1024,
    ) -> None:
        put = object.__setattr__
        put(self, "strong", _priced(strong, what="strong"))
        put(self, "cheap", _priced(cheap, what="cheap"))
        put(self, "embedding", None if embedding is None else _priced(embedding, what="embedding"))
        put(self, "caps", _all_of(Cap, caps, what="caps"))
        put(self, "classes", _all_of(TaskClass, classes, what="classes") or (TaskClass("default"),))
        put(self, "default_class", self._default_class(default_class))
        put(self, "envelope", None if envelope is None else _checks.whole(envelope, what="envelope"))
        put(self, "headroom", _checks.fraction(headroom, what="headroom"))
        put(self, "rule", self._rule(rule))
        if retries is not None and not isinstance(retries, Retries):
            raise PolicyError(f"retries must be Retries(attempts=…), not {_checks.shown(retries)}")
        put(self, "retries", Retries() if retries is None else retries)
        if tree is not None:
            _checks.text(tree, what="tree")
        put(self, "tree", tree)
        put(self, "lease", _checks.seconds(lease, what="lease"))
        for what, value, known in (
            ("on_lease_end", on_lease_end, OnEnd),
            ("on_unanswered", on_unanswered, OnEnd),
            ("on_model_error", on_model_error, OnModelError),
            ("hidden_reasoning", hidden_reasoning, HiddenReasoning),
            ("unseen_input", unseen_input, UnseenInput),
            ("price_as", price_as, PriceAs),
        ):
            _checks.word(value, get_args(known), what=what)
            put(self, what, value)
        put(self, "output_limit", _checks.whole(output_limit, what="output_limit", least=1))
        put(self, "settle_timeout", _checks.seconds(settle_timeout, what="settle_timeout"))
        put(self, "max_open", _checks.whole(max_open, what="max_open", least=1))
        put(self, "max_waiting", _checks.whole(max_waiting, what="max_waiting"))
        put(self, "max_waiting_bytes", _checks.whole(max_waiting_bytes, what="max_waiting_bytes"))
        self._check_caps()
        self._check_classes()
        put(self, "rule_version", version_of(self.rule))
        put(self, "net_version", _hashed(self))

    @classmethod
    def from_toml(
        cls,
        source: str | PathLike[str],
        *,
        clients: Mapping[str, AsyncOpenAI] | None = MappingProxyType({}),
        rules: Mapping[str, Callable[[Task], Any]] = MappingProxyType({}),
    ) -> Policy:
        """Build a policy from a TOML file, or from a string of TOML, with the same names as in Python.

        Args:
            source: the path of a file; a string with a line break or an equals sign in it is TOML itself.
            clients: what the words after `client =` stand for; None leaves every model without a client, for whoever
                only reads the policy.
            rules: what the names of rules and of scores stand for.

        Raises:
            PolicyError: as in Python, with the place in the file.
        """
        # The reader builds on this module.
        from router import _toml  # noqa: PLC0415

        return _toml.load(source, clients=clients, rules=rules)

    @property
    def version(self) -> str:
        """Return the versions of the rule and of the safety net, as one text."""
        return f"{self.rule_version}-{self.net_version}"

    def model(self, tier: Tier | Literal["embedding"]) -> Model:
        """Return the model of a tier, with its price.

        Raises:
            TaskError: there is no embedding model.
        """
        if tier == "embedding":
            if self.embedding is None:
                raise TaskError("the policy has no model for embeddings: give it one with embedding=Model(…)")
            return self.embedding
        return self.strong if tier == "strong" else self.cheap

    def price(self, tier: Tier | Literal["embedding"]) -> Price:
        """Return the price of a tier's model.

        Raises:
            TaskError: there is no embedding model.
        """
        price = self.model(tier).price
        assert price is not None  # noqa: S101 - looked up when the policy was built
        return price

    def task_class(self, name: str | None) -> TaskClass:
        """Return a class by its name; None names the default class.

        Raises:
            TaskError: there is no such class.
        """
        wanted = self.default_class if name is None else name
        for task_class in self.classes:
            if task_class.name == wanted:
                return task_class
        known = [task_class.name for task_class in self.classes]
        near = _checks.hint(wanted, known)
        raise TaskError(f"task_class must be {_checks.listed(known)}, not {_checks.shown(wanted)}{near}")

    async def want(self, task: Task) -> Tier:
        """Return the tier that the rule says a task wants; a task without a class is asked about in the default class.

        Raises:
            TaskError: there is no such class.
            RuleError: the rule gave no tier.
        """
        return await resolve(self.rule, task.in_class(self.task_class(task.task_class).name))

    def fits(self, prompt_tokens: int) -> bool:
        """Say whether a prompt of so many estimated tokens lies, with the headroom, within the envelope."""
        if self.envelope is None:
            return True
        part, whole = self.headroom.as_integer_ratio()
        return prompt_tokens * (whole + part) <= self.envelope * whole

    def _default_class(self, name: str | None) -> str:
        names = [task_class.name for task_class in self.classes]
        for known in names:
            if names.count(known) > 1:
                raise PolicyError(f"two classes are called {known!r}: give one of them another name")
        if name is None:
            if len(names) > 1:
                raise PolicyError(f"default_class must be said where classes are several: {_checks.listed(names)}")
            return names[0]
        _checks.word(name, names, what="default_class")
        return name

    def _rule(self, rule: object) -> Rule:
        if isinstance(rule, str):
            _checks.word(rule, get_args(Tier), what="rule")
            return always(rule)  # type: ignore[arg-type]
        if not callable(rule):
            raise PolicyError(f"rule must be 'strong', 'cheap' or a function of the task, not {_checks.shown(rule)}")
        known = [task_class.name for task_class in self.classes]
        for name in classes_of(rule):
            _checks.word(name, known, what="a class in by_class")
        return rule

    def _check_caps(self) -> None:
        seen: set[str] = set()
        for cap in self.caps:
            if cap.name in seen:
                raise PolicyError(f"two caps count the same thing, {cap.name!r}: give one of them another name=…")
            seen.add(cap.name)
            if self.tree is not None and self.tree not in cap.scope:
                scope = ", ".join(repr(label) for label in (self.tree, *cap.scope))
                trailing = "" if cap.scope else ","
                raise PolicyError(
                    f"cap {cap.name!r} does not nest under tree={self.tree!r}: "
                    f"write scope=({scope}{trailing}) or leave tree out"
                )

    def _check_classes(self) -> None:
        for task_class in self.classes:
            limit = task_class.output_limit or self.output_limit
            if task_class.least_output is not None and task_class.least_output > limit:
                raise PolicyError(
                    f"least_output of class {task_class.name!r} must not be above its output_limit: "
                    f"{task_class.least_output} > {limit}"
                )

    def __repr__(self) -> str:
        counts = f"{len(self.caps)} caps, {len(self.classes)} classes"
        return f"<Policy {self.version}: strong {self.strong.name}, cheap {self.cheap.name}, {counts}, {self.rule!r}>"


def _priced(model: object, *, what: str) -> Model:
    if not isinstance(model, Model):
        raise PolicyError(f"{what} must be a Model, not {_checks.shown(model)}: write Model('name', client=…)")
    try:
        price, context_window = price_of(model.name, provider=model.provider)
    except UnknownPrice as error:
        if model.price is None:
            raise PolicyError(f"{what}: {error}") from None
        return model
    return replace(
        model,
        price=price if model.price is None else model.price,
        context_window=context_window if model.context_window is None else model.context_window,
    )


def _all_of(kind: type[_T], values: object, *, what: str) -> tuple[_T, ...]:
    if not isinstance(values, list | tuple):
        raise PolicyError(f"{what} must be a list of {kind.__name__}, not {_checks.shown(values)}")
    for value in values:
        if not isinstance(value, kind):
            raise PolicyError(f"{what} must hold nothing but {kind.__name__}(…), not {_checks.shown(value)}")
    return tuple(values)


def _hashed(policy: Policy) -> str:
    text = json.dumps(_plain(policy), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _plain(value: object) -> object:
    """Return a value as JSON can write it, alike in every process and for every way of writing the same policy."""
    match value:
        case Period():
            return str(value)
        case Price():
            return value.version
        case Fraction():
            return str(value)
        case float() if value.is_integer():
            return int(value)
        case frozenset():
            return sorted(value)
        case tuple():
            return [_plain(one) for one in value]
        case Mapping():
            # In order, and not sorted: the order of limits says which of them holds.
            return [[key, _plain(one)] for key, one in value.items()]
        case _ if is_dataclass(value):
            names = [one.name for one in fields(value) if not one.name.startswith("_") and one.name not in _APART]
            return {name: _plain(getattr(value, name)) for name in names}
        case _:
            return value


_APART = {"client", "rule", "rule_version", "net_version"}
