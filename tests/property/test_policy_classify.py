"""The compiled classifier against the rules read one by one."""

from hypothesis import given
from hypothesis import strategies as st

from sluicegate_core.classify import Classifier
from sluicegate_core.policy import Classify, ClassPolicy, Policy, Rule

NAMES = ("a", "b", "c")
WORDS = st.text("xy", min_size=1, max_size=3)
PATTERNS = st.tuples(WORDS, st.sampled_from(["", "*"])).map("".join)

INTO = st.sampled_from(NAMES)
RULES = st.one_of(
    st.builds(
        lambda into, header, values: Rule(into, header=header, values=tuple(values)),
        INTO,
        st.sampled_from(["h1", "h2"]),
        st.lists(WORDS, min_size=1, max_size=3),
    ),
    st.builds(lambda into, pattern: Rule(into, model=pattern), INTO, PATTERNS),
    st.builds(lambda into, pattern: Rule(into, path=pattern), INTO, PATTERNS),
)


def matches(pattern: str, value: str) -> bool:
    return value.startswith(pattern[:-1]) if pattern.endswith("*") else value == pattern


def naive(rules: list[Rule], headers: dict[bytes, bytes], model: str, path: str) -> str:
    for rule in rules:
        if rule.header is not None:
            value = headers.get(rule.header.encode())
            found = value is not None and value.decode() in rule.values
        elif rule.model is not None:
            found = matches(rule.model, model)
        else:
            assert rule.path is not None
            found = matches(rule.path, path)
        if found:
            return rule.class_name
    return "a"


@given(
    rules=st.lists(RULES, max_size=10),
    headers=st.dictionaries(st.sampled_from([b"h1", b"h2"]), WORDS.map(str.encode)),
    model=st.text("xy", max_size=4),
    path=st.text("xy", max_size=4),
)
def test_the_compiled_rules_are_the_rules(
    rules: list[Rule], headers: dict[bytes, bytes], model: str, path: str
) -> None:
    policy = Policy(classes=tuple(map(ClassPolicy, NAMES)), classify=Classify("a", None, tuple(rules)))
    index, client = Classifier(policy).classify(headers.get, model, path)
    assert policy.class_names[index] == naive(rules, headers, model, path)
    assert client == ""
