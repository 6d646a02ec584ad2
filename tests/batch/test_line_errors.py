"""A rejected line of a batch of texts has the status and code that its HTTP route gives."""

import pytest

from recserve.batch.lines import NoAnswer, error_body
from recserve.schemas.api import Api
from recserve.schemas.items import InvalidRequest
from recserve.server.errors import error_answer, row_of
from recserve.service.errors import REFUSALS


@pytest.mark.parametrize("kind", REFUSALS, ids=lambda kind: kind.__name__)
def test_a_line_is_refused_with_the_code_of_its_route(kind):
    derived = type("Derived", (kind,), {})
    for one in (kind, derived):
        made = one("field", "why") if issubclass(kind, InvalidRequest) else one("why")
        status, body = error_body(made)
        route = error_answer(made).error
        assert status == row_of(made, Api.complete).status
        error = body.error
        assert (error.code, error.type, error.param) == (route.code, route.type, route.param)


def test_a_line_without_an_answer_is_an_internal_error():
    assert error_body(NoAnswer("why"))[0] == 500
