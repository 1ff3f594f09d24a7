"""Label selectors, and who owns a pod that several policies select."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluicegate_core.policy import LabelOperator, LabelRequirement, Selector
from sluicegate_operator.selection import (
    Contender,
    contenders_for,
    label_selector,
    opted_out,
    owner_of,
    query,
    selects,
)

APP = {"app": "llama", "tier": "serving"}
IN, NOT_IN = LabelOperator.IN, LabelOperator.NOT_IN
EXISTS, ABSENT = LabelOperator.EXISTS, LabelOperator.DOES_NOT_EXIST


def expression(key: str, operator: LabelOperator, *values: str) -> Selector:
    return Selector(match_expressions=(LabelRequirement(key, operator, values),))


@pytest.mark.parametrize(
    ("selector", "labels", "selected"),
    [
        (None, APP, False),
        (Selector(), APP, True),
        (Selector(), {}, True),
        (Selector(match_labels=(("app", "llama"),)), APP, True),
        (Selector(match_labels=(("app", "llama"), ("tier", "serving"))), APP, True),
        (Selector(match_labels=(("app", "llama"), ("tier", "batch"))), APP, False),
        (Selector(match_labels=(("app", ""),)), {}, False),
        (Selector(match_labels=(("app", ""),)), {"app": ""}, True),
        (expression("app", IN, "mistral", "llama"), APP, True),
        (expression("app", IN, "mistral"), APP, False),
        (expression("zone", IN, "a"), APP, False),
        (expression("app", NOT_IN, "llama"), APP, False),
        (expression("app", NOT_IN, "mistral"), APP, True),
        (expression("zone", NOT_IN, "a"), APP, True),
        (expression("app", EXISTS), APP, True),
        (expression("zone", EXISTS), APP, False),
        (expression("app", ABSENT), APP, False),
        (expression("zone", ABSENT), APP, True),
        (
            Selector(
                match_labels=(("app", "llama"),), match_expressions=(LabelRequirement("tier", ABSENT, ()),)
            ),
            APP,
            False,
        ),
    ],
)
def test_a_selector_selects_as_kubernetes_does(
    selector: Selector | None, labels: dict[str, str], selected: bool
) -> None:
    assert selects(selector, labels) is selected


def test_only_the_word_false_opts_out() -> None:
    key = "sluicegate.dev/inject"
    assert opted_out({key: "false"})
    assert not any(opted_out({key: value}) for value in ("", "true", "False", "no", "0"))
    assert not opted_out({})


EVERYTHING = Selector()
POLICIES = (
    Contender(name="b", created_at="2026-01-01T00:00:00Z", selector=EVERYTHING),
    Contender(name="a", created_at="2026-01-01T00:00:01Z", selector=EVERYTHING),
    Contender(name="c", created_at="2026-01-01T00:00:01Z", selector=EVERYTHING),
    Contender(
        name="0", created_at="2025-01-01T00:00:00Z", selector=Selector(match_labels=(("app", "other"),))
    ),
    Contender(name="00", created_at="2025-01-01T00:00:00Z", selector=None),
)


def test_the_oldest_policy_that_selects_a_pod_owns_it_in_whatever_order_they_are_given() -> None:
    for order in permutations(POLICIES):
        owner = owner_of(APP, order)
        assert owner is not None
        assert owner.name == "b"
        assert [one.name for one in contenders_for(APP, order)] == ["b", "a", "c"]


def test_a_pod_that_nobody_selects_or_that_opts_out_has_no_owner() -> None:
    assert owner_of(APP, POLICIES[3:]) is None
    assert owner_of(APP, []) is None
    assert owner_of({**APP, "sluicegate.dev/inject": "false"}, POLICIES) is None
    assert contenders_for({**APP, "sluicegate.dev/inject": "false"}, POLICIES) == []


KEYS, VALUES = st.sampled_from(["a", "b", "c"]), st.sampled_from(["", "x", "y"])
LABELS = st.dictionaries(KEYS, VALUES)
REQUIREMENTS = st.one_of(
    st.builds(
        LabelRequirement,
        KEYS,
        st.sampled_from([IN, NOT_IN]),
        st.lists(VALUES, min_size=1, max_size=3, unique=True).map(tuple),
    ),
    st.builds(LabelRequirement, KEYS, st.sampled_from([EXISTS, ABSENT]), st.just(())),
)
SELECTORS = st.builds(
    Selector,
    st.dictionaries(KEYS, VALUES, max_size=2).map(lambda labels: tuple(sorted(labels.items()))),
    st.lists(REQUIREMENTS, max_size=3).map(tuple),
)


def as_kubernetes_states(written: dict[str, object], labels: dict[str, str]) -> bool:
    """The rules of `metav1.LabelSelector` over its written form, one by one."""
    expressions = [
        {"key": key, "operator": "In", "values": [value]}
        for key, value in written.get("matchLabels", {}).items()  # type: ignore[attr-defined]
    ] + list(written.get("matchExpressions", []))  # type: ignore[call-overload]
    verdicts = {
        "In": lambda one: one["key"] in labels and labels[one["key"]] in one["values"],
        "NotIn": lambda one: one["key"] not in labels or labels[one["key"]] not in one["values"],
        "Exists": lambda one: one["key"] in labels,
        "DoesNotExist": lambda one: one["key"] not in labels,
    }
    return all(verdicts[one["operator"]](one) for one in expressions)


@given(SELECTORS, LABELS)
def test_what_is_written_for_the_api_server_selects_the_same(
    selector: Selector, labels: dict[str, str]
) -> None:
    written = label_selector(selector)
    assert written is not None
    assert as_kubernetes_states(written, labels) is selects(selector, labels)
    assert all("values" not in one or one["values"] for one in written.get("matchExpressions", ()))


def test_a_selector_as_a_query() -> None:
    selector = Selector(
        match_labels=(("app", "llama"),),
        match_expressions=(
            LabelRequirement("zone", IN, ("a", "b")),
            LabelRequirement("tier", NOT_IN, ("batch",)),
            LabelRequirement("gpu", EXISTS),
            LabelRequirement("old", ABSENT),
        ),
    )
    assert query(selector) == "app=llama,zone in (a,b),tier notin (batch),gpu,!old"
    assert query(Selector()) == ""
