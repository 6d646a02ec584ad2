"""The errors that /openapi.json names for an operation."""

import pytest

from recserve.schemas.api import OPERATIONS
from recserve.server.openapi import error_statuses

OF_EVERY_REQUEST = {408, 431, 500, 503}


@pytest.mark.parametrize(
    "name,expected",
    [
        ("live", set()),
        ("metrics", {401, 403, 429}),
        ("recommend", {400, 401, 403, 404, 413, 415, 422, 429, 504}),
        ("item", {401, 403, 404, 422, 429}),
        ("load_bundle", {400, 401, 403, 404, 409, 413, 415, 422}),
        ("users", {400, 401, 403, 413, 415, 422, 429, 501}),
    ],
)
def test_statuses_of_an_operation(name, expected):
    found = error_statuses(OPERATIONS[name], {"type": "object"})
    assert set(found) == {str(status) for status in OF_EVERY_REQUEST | expected}
