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
