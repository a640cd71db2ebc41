from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from router.caps import Cap
from router.classes import TaskClass
from router.errors import PolicyError
from router.policy import Model, Policy, Retries
from router.prices import Price
from router.rules import always, by_class, by_score
from router.task import Task

MODELS = """
[strong]
name = "strong-model"
price = {input = "2", output = 10, cached_input = 0.2}

[cheap]
name = "cheap-model"
price = {input = 0.2, output = 1}
"""

WHOLE = """
default_class = "chat"
envelope = 8000
headroom = 0.25
rule = {by_class = {batch = "cheap"}, default = "strong"}
tree = "org"
lease = 90
on_lease_end = "charge"
on_unanswered = "charge"
on_model_error = "cheap"
hidden_reasoning = "reserved"
unseen_input = "refuse"
output_limit = 2000
settle_timeout = 2.5
price_as = "served"
max_open = 50

[strong]
name = "strong-model"
client = "openai"
price = {input = "2", output = 10, cached_input = 0.2}
provider = "openai"
encoding = "o200k_base"
context_window = 400_000
output_limit = 128_000

[cheap]
name = "cheap-model"
client = "other"
price = {input = 0.2, output = 1}

[embedding]
name = "embedder"
price = {input = "0.02", output = 0}

[retries]
attempts = 2
per_attempt = "none"
total = 30.5
base = 0
cap = 1

[[caps]]
usd = "50"
per = "hour"
tiers = ["strong"]
scope = "org"
admit_at = 0.9
alert_at = [0.5, 0.8]

[[caps]]
tokens = 50_000
per = "day"
scope = ["org", "user"]
timezone = "Asia/Tokyo"
limits = {"user:alice" = 200_000, "group:a:b" = 0}

[[caps]]
usd = 0.1
per = "none"
scope = ["org", "run"]
soft = true
name = "runs"

[[caps]]
requests = 10
per = 5400
scope = "org"

[[caps]]
requests = 100
per = "week"
week_starts = "sunday"
scope = "org"

[[classes]]
name = "chat"
max_wait = 2
when_expired = "downgrade"
when_store_down = "cheap"
allowance_usd = "0.5"

[[classes]]
name = "batch"
priority = 9
max_wait = "window"
when_expired = "defer"
output_limit = 1000
least_output = 100
admit_at = 0.6
on_model_error = "error"
on_overrun = "cut"
review_downgrades = true
"""


def client() -> AsyncOpenAI:
    return AsyncOpenAI(api_key="sk-very-secret", base_url="http://127.0.0.1:9/v1")


def refusal_of(text: str | Path, **options: Any) -> str:
    with pytest.raises(PolicyError) as refusal:
        Policy.from_toml(text, **options)
    return str(refusal.value)


def worth(task: Task) -> float:
    return task.value or 0


def test_a_policy_in_toml_equals_the_same_one_in_python() -> None:
    one, other = client(), client()
    read = Policy.from_toml(WHOLE, clients={"openai": one, "other": other})
    built = Policy(
        strong=Model(
            "strong-model",
            client=one,
            price=Price.per_million(input=2, output=10, cached_input="0.2"),
            provider="openai",
            encoding="o200k_base",
            context_window=400_000,
            output_limit=128_000,
        ),
        cheap=Model("cheap-model", client=other, price=Price.per_million(input="0.2", output=1)),
        embedding=Model("embedder", price=Price.per_million(input="0.02", output=0)),
        caps=[
            Cap(usd=50, per="hour", tiers={"strong"}, scope="org", admit_at=0.9, alert_at=(0.5, 0.8)),
            Cap(
                tokens=50_000,
                per="day",
                scope=("org", "user"),
                timezone="Asia/Tokyo",
                limits={"user:alice": 200_000, "group:a:b": 0},
            ),
            Cap(usd="0.1", per=None, scope=("org", "run"), soft=True, name="runs"),
            Cap(requests=10, per=5400, scope="org"),
            Cap(requests=100, per="week", week_starts="sunday", scope="org"),
        ],
        classes=[
            TaskClass("chat", max_wait=2, when_expired="downgrade", when_store_down="cheap", allowance_usd="0.5"),
            TaskClass(
                "batch",
                priority=9,
                max_wait="window",
                when_expired="defer",
                output_limit=1000,
                least_output=100,
                admit_at=0.6,
                on_model_error="error",
                on_overrun="cut",
                review_downgrades=True,
            ),
        ],
        default_class="chat",
        envelope=8000,
        headroom=0.25,
        rule=by_class({"batch": "cheap"}),
        retries=Retries(attempts=2, per_attempt=None, total=30.5, base=0, cap=1),
        tree="org",
        lease=90,
        on_lease_end="charge",
        on_unanswered="charge",
        on_model_error="cheap",
        hidden_reasoning="reserved",
        unseen_input="refuse",
        output_limit=2000,
        settle_timeout=2.5,
        price_as="served",
        max_open=50,
    )
    for name in Policy.__slots__:
        assert getattr(read, name) == getattr(built, name), name


def test_a_policy_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(MODELS + '[[caps]]\nusd = 5\nper = "day"\nname = "für alle"\n', encoding="utf-8")
    for source in (path, str(path)):
        assert [cap.name for cap in Policy.from_toml(source).caps] == ["für alle"]


def test_a_file_with_an_equals_sign_in_its_name_is_read_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "policy=1.toml"
    path.write_text(MODELS)
    assert Policy.from_toml(path).strong.name == "strong-model"


def test_a_float_in_toml_is_taken_as_it_is_written() -> None:
    built = Policy.from_toml(MODELS + "[[caps]]\nusd = 0.1\nper = 60\nadmit_at = 0.1\n")
    assert (built.caps[0].limit, built.caps[0].line_at) == (100_000_000, Fraction(1, 10))


def test_without_clients_to_resolve_a_policy_can_still_be_read() -> None:
    built = Policy.from_toml(WHOLE, clients=None)
    assert [built.strong.client, built.cheap.client] == [None, None]
    assert built.version == Policy.from_toml(WHOLE, clients={"openai": client(), "other": client()}).version


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("", always("strong")),
        ('rule = "cheap"', always("cheap")),
        ('rule = {by_class = {default = "cheap"}}', by_class({"default": "cheap"})),
        ('rule = {by_class = {}, default = "cheap"}', by_class({}, default="cheap")),
        ('rule = {by_score = "worth", threshold = 0.5}', by_score(worth, 0.5)),
        ('rule = "worth"', worth),
    ],
)
def test_a_rule_is_given_by_tier_by_table_or_by_name(line: str, rule: Any) -> None:
    assert Policy.from_toml(line + MODELS, rules={"worth": worth}).rule == rule


TEXT = "the TOML text"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("cap = 1" + MODELS, f"{TEXT}: there is no key 'cap'; did you mean 'caps'?"),
        ("[[caps]]\nusd = 1\nper = 60\ntier = []" + MODELS, f"{TEXT}, caps[0]: there is no key 'tier'; did you mean 'tiers'?"),
        (
            '[[classes]]\nname = "a"\n[[classes]]\nname = "b"\nmaxwait = 1' + MODELS,
            f"{TEXT}, classes[1]: there is no key 'maxwait'; did you mean 'max_wait'?",
        ),
        (
            "[retries]\nzzz = 1" + MODELS,
            f"{TEXT}, retries: there is no key 'zzz': the keys here are attempts, per_attempt, total, base, cap",
        ),
        (MODELS + 'nmae = "x"', f"{TEXT}, cheap: there is no key 'nmae'; did you mean 'name'?"),
        (
            MODELS.replace("output = 1}", "outptu = 1}"),
            f"{TEXT}, cheap.price: there is no key 'outptu'; did you mean 'output'?",
        ),
        (MODELS.replace(", output = 1}", "}"), f"{TEXT}, cheap.price: the key 'output' is missing"),
        (
            'rule = {by_class = {}, defualt = "cheap"}' + MODELS,
            f"{TEXT}, rule: there is no key 'defualt'; did you mean 'default'?",
        ),
        ('rule = {by_score = "worth"}' + MODELS, f"{TEXT}, rule: the key 'threshold' is missing"),
        ("[[caps]]\nusd = 1" + MODELS, f"{TEXT}, caps[0]: the key 'per' is missing"),
        ("[[classes]]\npriority = 1" + MODELS, f"{TEXT}, classes[0]: the key 'name' is missing"),
        ('[strong]\nname = "x"', f"{TEXT}: the key 'cheap' is missing"),
        ("[caps]\nusd = 1" + MODELS, f"{TEXT}: caps must be a list of tables: begin each with [[caps]]"),
        ("caps = [1]" + MODELS, f"{TEXT}, caps[0] must be a table, not 1"),
        ('cheap = "x"\n[strong]\nname = "x"', f"{TEXT}, cheap must be a table, not 'x'"),
        ("retries = 3" + MODELS, f"{TEXT}, retries must be a table, not 3"),
        (MODELS.replace("{input = 0.2, output = 1}", "1"), f"{TEXT}, cheap.price must be a table, not 1"),
    ],
)
def test_a_key_that_is_wrong_is_named_with_its_table_and_the_nearest_right_one(text: str, sentence: str) -> None:
    assert refusal_of(text, rules={"worth": worth}) == sentence


@pytest.mark.parametrize(
    ("text", "make", "place"),
    [
        ("[[caps]]\nusd = -1\nper = 60", lambda: Cap(usd=-1, per=60), "caps[0]"),
        ("[[caps]]\nusd = true\nper = 60", lambda: Cap(usd=True, per=60), "caps[0]"),
        ('[[caps]]\nusd = "50 dollars"\nper = 60', lambda: Cap(usd="50 dollars", per=60), "caps[0]"),
        ('[[caps]]\nusd = "NaN"\nper = 60', lambda: Cap(usd="NaN", per=60), "caps[0]"),
        ("[[caps]]\nusd = 1\ntokens = 1\nper = 60", lambda: Cap(usd=1, tokens=1, per=60), "caps[0]"),
        ("[[caps]]\nper = 60", lambda: Cap(per=60), "caps[0]"),
        ("[[caps]]\ntokens = 0.5\nper = 60", lambda: Cap(tokens=0.5, per=60), "caps[0]"),  # type: ignore[arg-type]
        ('[[caps]]\nusd = 1\nper = "hourly"', lambda: Cap(usd=1, per="hourly"), "caps[0]"),  # type: ignore[arg-type]
        ('[[caps]]\nusd = 1\nper = "day"\ntimezone = "Mars"', lambda: Cap(usd=1, per="day", timezone="Mars"), "caps[0]"),
        ('[[classes]]\nname = "a"\nmax_wait = 5', lambda: TaskClass("a", max_wait=5), "classes[0]"),
        ("[retries]\nattempts = 0", lambda: Retries(attempts=0), "retries"),
    ],
)
def test_a_mistake_says_in_toml_what_it_says_in_python_and_where(text: str, make: Any, place: str) -> None:
    with pytest.raises(PolicyError) as python:
        make()
    assert refusal_of(text + MODELS) == f"{TEXT}, {place}: {python.value}"


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("envelope = -1", {"envelope": -1}),
        ('tree = "org"\n[[caps]]\nusd = 1\nper = "day"', {"tree": "org", "caps": [Cap(usd=1, per="day")]}),
        ('on_lease_end = "keep"', {"on_lease_end": "keep"}),
        ('[[classes]]\nname = "a"\n[[classes]]\nname = "b"', {"classes": [TaskClass("a"), TaskClass("b")]}),
        ("lease = 1979-05-27", {"lease": "a date"}),
    ],
)
def test_a_mistake_of_the_whole_says_the_same_in_both(text: str, options: dict[str, Any]) -> None:
    price = Price.per_million(input=1, output=1)
    with pytest.raises(PolicyError) as python:
        Policy(**{"strong": Model("s", price=price), "cheap": Model("c", price=price), **options})
    said = refusal_of(text + MODELS)
    assert said.partition(", not ")[0] == f"{TEXT}: {python.value}".partition(", not ")[0]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("headroom = nan" + MODELS, f"{TEXT}: headroom must be a finite number, not nan"),
        ("[[caps]]\nusd = inf\nper = 60" + MODELS, f"{TEXT}, caps[0]: usd must be a finite number, not inf"),
        (
            '[[caps]]\nusd = 1\nper = 60\nlimits = {"user:a" = -inf}' + MODELS,
            f"{TEXT}, caps[0], limits: user:a must be a finite number, not -inf",
        ),
        (
            "[[caps]]\nusd = 1\nper = 60\nalert_at = [0.5, nan]" + MODELS,
            f"{TEXT}, caps[0], alert_at[1]: alert_at must be a finite number, not nan",
        ),
        (
            MODELS.replace("output = 1}", "output = nan}"),
            f"{TEXT}, cheap, price: output must be a finite number, not nan",
        ),
    ],
)
def test_numbers_that_are_not_finite_are_refused(text: str, sentence: str) -> None:
    assert refusal_of(text) == sentence


def test_a_price_that_is_none_is_refused_with_its_place() -> None:
    assert refusal_of(MODELS.replace("output = 1}", "output = -1}")).startswith(f"{TEXT}, cheap.price: price output is -1")
    assert refusal_of('[strong]\nname = "no-such-model"\n[cheap]\nname = "gpt-5-mini"').startswith(f"{TEXT}: strong: model")


def test_a_client_that_was_not_passed_in_is_refused_with_those_which_were() -> None:
    text = MODELS + 'client = "opnai"'
    end = f"{TEXT}, cheap: client must name one of those passed in as clients={{…}}"
    clients = {"openai": client(), "azure": client()}
    assert refusal_of(text, clients=clients) == f"{end}, which are 'openai' or 'azure'; did you mean 'openai'?"
    assert refusal_of(text) == f"{end}, and none was"


def test_a_key_that_stands_where_a_client_should_is_not_repeated() -> None:
    assert "secret" not in refusal_of(MODELS + 'client = "sk-very-secret"', clients={"openai": client()})
    assert "secret" not in refusal_of(MODELS + 'api_key = "sk-very-secret"', clients={"openai": client()})


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('rule = "wroth"', f"{TEXT}, rule must be 'strong', 'cheap' or 'worth', not 'wroth'; did you mean 'worth'?"),
        (
            'rule = "best"',
            f"{TEXT}, rule must be 'strong', 'cheap' or 'worth', not 'best'; a function of your own is passed in as rules=",
        ),
        (
            'rule = {by_score = "wroth", threshold = 1}',
            f"{TEXT}, rule, by_score must be 'worth', not 'wroth'; did you mean 'worth'?",
        ),
        ('rule = {by_class = {chat = "cheap"}}', f"{TEXT}: a class in by_class must be 'default', not 'chat'"),
        ('rule = {by_class = {default = "chep"}}', f"{TEXT}, rule: the tier of class 'default' in by_class must be"),
        ('rule = {by_score = "worth", threshold = "1"}', f"{TEXT}, rule: the threshold of by_score must be a finite number"),
        ("rule = 7", f"{TEXT}, rule must be a tier, the name of a rule, {{by_class = {{…}}, default = …}} or"),
        ("rule = {}", f"{TEXT}, rule must be a tier, the name of a rule, {{by_class = {{…}}, default = …}} or"),
    ],
)
def test_a_mistake_in_a_rule_is_one_sentence(line: str, sentence: str) -> None:
    assert refusal_of(line + MODELS, rules={"worth": worth}).startswith(sentence)


def test_a_score_is_refused_when_no_rules_were_passed_in() -> None:
    assert refusal_of('rule = {by_score = "worth", threshold = 1}' + MODELS) == (
        f"{TEXT}, rule, by_score: 'worth' must be passed in as rules={{…}}, and nothing was"
    )


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    end = "; give the path of a file, or TOML itself"
    assert refusal_of(path) == f"{path} cannot be read: No such file or directory{end}"
    assert refusal_of(tmp_path) == f"{tmp_path} cannot be read: Is a directory{end}"
    assert refusal_of("a\0b") == f"a\0b cannot be read: embedded null byte{end}"


def test_what_is_not_toml_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text("[strong\nname = 1")
    assert refusal_of(path).startswith(f"{path} is not TOML: ")
    assert "line 1" in refusal_of(path)
    path.write_bytes(b"\xff\xfe")
    assert refusal_of(path) == f"{path} is not TOML: it is not UTF-8 text"
    assert refusal_of("[strong]\n[strong]").startswith(f"{TEXT} is not TOML: ")
    assert refusal_of("lease = " + 5000 * "9").startswith(f"{TEXT} is not TOML: ")


def test_an_empty_file_says_what_it_lacks_first(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text("")
    assert refusal_of(path) == f"{path}: the key 'strong' is missing"
