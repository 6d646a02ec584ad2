"""Every way in and out of text agrees with transformers about a drawn tokenizer folder."""

import numpy as np
import pytest
import torch

from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.models.saving import save_language_model
from recserve.schemas.chat_messages import ChatMessage
from recserve.schemas.encoding import DetokenizeRequest, TokenizeRequest
from recserve.schemas.text import ChatRequest, CompletionRequest
from recserve.service import Service
from recserve.service.text.loader import TextSettings, load_text
from tests.support.tokenizer_folders import FAMILIES, draw_text, write_folder

transformers = pytest.importorskip("transformers")
DRAWN = {"max_tokens": 12, "temperature": 1, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module", params=[(f, seed) for f in FAMILIES for seed in range(3)], ids=str)
def both(request, tmp_path_factory):
    """The service of a drawn model, and its tokenizer in transformers."""
    folder, (family, seed) = tmp_path_factory.mktemp("model"), request.param
    write_folder(folder, family, np.random.default_rng([9, seed]))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    torch.manual_seed(0)
    decoder = DecoderConfig(32, 1, 2, 1, 16, 64, max_positions=512)
    config = LanguageModelConfig(decoder, max(theirs.get_vocab().values()) + 1, True)
    save_language_model(LanguageModel(config), folder)
    with Service.of_text(load_text(TextSettings(folder), torch.device("cpu"))) as service:
        yield service.text, theirs


def write(begin, body):
    """Returns the text, its streamed pieces joined, and the ids of the new tokens."""
    pieces = []
    (choice,) = begin(body, listener=pieces.append).wait().choices
    tokens = [written.token for piece in pieces for written in piece.tokens]
    text = choice.text if hasattr(choice, "text") else choice.message.content
    return text, "".join(piece.text for piece in pieces), tokens


def test_completions(both):
    text, theirs = both
    random = np.random.default_rng(4)
    end = theirs.get_vocab()["x"]
    for _ in range(8):
        drawn = [int(token) for token in random.integers(0, len(theirs), random.integers(6))]
        prompt = [[*drawn, end], drawn[:1] or [end]][random.integers(2)]
        if theirs.convert_ids_to_tokens(prompt[-1]).startswith("<0x"):
            continue  # prompt and text may share a run that is no text
        echoed, streamed, tokens = write(
            text.begin_completion, CompletionRequest(prompt=prompt, echo=True, logprobs=0, **DRAWN)
        )
        assert echoed == streamed == theirs.decode([*prompt, *tokens], skip_special_tokens=True)
        plain, streamed, again = write(
            text.begin_completion, CompletionRequest(prompt=prompt, logprobs=0, **DRAWN)
        )
        before = theirs.decode(prompt, skip_special_tokens=True)
        assert again == tokens and plain == streamed
        assert before.endswith("\ufffd") or plain == echoed.removeprefix(before)
        given = draw_text(random) + "x"
        body = CompletionRequest(prompt=given, echo=True, max_tokens=0, logprobs=0)
        (choice,) = text.begin_completion(body).wait().choices
        found = choice.logprobs
        assert choice.text == given and found.text_offset == sorted(found.text_offset)
        assert len(found.tokens) == len(theirs.encode(given))


def test_tokens_and_back(both):
    text, theirs = both
    random = np.random.default_rng(5)
    for _ in range(20):
        given, special = draw_text(random), bool(random.integers(2))
        said = text.embeddings.tokenize(TokenizeRequest(prompt=given, add_special_tokens=special))
        assert said.tokens == theirs.encode(given, add_special_tokens=special)
        back = text.embeddings.detokenize(DetokenizeRequest(tokens=said.tokens)).prompt
        assert back == theirs.decode(said.tokens, skip_special_tokens=True)


def test_chats(both):
    text, theirs = both
    said = [{"role": "user", "content": "a b"}]
    messages = [ChatMessage(**turn) for turn in said]
    prompt = theirs.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
    assert text.embeddings.tokenize(TokenizeRequest(messages=messages)).tokens == prompt
    body = ChatRequest(messages=messages, logprobs=True, **DRAWN)
    whole, streamed, tokens = write(text.begin_chat, body)
    before, both_texts = (
        theirs.decode(ids, skip_special_tokens=True) for ids in (prompt, [*prompt, *tokens])
    )
    assert whole == streamed == both_texts.removeprefix(before)
