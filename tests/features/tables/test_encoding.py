"""Histories as tokens: the numbering of docs/concepts/semantic-ids.md, and the sliding window."""

import numpy as np
import pytest

from recserve.features.tables.encoding import history_tokens, level_offsets, window_start

CODES = np.array([[0, 1, 0], [1, 2, 1], [1, 0, 0]], dtype=np.uint16)
SIZES = (2, 3, 2)


def test_codes_form_numbers_levels_one_after_another() -> None:
    """BOS 0, level 0 from 1, level 1 from 3, level 2 from 6: item 1 is 1+1, 3+2, 6+1."""
    tokens = history_tokens(np.array([1, 0]), CODES, SIZES, "codes")
    assert tokens.tolist() == [0, 2, 5, 7, 1, 4, 6] and tokens.dtype == np.int64


def test_items_form_has_one_token_per_item() -> None:
    assert level_offsets(SIZES).tolist() == [1, 3, 6, 8]
    tokens = history_tokens(np.array([2, 0], dtype=np.int32), CODES, SIZES, "items")
    assert tokens.tolist() == [0, 10, 8] and tokens.dtype == np.int64


@pytest.mark.parametrize("form", ["codes", "items"])
def test_an_empty_history_is_bos(form: str) -> None:
    assert history_tokens(np.empty(0, np.int64), CODES, SIZES, form).tolist() == [0]  # type: ignore[arg-type]


def test_large_codebooks_do_not_overflow() -> None:
    codes = np.array([[65_535, 65_535]], dtype=np.uint16)
    tokens = history_tokens(np.array([0]), codes, (65_536, 65_536), "codes")
    assert tokens.tolist() == [0, 65_536, 131_072]


@pytest.mark.parametrize("row", [-1, 3])
def test_refuses_rows_out_of_range(row: int) -> None:
    with pytest.raises(ValueError, match="the catalogue has 3"):
        history_tokens(np.array([row]), CODES, SIZES, "items")


def test_refuses_an_unknown_form() -> None:
    with pytest.raises(ValueError, match="form is 'text'"):
        history_tokens(np.array([0]), CODES, SIZES, "text")  # type: ignore[arg-type]


@pytest.mark.parametrize(("maximum", "block"), [(1, 1), (8, 1), (8, 3), (8, 8), (50, 16)])
def test_window_slides_in_blocks(maximum: int, block: int) -> None:
    starts = [window_start(count, maximum, block) for count in range(4 * maximum + 5)]
    for count, start in enumerate(starts):
        assert start % block == 0 and count - start <= maximum
        assert start == 0 if count <= maximum else count - start > maximum - block
    steps = np.flatnonzero(np.diff(starts))
    assert set(np.diff(starts)[steps].tolist()) <= {block}
    assert set(np.diff(steps).tolist()) <= {block}


@pytest.mark.parametrize("block", [0, 9])
def test_refuses_blocks(block: int) -> None:
    with pytest.raises(ValueError, match=f"block is {block}"):
        window_start(10, 8, block)
