"""Form fields with brackets."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.forms import FormError, FormValue, nest

names = st.text(st.characters(exclude_characters="[]", exclude_categories=["Cs"]), min_size=1, max_size=5)
leaves = st.text(max_size=5) | st.lists(st.text(max_size=5), min_size=1, max_size=3)
objects = st.dictionaries(names, leaves | st.dictionaries(names, leaves, min_size=1, max_size=3), max_size=4)


def spell(value: FormValue, name: str) -> list[tuple[str, str]]:
    """The fields of a value, as a client sends them."""
    if isinstance(value, str):
        return [(name, value)]
    if isinstance(value, list):
        return [(f"{name}[]", text) for text in value]
    return [field for key, inner in value.items() for field in spell(inner, f"{name}[{key}]")]


@given(objects)
def test_what_is_spelled_reads_back(wanted: dict[str, FormValue]) -> None:
    assert nest([field for name, value in wanted.items() for field in spell(value, name)]) == wanted


@pytest.mark.parametrize("name", ["", "a[", "a]b", "a[][b]", "[x]", "a[b]c", "a[b][c][d][e]", "a[[b]]"])
def test_a_malformed_name_is_refused(name: str) -> None:
    with pytest.raises(FormError) as caught:
        nest([(name, "1")])
    assert caught.value.problem.param == name


@pytest.mark.parametrize(
    "fields", [("a", "a"), ("a", "a[b]"), ("a[b]", "a"), ("a", "a[]"), ("a[]", "a"), ("a[b]", "a[]")]
)
def test_a_name_used_twice_is_refused(fields: tuple[str, str]) -> None:
    with pytest.raises(FormError):
        nest([(field, "1") for field in fields])


@given(st.lists(st.tuples(st.text(max_size=12), st.text(max_size=3)), max_size=5))
def test_any_form_is_read_or_refused(fields: list[tuple[str, str]]) -> None:
    with contextlib.suppress(FormError):
        assert isinstance(nest(fields), dict)
