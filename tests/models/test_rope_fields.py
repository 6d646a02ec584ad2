"""No scaling of positions is dropped: a type that does not scale has no scaling fields."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recserve.drafters.block.files import load_block
from recserve.drafters.eagle.files import load_eagle
from recserve.models.loading import UnsupportedModel
from tests.support import published_block, published_eagle
from tests.support.published_mtp import write_folder
from tests.support.text_plain import drawn_model

LOADERS = {
    "eagle": (published_eagle.eagle3, load_eagle),
    "block": (published_block.dflash, load_block),
}
SCALING = {
    "factor": st.sampled_from([2, 8.0, 0.5]),
    "original_max_position_embeddings": st.sampled_from([16, 32]),
    "low_freq_factor": st.just(1.0),
    "beta_fast": st.just(32),
    "mscale": st.just(1.0),
    "truncate": st.booleans(),
    "long_factor": st.just([1.0] * 4),
}
PLAIN = [{}, {"rope_type": "default"}, {"type": "mrope"}, {"type": "mrope", "rope_type": "default"}]
EXAMPLES = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def loaded(kind, folder, place, rope):
    """Loads a drafter whose configuration has this object."""
    torch.manual_seed(0)
    make, load = LOADERS[kind]
    fields, weights = make()
    return load(write_folder(folder, fields | {place: rope}, weights), drawn_model(0)).config


@pytest.mark.parametrize("kind", LOADERS)
@given(data=st.data())
@EXAMPLES
def test_a_scaling_without_its_type_is_refused(kind, tmp_path_factory, data):
    place = data.draw(st.sampled_from(["rope_scaling", "rope_parameters"]))
    name = data.draw(st.sampled_from(list(SCALING)))
    rope = data.draw(st.sampled_from(PLAIN)) | {name: data.draw(SCALING[name])}
    with pytest.raises(UnsupportedModel, match=f"{name} is .* beside rope_type"):
        loaded(kind, tmp_path_factory.mktemp("head"), place, rope)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("plain", PLAIN[1:], ids=str)
def test_a_type_that_does_not_scale_is_read(kind, plain, tmp_path):
    without = loaded(kind, tmp_path / "without", "rope_scaling", None)
    rope = plain | {"factor": 1.0, "low_freq_factor": None}
    assert loaded(kind, tmp_path / "plain", "rope_scaling", rope) == without


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("types", [("linear", "yarn"), ("default", "linear"), ("yarn", "mrope")])
def test_two_types_that_differ_are_refused(kind, types, tmp_path):
    for number, (one, two) in enumerate([types, types[::-1]]):
        rope = {"rope_type": one, "type": two, "factor": 2.0}
        with pytest.raises(UnsupportedModel, match="remove the wrong one"):
            loaded(kind, tmp_path / str(number), "rope_scaling", rope)
