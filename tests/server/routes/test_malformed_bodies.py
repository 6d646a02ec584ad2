"""Bodies that are not JSON are refused with 400, whatever else is wrong with them."""

import msgspec
import pytest

from recserve.schemas.scoring import RerankRequest
from recserve.server.body_decoder import MalformedBody, decode
from recserve.server.errors import row_of

BODY = msgspec.json.Decoder(RerankRequest)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"query":[],"docu\xa9ents":["a"]}',
        b'{"query": 5, "documents": ["\xff"]}',
        b'{"query": "\xc3", "documents": ["a"]}',
    ],
)
def test_a_body_that_is_not_utf8_is_malformed_even_where_its_fields_are_wrong(raw):
    with pytest.raises(MalformedBody) as caught:
        decode(BODY, raw)
    assert row_of(caught.value).status == 400
    assert str(caught.value).startswith("the body is not valid JSON: ")
