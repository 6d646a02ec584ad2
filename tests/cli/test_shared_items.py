"""Commands without a server say that they do not read the items that servers share in Redis."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from recserve import Service, ServiceOptions
from recserve.cli import app
from recserve.service.options import CatalogLogOptions
from tests.support.live_catalogues import item_like, put
from tests.support.tiny_bundle import shared_bundle


@pytest.mark.parametrize("name", ["items", "shop", None])
@pytest.mark.parametrize("command", ["recommend", "rank", "batch"])
def test_a_command_warns_of_items_that_only_servers_have(
    command, name, empty_redis, redis_url, tmp_path
):
    if name is not None:
        options = ServiceOptions(catalog_log=CatalogLogOptions("redis", name))
        with Service.open(shared_bundle(), redis_url, "cpu", options) as service:
            put(service, item_like(service, "new"))
    words = {
        "recommend": ["--user", "user000001"],
        "rank": ["--history", "item000001", "--item", "item000002"],
        "batch": ["--input", str(tmp_path / "u.parquet"), "--output", str(tmp_path / "out")],
    }
    pq.write_table(pa.table({"user_id": ["user000001"]}), tmp_path / "u.parquet")
    done = CliRunner().invoke(
        app,
        [command, "--bundle", str(shared_bundle()), "--store", redis_url, *words[command]],
        env={} if name in (None, "items") else {"RECSERVE_CATALOG_NAME": name},
    )
    assert done.exit_code == 0, done.output
    assert ("does not read them" in done.stderr) is (name is not None)
    assert name is None or f"catalog_name {name})" in done.stderr
