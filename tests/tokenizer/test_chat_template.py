"""Chat templates: what models' templates use works, what a sandbox must refuse is refused."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from recserve.tokenizer import chat_template
from recserve.tokenizer.chat_template import ChatTemplate
from recserve.tokenizer.template_sandbox import TemplateError

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is false %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}
"""
# On a busy machine, the clock ends a template before its second of processor time is over.
ENDED = (TemplateError, chat_template.TemplateTimeout)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi <b> "}]


def test_a_chatml_template():
    template = ChatTemplate(CHATML, {"eos_token": "</s>"})
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    user = "<|im_start|>user\nHi <b><|im_end|>\n"
    assert template.render(MESSAGES) == f"{system}{user}<|im_start|>assistant\n"
    assert template.render(MESSAGES, answer_follows=False) == system + user
    quick = template.render(MESSAGES, {"enable_thinking": False})
    assert quick.endswith("<|im_start|>assistant\n<think></think>")


def test_what_templates_of_the_families_use():
    source = (
        "{% set ns = namespace(first=true) %}{% for m in messages %}{% if loop.index0 == 1 %}"
        "{% break %}{% endif %}{{ bos_token }}{{ m | tojson }}{{ m.content.split(' ')[0] }}"
        "{% endfor %}{{ strftime_now('%Y') | length }}{{ tools is none }}"
    )
    text = ChatTemplate(source, {"bos_token": "<s>"}).render(
        [{"role": "user", "content": "é x"}, {}]
    )
    assert text == '<s>{"role": "user", "content": "é x"}é4True'


BLOCKS = (
    "{{ bos_token }}{% for m in messages %}{% if loop.index0 > 3 %}{% break %}{% endif %}"
    "{% generation %}{{ m['content'] | trim }}{{ m | tojson }}{% endgeneration %}{% endfor %}"
)


@pytest.mark.parametrize("source", [CHATML, BLOCKS], ids=["chatml", "blocks"])
@pytest.mark.parametrize("answer_follows", [True, False])
def test_equal_to_transformers(source, answer_follows):
    """transformers' own renderer, with loop controls and generation blocks."""
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    theirs, _ = utilities.render_jinja_template(
        conversations=[MESSAGES],
        chat_template=source,
        add_generation_prompt=answer_follows,
        bos_token="<s>",
    )
    ours = ChatTemplate(source, {"bos_token": "<s>"})
    assert ours.render(MESSAGES, answer_follows=answer_follows) == theirs[0]


def test_the_json_of_a_template_has_the_parameters_of_transformers():
    source = (
        "{{ m | tojson(sort_keys=true, separators=(',', ':'), ensure_ascii=true, indent=none) }}"
    )
    source = "{% for m in messages %}" + source + "{% endfor %}"
    turn = {"role": "user", "content": "é", "reasoning_content": "so"}
    expected = '{"content":"\\u00e9","reasoning_content":"so","role":"user"}'
    assert ChatTemplate(source, {}).render([turn]) == expected


def test_settings_replace_neither_messages_nor_special_tokens():
    template = ChatTemplate("{{ bos_token }}{{ messages | length }}", {"bos_token": "<s>"})
    assert template.render([{}], {"messages": [1, 2], "bos_token": "x"}) == "<s>1"


def test_a_template_may_refuse_messages():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(TemplateError, match="roles must alternate"):
        template.render([])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ messages[5].content.strip() }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{% include 'other' %}",
    ],
)
def test_the_sandbox_refuses(source):
    with pytest.raises(TemplateError) as caught:
        print(repr(ChatTemplate(source, {}).render([{"content": "x"}])))
    assert "Traceback" not in str(caught.value)


def test_damage_is_found_when_loading():
    with pytest.raises(TemplateError, match="does not parse"):
        ChatTemplate("{% for %}", {})


def test_output_is_bounded(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_PROMPT_CHARACTERS", 100)
    with pytest.raises(TemplateError, match="over 100"):
        ChatTemplate("{% for i in range(99999) %}xx{% endfor %}", {}).render([])


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", {}),
        ("{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}", {"n": 30000}),
        ("{{ strftime_now('%Y' * 10 ** 8) }}", {}),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
            "{{ f(40) }}",
            {},
        ),
        ("{{ ('a' * 3000) | replace('a', 'b' * 3000) | replace('b', 'c' * 3000) | length }}", {}),
    ],
    ids=["loops", "argument", "strftime", "macro", "replace"],
)
def test_time_is_bounded(monkeypatch, source, settings):
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.1)
    bounds = "more than 0.1 s|cannot be applied|too much memory|not applied within"
    with pytest.raises(ENDED, match=bounds):
        ChatTemplate(source, {}).render([], settings)
    monkeypatch.undo()
    assert ChatTemplate(CHATML, {}).render(MESSAGES)  # the next one is rendered


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 3000000000 }}",
        "{{ 'x' | center(10 ** 10) }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}"
        "{% endfor %}",
        "{{ (range(99999) | list) * 100000 }}",
    ],
    ids=["times", "center", "doubling", "lists"],
)
def test_memory_is_bounded(source):
    with pytest.raises(ENDED):
        ChatTemplate(source, {}).render([])
    assert ChatTemplate(CHATML, {}).render(MESSAGES)


def test_a_renderer_that_was_killed_is_started_again():
    template = ChatTemplate(CHATML, {})
    expected = template.render(MESSAGES)
    for renderer in chat_template._renderers()._idle:
        renderer._process.kill()
        renderer._process.wait()
    assert template.render(MESSAGES) == expected


@pytest.fixture
def stopped():
    """Processes that get no processor time, as on a busy machine; the only idle ones there are."""
    ChatTemplate(CHATML, {})  # starts one
    processes = [one._process for one in chat_template._renderers()._idle]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    yield processes
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("size", [1, 1 << 20], ids=["short", "longer than a pipe"])
@pytest.mark.parametrize("bound", ["clock", "deadline"])
def test_time_is_bounded_by_the_clock(stopped, monkeypatch, bound, size):
    template = ChatTemplate.__new__(ChatTemplate)
    template._template = {"source": "{{ messages[0].content }}", "special": {}}
    messages = [{"content": "x" * size}]
    deadline_s = time.monotonic() + 0.2 if bound == "deadline" else None
    if bound == "clock":
        monkeypatch.setattr(chat_template, "MAX_WAIT_S", 0.2)
    for _ in stopped:
        with pytest.raises(chat_template.TemplateTimeout, match="not applied within"):
            template.render(messages, deadline_s=deadline_s)
    monkeypatch.undo()
    assert template.render(messages) == "x" * size


def test_a_template_that_does_not_end_holds_no_other_one(stopped, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_WAIT_S", 60.0)
    with ThreadPoolExecutor(len(stopped)) as pool:
        template = ChatTemplate.__new__(ChatTemplate)
        template._template = {"source": CHATML, "special": {}}
        held = [pool.submit(template.render, MESSAGES) for _ in stopped]
        while chat_template._renderers()._idle:
            time.sleep(0.01)
        text = template.render(MESSAGES)
        assert not any(one.done() for one in held)
        for process in stopped:
            process.send_signal(signal.SIGCONT)
        assert {one.result(60) for one in held} == {text}


def test_many_threads_share_the_renderer():
    template = ChatTemplate("{{ messages[0].content }}", {})
    with ThreadPoolExecutor(8) as pool:
        texts = [f"{i} \u2028 é \n" * 50 for i in range(100)]
        assert list(pool.map(lambda t: template.render([{"content": t}]), texts)) == texts
