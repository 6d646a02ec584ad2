"""Tokenizer, chat template, detokenising and stop strings, wherever tokens and pieces are cut."""

import json

import numpy as np
import pytest
from conftest import DATA
from hypothesis import given, settings
from hypothesis import strategies as st
from text_plain import drawn_model
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from recserve.core.text_request import SamplingParams, TextCommit, TextRequest
from recserve.engine.engine import Engine, EngineConfig
from recserve.text.chat_template import ChatTemplateError, render_chat
from recserve.text.detokenizer import Detokenizer
from recserve.text.stop_strings import StopStrings
from recserve.text.stream import TextStream
from recserve.text.tokenizer import Tokenizer, load_tokenizer


def byte_level(vocabulary: int = 300) -> Tokenizer:
    """A small byte-level BPE: most characters outside ASCII take several tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat sat on the mat, the end"] * 20, trainer)
    return Tokenizer(backend, {})


SMALL = byte_level()


def stories() -> Tokenizer:
    folder = DATA / "stories260k"
    if not folder.is_dir():
        pytest.skip(f"NO REFERENCE DATA at {folder}: this test did not run")
    return load_tokenizer(folder)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=40), st.integers(1, 4))
def test_pieces_make_up_the_text(text, cut):
    tokens = SMALL.encode(text)
    detokenizer = Detokenizer(SMALL)
    pieces = [detokenizer.add(tokens[i : i + cut]) for i in range(0, len(tokens), cut)]
    assert "".join(pieces) + detokenizer.finish() == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, SMALL.vocab_size - 1), max_size=25))
def test_any_tokens_stream_to_what_decoding_gives(tokens):
    """Tokens that are no valid UTF-8 too."""
    detokenizer = Detokenizer(SMALL)
    text = "".join(detokenizer.add([token]) for token in tokens) + detokenizer.finish()
    assert text == SMALL.decode(tokens)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30))
def test_sentencepiece_spaces_and_byte_fallback(text):
    """The stories' tokenizer spells spaces with the following word and unknown characters as
    bytes.
    """
    tokenizer = stories()
    tokens = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    streamed = "".join(detokenizer.add([t]) for t in tokens) + detokenizer.finish()
    assert streamed == tokenizer.decode(tokens)


def test_half_a_character_waits():
    tokens = SMALL.encode("né")
    detokenizer = Detokenizer(SMALL)
    assert len(tokens) == 3
    assert [detokenizer.add([t]) for t in tokens] == ["n", "", "é"]
    detokenizer.add(tokens[:2])
    assert detokenizer.finish() == "\ufffd"


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab", max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_stop_strings_equal_a_plain_search(text, stops, data):
    """Cut anywhere, the text ends where reading character by character would end it."""
    expected, found = text, None
    for end in range(1, len(text) + 1):
        hits = [s for s in stops if text[:end].endswith(s)]
        if hits:
            found = max(hits, key=len)
            expected = text[: end - len(found)]
            break
    matcher, out, at = StopStrings(stops), "", 0
    while at < len(text):
        size = data.draw(st.integers(1, 5))
        out += matcher.add(text[at : at + size])
        at += size
    if matcher.stopped is None:
        out += matcher.finish()
    assert (out, matcher.stopped) == (expected, found)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def test_stream_gives_out_text_and_stops_across_tokens():
    pieces = []
    stream = TextStream(SMALL, ["at o"], pieces.append)
    tokens = SMALL.encode("the cat sat on the mat")
    ended = [stream(TextCommit((t,), (), None)) for t in tokens]
    assert stream.text == "the cat s" and stream.stopped == "at o" and any(ended)
    assert pieces[ended.index(True)].finish_reason == "stop"
    whole = TextStream(SMALL, ["mats"])
    assert not whole(TextCommit(tuple(tokens), (), "length"))
    assert whole.text == "the cat sat on the mat" and whole.stopped is None


def test_the_engine_ends_at_a_stop_string():
    """Through a real request: the stop string may begin in one token and end in the next."""
    model = drawn_model(3)
    backend = Backend(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    tokenizer = Tokenizer(backend, {})
    engine = Engine(text=model, config=EngineConfig(kv_bytes=2**20))
    params = SamplingParams(seed=5, max_tokens=20)
    prompt = np.array([1, 2, 3])
    tokens = engine.run(TextRequest(prompt, params)).tokens.tolist()
    text = tokenizer.decode(tokens)
    middle = text.index(f"w{tokens[9]} w{tokens[10]}")
    stop = text[middle + 1 : middle + 5]
    stream = TextStream(tokenizer, [stop])
    answer = engine.run(TextRequest(prompt, params, on_commit=stream))
    assert answer.finish_reason == "stop"
    assert stream.text == text[: text.index(stop)]


CHATML = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('role ' ~ m.role) }}{% endif %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}"
    "{% if loop.index0 > 3 %}{% break %}{% endif %}"
    "{% generation %}{{ m['content'] | trim }}{% endgeneration %}{% endfor %}"
)
TALK = [{"role": "user", "content": " hi <b> "}, {"role": "assistant", "content": "yes"}]


def test_chat_templates_equal_transformers():
    """transformers' own renderer, on templates with tools, loop controls and generation blocks."""
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    tools = [{"type": "function", "function": {"name": "ü", "parameters": {"a": "<x>"}}}]
    for template in (CHATML, TOOLS):
        for prompt in (True, False):
            theirs, _ = utilities.render_jinja_template(
                conversations=[TALK],
                chat_template=template,
                tools=tools,
                add_generation_prompt=prompt,
                bos_token="<s>",
            )
            ours = render_chat(template, TALK, {"bos_token": "<s>"}, prompt, tools=tools)
            assert ours == theirs[0]


@pytest.mark.parametrize(
    "template, message",
    [
        (CHATML, "role tool"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|undefined"),
        ("{{ messages.append(1) }}", "append.* is unsafe"),
        ("{{ range(100000000) | list }}", "Range too big"),
        ("{% for %}", "Expected an expression"),
    ],
)
def test_templates_that_misbehave_are_refused(template, message):
    with pytest.raises(ChatTemplateError, match=message):
        render_chat(template, [{"role": "tool", "content": "x"}], {})


def test_loading_a_folder(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    SMALL.backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).chat_template is None
    fields = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "chat_template": [{"name": "default", "template": "A"}, {"name": "rag", "template": "B"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    loaded = load_tokenizer(tmp_path)
    assert loaded.special == {"bos_token": "<s>", "eos_token": "</s>"}
    assert loaded.chat_template == "A" and loaded.encode("the cat") == SMALL.encode("the cat")
    assert loaded.token("the") == SMALL.token("the") and loaded.token("<no>") is None
    (tmp_path / "chat_template.jinja").write_text("C")
    assert load_tokenizer(tmp_path).chat_template == "C"


def test_gpt2_reference_tokens():
    folder = DATA / "tokenizer-gpt2"
    if not folder.is_dir():
        pytest.skip(f"NO REFERENCE DATA at {folder}: this test did not run")
    assert load_tokenizer(folder).encode("Hello world") == [15496, 995]
