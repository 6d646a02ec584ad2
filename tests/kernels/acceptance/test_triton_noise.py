"""Noise in Triton, interpreted on the CPU: it has the bits of the torch references."""

import pytest
import torch

from tests.support import triton_interpreter
from tests.support.pretend_cuda import PretendCuda

triton = pytest.importorskip("triton")
tl = triton.language

from recserve.kernels.acceptance import noise, triton_noise  # noqa: E402

STREAMS = (noise.TARGET, noise.DRAFT, noise.ACCEPT, noise.RESIDUAL)
SIZES = (0, 1, 63, 127, 128, 129, 300)
VOCABULARIES = (1, 255, 1024, 1025, 2500)


def number(high, g):
    return int(torch.randint(0, high, (), generator=g))


def one_of(values, g):
    return values[number(len(values), g)]


def draw_keys(rows, g):
    """Seeds and positions of all sizes up to 64 bits, negative ones too, not contiguous."""
    bits = torch.randint(0, 2**32, (4, rows), generator=g)
    words = (bits[:2] << 32) + bits[2:]
    shifts = torch.randint(0, 64, (2, rows), generator=g)
    return tuple((words >> shifts).T.contiguous().unbind(1))


@triton.jit
def numbers(seeds, positions, out, STREAM: tl.constexpr, UNIFORM: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, triton_noise.LANES)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    words = triton_noise.words(seed, position, lane, STREAM)
    for word in tl.static_range(4):
        place = word * triton_noise.LANES + lane
        value = triton_noise.exponential_of_words(words[word])
        if UNIFORM:
            value = triton_noise.uniform(seed, position, place, STREAM)
        tl.store(out + row * triton_noise.TILE + place, value)


@pytest.mark.parametrize("of_torch", [noise.exponential, noise.uniform])
def test_device_functions_have_the_same_bits(of_torch):
    """Of rows of one tile, in each stream."""
    seeds, positions = (x.contiguous() for x in draw_keys(6, torch.Generator().manual_seed(0)))
    for stream in STREAMS:
        out = torch.full((6, noise.TILE), float("nan"))
        uniform = of_torch is noise.uniform
        numbers[(6,)](seeds, positions, out, stream, uniform, enable_fp_fusion=False)
        assert torch.equal(out, of_torch(seeds, positions, noise.TILE, stream))


@pytest.mark.parametrize("seed", range(12))
def test_chosen_tokens_have_the_same_bits(seed, force_kernels):
    """Drawn rows, streams and tokens, of which some are past the first tiles of a vocabulary."""
    g = torch.Generator().manual_seed(seed)
    rows, size, stream = number(7, g), one_of(SIZES, g), one_of(STREAMS, g)
    seeds, positions = draw_keys(rows, g)
    vocabulary = one_of((5, 3000, 2**18, 2**31), g)
    tokens = torch.randint(0, vocabulary, (size, rows), generator=g).T
    expected = noise.gumbel_of_tokens(seeds, positions, tokens, stream)
    force_kernels("triton")
    assert torch.equal(noise.gumbel_of_tokens(seeds, positions, tokens, stream), expected)


@pytest.mark.parametrize("seed", range(12))
def test_whole_rows_have_the_same_bits(seed, force_kernels):
    """Drawn rows, streams and vocabularies, also those that no tile divides."""
    g = torch.Generator().manual_seed(seed)
    rows, vocabulary, stream = number(5, g), one_of(VOCABULARIES, g), one_of(STREAMS, g)
    seeds, positions = draw_keys(rows, g)
    expected = noise.gumbel(seeds, positions, vocabulary, stream)
    force_kernels("triton")
    assert torch.equal(noise.gumbel(seeds, positions, vocabulary, stream), expected)


def test_noise_on_a_device_is_one_launch(monkeypatch, force_kernels):
    """Of chosen tokens and of whole rows, on a pretended device, which waits for nothing."""
    seeds, positions = draw_keys(3, torch.Generator().manual_seed(0))
    tokens = torch.arange(390).view(3, 130)
    expected = noise.gumbel_of_tokens(seeds, positions, tokens), noise.gumbel(seeds, positions, 70)
    force_kernels("auto")
    launches = triton_interpreter.interpret_pretended(monkeypatch)
    with PretendCuda() as device:
        keys, there = (seeds.to("cuda"), positions.to("cuda")), tokens.to("cuda")
        device.syncs.clear()
        found = noise.gumbel_of_tokens(*keys, there), noise.gumbel(*keys, 70)
        assert not device.syncs
    assert launches == {"tokens_kernel": 1, "all_tokens_kernel": 1}
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.inner, other)


@pytest.mark.parametrize("whole", [True, False], ids=["rows", "tokens"])
def test_noise_past_2_31_elements_is_addressed(whole, monkeypatch):
    """Of one row that more than 2**31 numbers precede; the next row stays as it is."""
    width = 1500
    before = 2**31 // width + 3

    def far(tensor):
        return triton_interpreter.Far(tensor, before * tensor[0].numel(), monkeypatch)

    seeds, positions = draw_keys(1, torch.Generator().manual_seed(0))
    tokens, out = torch.arange(width).flip(0)[None], torch.full((2, width), float("nan"))
    expected = noise.gumbel(seeds, positions, width)
    sizes = {"LANES": noise.LANES, "TILE": noise.TILE}
    with monkeypatch.context() as patch:
        triton_interpreter.start_programs_at(before, patch)
        keyed = far(seeds), far(positions)
        if whole:
            triton_noise.all_tokens_kernel[1, 2](*keyed, far(out), width, noise.TARGET, **sizes)
        else:
            triton_noise.tokens_kernel[1, 12](
                *keyed, far(tokens), far(out), width, noise.TARGET, **sizes, BLOCK_TOKENS=128
            )
    assert torch.equal(out[:1], expected if whole else expected.flip(1))
    assert out[1].isnan().all()
