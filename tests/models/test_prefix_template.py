"""Histories as tokens: the numbering of docs/concepts/semantic-ids.md."""

import numpy as np
import pytest

from recserve.models.prefix_template import HistoryTemplate

CODES = np.array([[0, 1, 0], [1, 2, 1], [1, 0, 0]], dtype=np.uint16)
SIZES = (2, 3, 2)


def test_codes_form_numbers_levels_one_after_another() -> None:
    """BOS 0, level 0 from 1, level 1 from 3, level 2 from 6: item 1 is 1+1, 3+2, 6+1."""
    tokens = HistoryTemplate(SIZES, "codes", 9).tokens(np.array([1, 0]), CODES)
    assert tokens.tolist() == [0, 2, 5, 7, 1, 4, 6] and tokens.dtype == np.int64


def test_items_form_has_one_token_per_item() -> None:
    template = HistoryTemplate(SIZES, "items", 9)
    tokens = template.tokens(np.array([2, 0], dtype=np.int32), CODES)
    assert tokens.tolist() == [0, 10, 8] and tokens.dtype == np.int64
    assert template.first_item == 8


@pytest.mark.parametrize("form", ["codes", "items"])
def test_an_empty_history_is_bos(form: str) -> None:
    template = HistoryTemplate(SIZES, form, 9)  # type: ignore[arg-type]
    assert template.tokens(np.empty(0, np.int64), CODES).tolist() == [0]


def test_large_codebooks_do_not_overflow() -> None:
    codes = np.array([[65_535, 65_535]], dtype=np.uint16)
    tokens = HistoryTemplate((65_536, 65_536), "codes", 9).tokens(np.array([0]), codes)
    assert tokens.tolist() == [0, 65_536, 131_072]


@pytest.mark.parametrize("row", [-1, 3])
def test_refuses_rows_out_of_range(row: int) -> None:
    with pytest.raises(ValueError, match="the catalogue has 3"):
        HistoryTemplate(SIZES, "items", 9).tokens(np.array([row]), CODES)
