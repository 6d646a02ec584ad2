"""Quantisers: what is encoded decodes to something near, the same seed gives the same codes."""

from pathlib import Path

import numpy as np
import pytest

from recserve.features.vectors.quantizer import (
    ProductQuantizer,
    ResidualQuantizer,
    fit_quantizer,
    load_quantizer,
    reconstruction_error,
)

KINDS = ["residual", "product"]


def clustered(items: int = 600, dim: int = 12, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(8, dim))
    noise = 0.3 * rng.normal(size=(items, dim))
    return (centres[rng.integers(8, size=items)] + noise).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_have_their_shape_and_decode_near(kind: str) -> None:
    vectors = clustered()
    quantizer = fit_quantizer(kind, vectors, (16,) * 4, seed=0)
    codes = quantizer.encode(vectors)
    assert codes.shape == (600, 4) and codes.dtype == np.uint16
    assert quantizer.codebook_sizes == (16,) * 4
    assert all(codes[:, level].max() < 16 for level in range(4))
    decoded = quantizer.decode(codes)
    assert decoded.shape == vectors.shape and decoded.dtype == np.float32
    assert reconstruction_error(vectors, decoded) < 0.25


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_codes_after_saving_too(kind: str, tmp_path: Path) -> None:
    vectors = clustered()
    quantizer = fit_quantizer(kind, vectors, (8,) * 3, seed=5)
    again = fit_quantizer(kind, vectors, (8,) * 3, seed=5)
    assert np.array_equal(quantizer.encode(vectors), again.encode(vectors))
    quantizer.save(tmp_path)
    loaded = load_quantizer(tmp_path)
    new = clustered(50, seed=9)
    assert np.array_equal(loaded.encode(new), quantizer.encode(new))
    assert np.array_equal(loaded.decode(loaded.encode(new)), quantizer.decode(loaded.encode(new)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_code_does_not_depend_on_its_neighbours(kind: str) -> None:
    vectors = clustered()
    quantizer = fit_quantizer(kind, vectors, (8,) * 3, seed=5)
    alone = np.concatenate([quantizer.encode(vectors[i : i + 1]) for i in range(40)])
    assert np.array_equal(alone, quantizer.encode(vectors)[:40])


def test_each_residual_level_has_its_own_number_of_codes() -> None:
    quantizer = ResidualQuantizer.fit(clustered(), (32, 4, 9), seed=0)
    assert quantizer.codebook_sizes == (32, 4, 9)
    codes = quantizer.encode(clustered())
    assert [len(np.unique(codes[:, level])) for level in range(3)] == [32, 4, 9]


def test_each_residual_level_lowers_the_error() -> None:
    vectors = clustered()
    quantizer = ResidualQuantizer.fit(vectors, (8,) * 4, seed=0)
    codes = quantizer.encode(vectors)
    errors = [
        reconstruction_error(
            vectors, ResidualQuantizer(quantizer.codebooks[:used]).decode(codes[:, :used])
        )
        for used in (1, 2, 3, 4)
    ]
    assert errors == sorted(errors, reverse=True) and errors[3] < 0.8 * errors[0]


def test_product_rotation_keeps_lengths_and_pads() -> None:
    vectors = clustered(dim=10)
    quantizer = ProductQuantizer.fit(vectors, (16,) * 4, seed=0)
    assert quantizer.rotation.shape == (12, 10)
    assert np.allclose(quantizer.rotation.T @ quantizer.rotation, np.eye(10), atol=1e-4)


def test_product_rotation_lowers_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dimensions that belong together lie apart; a rotation brings them together."""
    vectors = clustered(dim=4) @ np.random.default_rng(3).normal(size=(4, 16)).astype(np.float32)

    def error() -> float:
        quantizer = ProductQuantizer.fit(vectors, (8,) * 4, seed=0)
        return reconstruction_error(vectors, quantizer.decode(quantizer.encode(vectors)))

    turned = error()
    monkeypatch.setattr("recserve.features.vectors.quantizer.OPQ_KMEANS_ROUNDS", (18,))
    assert turned < 0.9 * error()


@pytest.mark.parametrize(("kind", "sizes"), [("residual", (5, 5)), ("product", (5, 5))])
def test_small_catalogues_get_small_codebooks(kind: str, sizes: tuple[int, ...]) -> None:
    vectors = clustered(items=5)
    quantizer = fit_quantizer(kind, vectors, (256,) * 2, seed=0)
    assert quantizer.codebook_sizes == sizes
    assert quantizer.encode(vectors).shape == (5, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_vectors_get_equal_codes(kind: str) -> None:
    quantizer = fit_quantizer(kind, np.ones((20, 4), np.float32), (4,) * 2, seed=0)
    assert len(np.unique(quantizer.encode(np.ones((20, 4), np.float32)), axis=0)) == 1


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("residual", (), "levels is 0; expected 1..64"),
        ("residual", (8,) * 65, "levels is 65"),
        ("residual", (8, 1), "codes is 1; expected 2..65536"),
        ("residual", (65_537, 8), "codes is 65537"),
        ("product", (8,) * 13, "levels is 13; a product quantiser of 12 dimensions"),
        ("product", (8, 8, 4), "codes are 8, 8, 4; a product quantiser has the same number"),
        ("kmeans", (8, 8), "quantizer is 'kmeans'; expected one of residual, product"),
    ],
)
def test_refuses_sizes(kind: str, sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_quantizer(kind, clustered(), sizes, seed=0)


@pytest.mark.parametrize("kind", KINDS)
def test_refuses_vectors(kind: str) -> None:
    for bad in (np.zeros((0, 4), np.float32), np.zeros(4, np.float32)):
        with pytest.raises(ValueError, match="expected .items, dim."):
            fit_quantizer(kind, bad, (8,) * 2, seed=0)
    with pytest.raises(ValueError, match="not finite"):
        fit_quantizer(kind, np.full((9, 4), np.nan, np.float32), (8,) * 2, seed=0)
    quantizer = fit_quantizer(kind, clustered(), (8,) * 2, seed=0)
    with pytest.raises(ValueError, match="takes .items, 12."):
        quantizer.encode(np.zeros((3, 5), np.float32))
