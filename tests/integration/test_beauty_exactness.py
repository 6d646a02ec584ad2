"""`speculative` is `beam` on real data: users of Amazon Beauty at beams 10, 50 and 200.

The recommender and its draft head are trained for a moment: real distributions, not drawn ones.
Half of the users have their history excluded, so that filters are part of what is compared.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

from recserve.bundle.building import BuildOptions, build_bundle
from recserve.bundle.bundle import Bundle
from recserve.core.request import Prefix, SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.evaluation.cases import leave_one_out_cases
from recserve.kernels.trie.trie import build_trie
from recserve.models.inputs import NodeInputs
from recserve.models.item_heads import load_self_draft
from recserve.models.recommender import load_recommender
from recserve.search.strategy import Heads
from recserve.training.item_drafters.draft_head import DrafterRecipe, train_drafter
from recserve.training.options import TrainOptions
from recserve.training.recommender.recommender import ITEMS, train_recommender
from recserve.training.schedule import Schedule
from tests.support.grids import chosen
from tests.support.paths import DATA

BEAUTY = DATA / "amazon-beauty"
# Users that are compared, users whose events the models are trained on, and epochs of the head.
SIZES = {"60": (60, 1000, 16), "2000": (2000, None, 2)}
QUIET = Console(quiet=True)

pytestmark = pytest.mark.skipif(not BEAUTY.is_dir(), reason=f"no Amazon Beauty at {BEAUTY}")


def events_of(users: int | None, folder: Path) -> Path:
    """A file of the events of the first users, or of all."""
    path = BEAUTY / "events.parquet"
    if users is None:
        return path
    events = pq.read_table(path)
    first = events["user_id"].unique()[:users]
    pq.write_table(events.filter(pc.is_in(events["user_id"], first)), folder / "events.parquet")
    return folder / "events.parquet"


def trained(folder: Path, users: int | None, head_epochs: int) -> Bundle:
    """Beauty with a small recommender after one epoch, and a head distilled from it."""
    out = folder / "bundle"
    items, events = BEAUTY / "items.parquet", events_of(users, folder)
    shape = {"text_dim": 48, "collaborative_dim": 0, "levels": 3, "codes": 256}
    options = BuildOptions(items, events, out, **shape)  # type: ignore[arg-type]
    build_bundle(options, log=lambda _: None)
    opened = Bundle.open(out)
    recipe = replace(
        ITEMS,
        hidden_size=64,
        num_heads=2,
        intermediate_size=128,
        schedule=Schedule(1, 5e-3),
        validation_users=20,
    )
    train_recommender(opened, TrainOptions(device="cpu"), recipe, QUIET)
    opened = Bundle.open(out)
    schedule = Schedule(head_epochs, 5e-3)
    drafter = DrafterRecipe(validation_users=20, validation_width=10, schedule=schedule)
    train_drafter(opened, TrainOptions(device="cpu"), drafter, QUIET)
    return Bundle.open(out)


@pytest.fixture(scope="module", params=chosen(SIZES, "60"))
def asked(request, tmp_path_factory):
    """The engine, and a function from beam width and strategy to one request per user."""
    num_users, num_trained, head_epochs = request.param
    bundle = trained(tmp_path_factory.mktemp("beauty"), num_trained, head_epochs)
    catalog = bundle.catalog()
    codes = torch.from_numpy(catalog.semantic_ids.codes.astype(np.int64))
    vectors = torch.from_numpy(catalog.vectors)
    model = load_recommender(bundle.directory("recommender"), codes, vectors)
    head = load_self_draft(bundle.directory("drafters/speculative"), model)
    head.calibration = None  # always draft, whether or not it pays on this machine
    model.pack()  # as the server does
    head.pack()
    heads = Heads(head)
    trie = build_trie(codes, model.config.codebook_sizes)
    cases = leave_one_out_cases(bundle.events(), "test").sample(num_users)
    assert len(cases) == num_users

    def requests(width: int, strategy: str) -> list[SlateQuery]:
        made = []
        for case in range(len(cases)):
            history = cases.history(case)
            tokens = model.template.tokens(history[-20:], catalog.semantic_ids.codes)
            prefix = Prefix(NodeInputs(torch.from_numpy(tokens)), tokens)
            seen = history if case % 2 else None
            made.append(
                SlateQuery(
                    prefix=prefix,
                    trie=trie,
                    k=10,
                    beam_width=width,
                    strategy=strategy,
                    excluded=seen,
                )
            )
        return made

    return build_engine(
        EngineModels(model, heads=heads), EngineConfig(kv_bytes=2**28, max_queue=4096)
    ), requests


@pytest.mark.slow
def test_users_get_the_slates_of_beam(asked):
    engine, requests = asked
    for width in (10, 50, 200):
        plain = engine.run_many(requests(width, "beam"))
        drafted = engine.run_many(requests(width, "speculative"))
        assert all(answer.exact for answer in drafted)
        ids = np.stack([answer.rows for answer in plain])
        np.testing.assert_array_equal(np.stack([answer.rows for answer in drafted]), ids)
        np.testing.assert_allclose(
            np.stack([answer.scores for answer in drafted]),
            np.stack([answer.scores for answer in plain]),
            atol=1e-4,
        )
        rounds = np.array([[a.rounds for a in plain], [a.rounds for a in drafted]]).mean(1)
        assert rounds[1] < rounds[0], f"beam {width}: the head saves no round"
