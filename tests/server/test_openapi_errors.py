"""The errors that /openapi.json names for an operation."""

import pytest

from recserve.server.openapi_errors import error_statuses

OF_EVERY_REQUEST = {408, 431, 500, 503}


@pytest.mark.parametrize(
    "name,path,has_input,expected",
    [
        ("live", "/health/live", False, set()),
        ("metrics", "/metrics", False, {401, 403}),
        ("recommend", "/v1/recommend", True, {400, 401, 403, 404, 413, 422, 429, 504}),
        ("item", "/v1/items/{item_id}", False, {401, 403, 404, 422, 429}),
        ("load_bundle", "/admin/bundle:load", True, {400, 401, 403, 404, 409, 413, 422, 429}),
        ("users", "/v1/users", True, {400, 401, 403, 413, 422, 429, 501}),
    ],
)
def test_statuses_of_an_operation(name, path, has_input, expected):
    found = error_statuses(name, path, has_input, {"type": "object"})
    assert set(found) == {str(status) for status in OF_EVERY_REQUEST | expected}
