"""Drawn tokenizer folders of four families, in which any file may name a fact."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
NAMES = tuple(f"{name}_token" for name in NAMES)
WORDS = ["a", "b", "ab", "n't", "'s", "'", ".", ",", "!", "x", "é", "日", "on", "ce"]
TEMPLATE = (
    "|".join(f"{{{{ {name} }}}}" for name in (*NAMES, "image_token")) + "{{ messages[0].content }}"
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PARTS = [
    "a",
    "b",
    "ab",
    " ",
    "  ",
    "é",
    "日",
    "😀",
    "n't",
    " 's",
    "'",
    ".",
    "\n",
    "<cls>",
    "<x>",
    "once",
]


def byte_level(random):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("Ġ", "ab"), ("o", "n"), ("Ġ", "Ġ")]
    tokens = ["<unk>", *alphabet, *("".join(merge) for merge in merges)]
    made = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(random.integers(2)))
    made.decoder = decoders.ByteLevel()
    return made


def sentence_piece(random):
    tokens = ["<unk>", *BYTES, "▁", *WORDS, *(f"▁{word}" for word in WORDS[:4]), "▁▁"]
    merges = [("a", "b"), ("▁", "a"), ("▁", "ab"), ("▁", "▁")]
    numbers = {token: n for n, token in enumerate(dict.fromkeys(tokens))}
    made = Tokenizer(models.BPE(numbers, merges, unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if random.integers(2):
        spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        made.normalizer = normalizers.Sequence(spaces)
    else:
        scheme = str(random.choice(["first", "always", "never"]))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        if random.integers(2):
            steps = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)]
    strip = int(random.integers(3))
    if strip and len(steps) == 3:
        steps.append(decoders.Strip(" ", strip, 0))
    made.decoder = decoders.Sequence(steps)
    return made


def unigram(random):
    tokens = ["<unk>", "▁", *WORDS, *(f"▁{word}" for word in WORDS), "▁▁"]
    falls_back = bool(random.integers(2))
    tokens += BYTES if falls_back else []
    scores = [(token, -1.0 - n / 10) for n, token in enumerate(dict.fromkeys(tokens))]
    made = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=falls_back))
    scheme = str(random.choice(["first", "always", "never"]))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return made


def word_piece(random):
    letters = [*WORDS, *"abcdefgh!?"]
    tokens = ["<unk>", *letters, *(f"##{word}" for word in letters)]
    numbers = {token: n for n, token in enumerate(dict.fromkeys(tokens))}
    made = Tokenizer(models.WordPiece(numbers, unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer(lowercase=bool(random.integers(2)))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=bool(random.integers(2)))
    return made


FAMILIES = {one.__name__: one for one in (byte_level, sentence_piece, unigram, word_piece)}


def draw_flags(random):
    names = ("lstrip", "rstrip", "single_word", "normalized", "special")
    return {name: bool(random.random() < 0.4) for name in names}


def write_folder(folder, family, random):
    """Writes a folder in which the facts about special and added tokens stand in any file."""
    made = FAMILIES[family](random)
    if random.integers(2):
        made.add_tokens([AddedToken("<s>", special=True), AddedToken("<x>", **draw_flags(random))])
        if random.integers(2):
            number = made.token_to_id("<s>")
            made.post_processor = TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", number)])
    made.save(str(folder / "tokenizer.json"))
    size = made.get_vocab_size()
    config, mapped, listed = {}, {}, {}
    new = [f"<new{n}>" for n in range(3)] + ["▁<é>", "Ġnew"]
    new = list(random.permutation(new))[: random.integers(5)]
    if random.integers(2):  # as transformers 4 and 5 write it
        there = made.get_added_tokens_decoder()
        config["added_tokens_decoder"] = {
            str(number): {"content": str(token), **draw_flags(random)}
            for number, token in there.items()
            if random.integers(2)
        } | {str(size + n): {"content": token, **draw_flags(random)} for n, token in enumerate(new)}
    elif random.integers(2):
        listed = {token: size + n for n, token in enumerate(new)}
    contents = ["<s>", "<x>", "a", "b", "<cls>", "<pad>", "<unk>", *new]
    for fields in (config, mapped):
        for name in NAMES:
            if random.random() < 0.4:
                content = str(random.choice(contents))
                flags = {"content": content, **draw_flags(random)}
                if fields is config:
                    flags["__type"] = "AddedToken"
                elif name == "eos_token" and {name, "added_tokens_decoder"} & config.keys():
                    continue  # one of the two would not be read, and may be no token
                fields[name] = content if random.integers(2) else flags
    if random.integers(2):
        config["image_token"] = "<image>"
    field = str(random.choice(["extra_special_tokens", "additional_special_tokens"]))
    place = random.integers(4)
    if place == 0:
        config[field] = ["<e1>", {"content": "<e2>", **draw_flags(random), "__type": "AddedToken"}]
    elif place == 1:
        config["extra_special_tokens"] = {"image_token": "<e3>"}
    elif place == 2:
        mapped[field] = ["<e1>", "<x>"]
    config[str(random.choice(["add_bos_token", "add_eos_token", "add_prefix_space"]))] = True
    config["clean_up_tokenization_spaces"] = bool(random.integers(2))
    config["split_special_tokens"] = bool(random.random() < 0.1)
    templates = [{"name": "rag", "template": "R"}, {"name": "default", "template": TEMPLATE}]
    place = random.integers(4)
    if place == 0:
        config["chat_template"] = TEMPLATE
    elif place == 1:
        config["chat_template"] = templates
    else:
        config["chat_template"] = "config"
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    if place == 3:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    for name, fields in (
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", mapped),
        ("added_tokens.json", listed),
    ):
        if fields:
            (folder / name).write_text(json.dumps(fields))


def draw_text(random):
    return "".join(random.choice(PARTS) for _ in range(random.integers(12)))
