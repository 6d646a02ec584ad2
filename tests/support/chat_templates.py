"""Chat templates with calls of tools, in the forms of Hermes, Llama 3.x and Qwen3-Coder."""

_TURNS = (
    "{%- for m in messages %}{{ m.role }}: {{ m.content }}"
    "{%- for c in m.tool_calls or [] %}CALL{% endfor %}\n{% endfor -%}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_TOOLS = "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"

TEMPLATES = {
    "hermes": _TOOLS
    + _TURNS.replace(
        "CALL",
        '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
        "{{ c.function.arguments | tojson }}}\n</tool_call>",
    ),
    "llama": _TOOLS
    + _TURNS.replace(
        "CALL",
        '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}',
    )
    + "{# ipython #}",
    "qwen_coder": _TOOLS
    + _TURNS.replace(
        "CALL",
        "<tool_call>\n<function={{ c.function.name }}>\n"
        "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n"
        "{% endfor %}</function>\n</tool_call>",
    ),
}
# Behind a template of a model that thinks.
THINKS = "{# <think></think> #}"

_RESULTS = (
    "{%- if m.role == 'tool' -%}"
    "{%- if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user{% endif -%}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif -%}"
)
_CHATML = (
    "{%- if tools %}<|im_start|>system\nFunctions:\nTOOLS\nCall one as in EXAMPLE<|im_end|>\n"
    "{% endif -%}{%- for m in messages -%}" + _RESULTS + "{%- else -%}"
    "<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] -%}"
    "{%- if m.content or not loop.first %}{{ '\n' }}{% endif -%}CALL"
    "{%- endfor -%}<|im_end|>\n{% endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)
# What the templates of published models do, in own words: tools in the first turn, calls of the
# assistant behind its content, results as turns of the user, of which neighbours are one.
PUBLISHED = {
    "hermes": _CHATML.replace(
        "TOOLS", "<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools>"
    )
    .replace("EXAMPLE", '<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>')
    .replace(
        "CALL",
        '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
        "{% if c.function.arguments is string %}{{ c.function.arguments }}"
        "{% else %}{{ c.function.arguments | tojson }}{% endif %}}\n</tool_call>",
    ),
    "qwen_coder": _CHATML.replace(
        "TOOLS",
        "{% for t in tools %}{% set f = t.function %}<function>\n<name>{{ f.name }}</name>"
        "{% for k, v in (f.parameters.properties or {}).items() %}"
        "\n<parameter>\n<name>{{ k }}</name>\n<type>{{ v.type }}</type>\n</parameter>{% endfor %}"
        "\n</function>\n{% endfor %}",
    )
    .replace("EXAMPLE", "<tool_call>\n<function=NAME>\n</function>\n</tool_call>")
    .replace(
        "CALL",
        "<tool_call>\n<function={{ c.function.name }}>\n"
        "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n"
        "{% if v is string %}{{ v }}{% else %}{{ v | tojson }}{% endif %}\n</parameter>\n"
        "{% endfor %}</function>\n</tool_call>",
    ),
    "llama": "{%- for m in messages -%}"
    "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>"
    "{{ '\n\n' }}"
    "{%- if tools and loop.first %}Answer with "
    '{"name": NAME, "parameters": OBJECT} to call one of these.\n'
    "{% for t in tools %}{{ t | tojson }}\n\n{% endfor %}{% endif -%}"
    "{%- if m.tool_calls -%}"
    "{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call in a turn') }}{% endif -%}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}"
    "{%- else %}{{ m.content }}{% endif -%}<|eot_id|>{%- endfor -%}"
    "{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>"
    "{{ '\n\n' }}{% endif -%}",
}
# What stands before and behind a turn of the assistant.
AROUND_TURNS = {
    "hermes": ("<|im_start|>assistant\n", "<|im_end|>"),
    "qwen_coder": ("<|im_start|>assistant\n", "<|im_end|>"),
    "llama": ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
}
