"""Category numbers of items."""

from __future__ import annotations

import numpy as np

from recserve.features.ranking.item_categories import category_matrix, category_vocabulary

PATHS = [["A > B", "C"], [], ["C", "A > B"], ["A > B", "C"], ["D > E > F"], ["unknown"], ["C"]]


def test_items_with_equal_paths_get_equal_rows_and_order_of_paths_does_not_matter():
    names, weights = category_vocabulary([paths for paths in PATHS if paths != ["unknown"]])
    found = category_matrix(PATHS, names, weights)
    assert found.dtype == np.int32 and found.shape == (7, 3)
    assert (found[0] == found[2]).all() and (found[0] == found[3]).all()
    assert (found[1] == len(names)).all() and (found[5] == len(names)).all()
    told = [{names[c] for c in row if c < len(names)} for row in found]
    assert told[0] == {"A", "A > B", "C"} and told[4] == {"D", "D > E", "D > E > F"}
    assert told[6] == {"C"}
    rarest = [weights[c] for c in found[0]]
    assert rarest == sorted(rarest, reverse=True)
