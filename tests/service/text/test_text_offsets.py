"""`text_offset` of echoed prompts and of completions points at each token's own characters."""

import json

import numpy as np
import pytest
import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.models.saving import save_language_model
from recserve.schemas.text import CompletionRequest
from recserve.service import Service
from recserve.service.text.loader import TextSettings, load_text

SPECIAL = ("<s>", "</s>", "<|turn|>")
PIECES = (
    "Once",
    " upon",
    " a",
    "  ",
    " ",
    "é",
    "日本",
    "😀",
    "👩‍👩‍👧",
    "e\u0301",
    "ä\u0308",
    "\n\t",
    "x",
)
BOS = processors.TemplateProcessing(
    single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0), ("</s>", 1)]
)


def sentence_piece(metaspace: bool) -> Tokenizer:
    """Words with a leading space, letters, and bytes for all other characters."""
    words = ["▁", *"Onceuponax", "On", "ce", "Once", "▁Once", "▁upon", "▁a", "▁▁", "é"]
    vocabulary = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(words)]
    merges = [("O", "n"), ("c", "e"), ("On", "ce"), ("▁", "Once"), ("▁", "a"), ("▁", "▁")]
    numbers = {token: number for number, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(numbers, merges, unk_token="<s>", byte_fallback=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    else:
        spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(spaces)
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = BOS
    return tokenizer


def byte_level(trims: bool) -> Tokenizer:
    """Bytes and a few merges, with or without the processor that trims spaces off offsets."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("O", "n"), ("c", "e"), ("On", "ce"), ("Ġ", "a"), ("Ġ", "ð"), ("Ġ", "Ġ")]
    tokens = [*SPECIAL, *alphabet, *("".join(merge) for merge in merges)]
    numbers = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(numbers, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trim = processors.ByteLevel(trim_offsets=True)
    tokenizer.post_processor = processors.Sequence([trim, BOS]) if trims else BOS
    return tokenizer


FAMILIES = {
    "sentence-piece": lambda: sentence_piece(metaspace=False),
    "metaspace": lambda: sentence_piece(metaspace=True),
    "byte-level": lambda: byte_level(trims=False),
    "byte-level-trims": lambda: byte_level(trims=True),
}


@pytest.fixture(scope="module", params=FAMILIES)
def service(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = FAMILIES[request.param]()
    tokenizer.add_special_tokens([AddedToken(token) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    torch.manual_seed(0)
    decoder = DecoderConfig(32, 1, 2, 1, 16, 64, max_positions=512)
    network = LanguageModel(
        LanguageModelConfig(decoder, tokenizer.get_vocab_size(with_added_tokens=True), True)
    )
    save_language_model(network, folder)
    with Service.of_text(load_text(TextSettings(folder), torch.device("cpu"))) as made:
        yield made


def echo(service, prompt):
    body = CompletionRequest(
        prompt=prompt,
        echo=True,
        logprobs=2,
        max_tokens=12,
        temperature=1,
        seed=5,
        ignore_eos=True,
    )
    (choice,) = service.text.begin_completion(body).wait().choices
    return choice.text, choice.logprobs


def drawn_text(random) -> str:
    pieces = random.choice([*PIECES, *SPECIAL], random.integers(1, 9), replace=True)
    return "".join(str(piece) for piece in pieces)


def assert_places(text, found, first, end):
    """Asserts that every token stands at its place.

    Args:
        text: Text of the choice.
        found: Its log-probabilities.
        first: First token of the prompt that may be a special token with characters of its own.
        end: Number of tokens of the prompt.
    """
    places = found.text_offset
    assert places == sorted(places) and places[0] == 0 and places[-1] <= len(text)
    for n, (token, place) in enumerate(zip(found.tokens, places, strict=True)):
        names = found.top_logprobs[n]
        assert names is None or token in names
        invisible = token in SPECIAL and not first <= n < end
        # Tokens of one byte are a part of a character, or of a run that is no text.
        part = "\\x" in token or len(token) == 1 and text.startswith("\ufffd", place)
        if not invisible and not part:
            assert text.startswith(token, place), (text, token, place)


def test_a_prompt_that_is_a_text(service):
    random = np.random.default_rng(1)
    for text in ["Once upon", " Once", "日本", "😀 Once", *(drawn_text(random) for _ in range(3))]:
        whole, found = echo(service, text)
        prompt = len(service.text.model.tokenizer.encode(text))
        assert whole.startswith(text)
        assert_places(whole, found, 1, prompt)  # token 0 is BOS
        assert found.tokens[0] == "<s>" and found.text_offset[1] == 0
        assert found.text_offset[prompt] == len(text)


def test_a_prompt_that_is_a_list_of_tokens(service):
    tokenizer, random = service.text.model.tokenizer, np.random.default_rng(2)
    for _ in range(6):
        size = random.integers(1, 12)
        tokens = [int(t) for t in random.integers(0, len(tokenizer.all_bytes), size)]
        whole, found = echo(service, tokens)
        assert whole.startswith(tokenizer.decode(tokens).rstrip("\ufffd"))
        assert_places(whole, found, 0, 0)
