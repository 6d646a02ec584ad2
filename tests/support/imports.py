"""Imports of the recommenders that other projects leave, and the scores that they should have."""

import json

from recserve.formats.checkpoint_format import ImportOptions
from recserve.schemas.items import Exclusions
from recserve.service import Service, ServiceOptions
from tests.support.foreign_recommenders import all_scores

KEEP = Exclusions(seen=False)
SYSTEM = "\u4f60\u662f\u63a8\u8350\u7cfb\u7edf\u3002"
USER = ("\u7528\u6237\u770b\u8fc7\uff1a", "\u3002\u63a5\u4e0b\u6765\uff1f")
TEMPLATE = "Bought: {{ history | join(' ') }}\n{% if not history %}none{% endif %}Next: "
PART_1 = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request. \n\n### Instruction:\n"
    "Can you predict the next possible item that the user may expect?\n\n"
)
PART_2 = (
    "### User Input: \nCan you predict the next possible item the user may expect, given the "
    "following chronological interaction history: {}\n\n### Response:\n"
)

LC_REC = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\nThe user has interacted with items {} in chronological "
    "order. Can you predict the next possible item that the user may expect?\n\n### Response:"
)


def quiet(line):
    pass


def options(data, root, name, **changes):
    """Returns the options of an import by one format."""
    (root / "ids.index.json").write_text(json.dumps(data.ids))
    (root / "prompt.jinja").write_text(TEMPLATE)
    given = {"folder": data.folder, "items": data.items, "ids": root / "ids.index.json"}
    given |= {"out": root / "bundle", "format": name, "events": data.events, "max_history": 8}
    if name == "openonerec":
        given |= packed(data, root)
    if name == "generic":
        given |= {"id_format": "<a_{}><b_{}><c_{}>", "prompt": root / "prompt.jinja"}
    return ImportOptions(**{**given, **changes})


def packed(data, root):
    """Writes the packed map and the messages of OpenOneRec; returns their options."""
    found = {}
    for item, texts in data.ids.items():
        a, b, c = (int(text.rpartition("_")[2][:-1]) for text in texts)
        count = int(item) % 7
        own = {"pid": int(item), "count": 9, "count_after_downsample": count}
        found.setdefault(str((a * 8192 + b) * 8192 + c), []).append(own)
    (root / "sid2pid.json").write_text(json.dumps(found))
    parts = [{"type": "text", "text": USER[0]}, {"type": "text", "text": "{history}" + USER[1]}]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": parts}]
    (root / "messages.json").write_text(json.dumps(messages))
    return {"ids": root / "sid2pid.json", "prompt": root / "messages.json"}


def opened(root, bundle):
    return Service.open(
        bundle, f"lmdb:{root}/store", "cpu", ServiceOptions(journal=root / "journal")
    )


def prompt_of(data, name, history):
    """Returns the tokens of a prompt, as the original makes them."""
    tokenizer, ids = data.tokenizer, ["".join(data.ids[item]) for item in history]
    if name == "generic":
        none = "" if ids else "none"
        return tokenizer.encode(f"Bought: {' '.join(ids)}\n{none}Next: ")
    if name == "openonerec":
        shown = "".join(f"<|sid_begin|>{one}<|sid_end|>" for one in ids)
        return tokenizer.encode(
            f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{USER[0]}{shown}{USER[1]}"
            "/no_think<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n<|sid_begin|>",
            add_special_tokens=False,
        )
    if name == "lc-rec":
        return tokenizer.encode(LC_REC.format(", ".join(ids)))
    tokens = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    for part in (PART_1, PART_2.format(", ".join(ids))):
        own = tokenizer.encode(part)
        tokens += own[own[0] == tokenizer.bos_token_id :]
    return tokens


def expected(data, name, rule, history, model, temperature=1.0, length_penalty=None, ends=True):
    """Returns the score of each item's id by item id."""
    power = float(name == "lc-rec") if length_penalty is None else length_penalty
    tokenizer = data.tokenizer
    numbers = {i: tuple(tokenizer.convert_tokens_to_ids(texts)) for i, texts in data.ids.items()}
    levels = [tokenizer.convert_tokens_to_ids(level) for level in data.level_tokens]
    ending = ()
    if name == "minionerec" and rule == "vocabulary" and ends:
        ending = (*tokenizer.encode("\n", add_special_tokens=False), tokenizer.eos_token_id)
    if name == "lc-rec" and rule == "vocabulary" and ends:
        ending = (tokenizer.eos_token_id,)
    prompt = prompt_of(data, name, history)
    scores = all_scores(
        model, prompt, list(numbers.values()), levels, rule, ending, temperature, power
    )
    return {item: scores[one] for item, one in numbers.items()}
