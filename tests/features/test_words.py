"""The words of a text, in all scripts and forms: none is lost or cut, and a form makes none."""

import random
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recserve.features.words import canonical, closest, fold, words
from tests.support.scripts import FORMS, TITLES, in_form

LETTERS = st.characters(codec="utf-8", exclude_categories=["Cs"])


@pytest.mark.parametrize("script", TITLES)
def test_no_letter_is_lost_in_any_form(script):
    for title in TITLES[script]:
        found = words(title)
        whole = "".join(c for c in fold(title) if unicodedata.category(c)[0] in "LMN")
        assert found and not set(whole) - set("".join(found)), (title, found)
        assert all(unicodedata.category(word[0])[0] in "LN" for word in found), found
        for form in FORMS:
            for other in (in_form(title, form), in_form(title, form).upper()):
                assert words(other) == found, (form, other)


@given(st.text(LETTERS, max_size=40))
def test_equivalent_texts_are_equal(text):
    for form in FORMS:
        other = unicodedata.normalize(form, text)
        assert fold(other) == fold(text) and words(other) == words(text)
    assert fold(fold(text)) == fold(text)
    assert canonical(unicodedata.normalize("NFD", text)) == canonical(text)


@given(st.text(st.characters(max_codepoint=127), max_size=60))
def test_words_of_ascii_are_those_of_earlier_bundles(text):
    plain = __import__("re").compile(r"[^\W_]{2,}|c:\S+")
    assert words(text) == plain.findall(text.lower())


def test_scripts_without_spaces_give_pairs_of_characters():
    assert words("红色平底锅 iPhone15手机 书") == [
        "红色",
        "色平",
        "平底",
        "底锅",
        "iphone15",
        "手机",
        "书",
    ]
    assert words("ที่นอน") == ["ที่น", "นอ", "อน"]
    assert words("हिन्दी की किताबें") == ["हिन्दी", "की", "किताबें"]
    assert words("책 x ☕️ 1️⃣ can\u00adteen") == ["책", "canteen"]


def test_hints_compare_folded_texts():
    known = [title for titles in TITLES.values() for title in titles]
    draw = random.Random(0)
    for title in known:
        near = in_form(title.upper(), draw.choice(FORMS))
        assert closest(near, known) == [title]
