"""Writes renderings of chat templates by transformers: crates/arc/tests/golden/text/chat.json.

    ARC_TEST_MODELS=<folder> python chat_goldens.py

Each case: a template (the name of a model whose own it is, or a source), the input of `apply_chat_template`, and the
text it gives, or null where it raises an exception. For model templates also the ids of that text with its control
tokens parsed, by the reference tokenizer.
"""

import json

from transformers.utils.chat_template_utils import render_jinja_template

from tokenizer_goldens import GOLDEN, MODELS, REFERENCES, SMOLLM2, gguf_fields

USER = {"role": "user", "content": "Why is the sky blue?"}
TURNS = [
    {"role": "system", "content": "You are terse.\n"},
    {"role": "user", "content": "  Hi! Ünïcödé 😀 'quotes' \"double\" <b>&amp;</b>\n\n"},
    {"role": "assistant", "content": "\nHello. How can I help?  "},
    {"role": "user", "content": "Count: 1, 22, 333, 4444.\n\n```py\nprint('x')\n```"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather <now> & \"later\" – 東京",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1, "maximum": 1e-7}},
            "required": ["city"],
            "additionalProperties": False,
            "x": None,
        },
    },
}
TOOL_TURNS = [
    {"role": "user", "content": "Weather in Tōkyō?"},
    {
        "role": "assistant",
        "content": "Let me look.",
        "tool_calls": [
            {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Tōkyō", "days": 2, "f": 1.0}}},
            {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "a\"b\\c\n\t\u007f\u0001é"}}},
        ],
    },
    {"role": "tool", "content": "{\"temp\": 21}"},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "21 °C."},
    {"role": "user", "content": "Thanks"},
]
THINKING = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n4"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "6", "reasoning_content": "Also easy."},
]

# Sources that use what templates in the wild use. `m` is short for the messages.
SOURCES = [
    "{{ true }} {{ false }} {{ none }} {{ 1 }} {{ 1.0 }} {{ 1.5e-7 }} {{ [1, 'a', true, none, 0.5] }} {{ {'a': \"it's\", 'b': {'c': []}} }}",
    "{% set m = messages %}{{ m[0].content }}|{{ m[-1]['content'] | trim }}|{{ m[1:] | length }}|{{ m[::-1][0].role }}|{{ m | length }}",
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ loop.first }} {{ loop.last }} {{ loop.revindex0 }} {{ m.role | upper }} {{ m['role'] | title }}\n{% endfor %}",
    "{%- for m in messages -%}\n  {%- if m.role == 'system' -%}\n    [{{ m.content | trim }}]\n  {%- elif m.role in ['user', 'tool'] -%}\n    <{{ m.content }}>\n  {%- else -%}\n    ({{ m.content.strip() }})\n  {%- endif -%}\n{%- endfor -%}\n{# a comment #}\n",
    "{% for m in messages %}\n    {% if loop.first %}\nfirst\n    {% endif %}\n  {{ m.role }}\n{% endfor %}\nend\n",
    "{% set ns = namespace(n=0, found=false) %}{% for m in messages %}{% if m.role == 'user' and not ns.found %}{% set ns.found = true %}{% set ns.n = loop.index0 %}{% endif %}{% endfor %}{{ ns.n }} {{ ns.found }}",
    "{% macro turn(role, text='x') %}<{{ role }}>{{ text }}</{{ role }}>{% endmacro %}{% for m in messages %}{{ turn(m.role, m.content | trim) }}{% endfor %}{{ turn('end') }}",
    "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role }};{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "{{ 'a,b,,c'.split(',') }} {{ 'a b  c'.split() }} {{ 'abc'.startswith('ab') }} {{ 'abc'.endswith('x') }} {{ ' x '.lstrip() }}| {{ 'xxaxx'.strip('x') }} {{ 'a\\n'.rstrip('\\n') }} {{ 'a-b'.replace('-', '+') }} {{ 'ab'.upper() }} {{ 'Hello World'.lower() }} {{ 'x</think>y'.split('</think>')[-1] }}",
    "{{ {'a': 1, 'b': 2}.items() | list }} {% for k, v in {'x': 1, 'y': [2]}.items() %}{{ k }}={{ v }};{% endfor %} {{ {'a': 1}.get('b', 'none') }} {{ {'a': 1}.keys() | list }}",
    "{{ tools | tojson }}", "{{ tools | tojson(indent=4) }}", "{{ tools[0] | tojson(indent=2) }} {{ [] | tojson(indent=2) }} {{ {} | tojson }} {{ 'é<&>\\'' | tojson }} {{ 'é😀' | tojson(ensure_ascii=true) }}",
    "{% for t in tools or [] %}{% for k, v in t.function.parameters.properties.items() %}{{ k }}: {{ v.type }}{% if v.default is defined %} = {{ v.default }}{% endif %}{{ ', ' if not loop.last }}{% endfor %}{% endfor %}",
    "{% if tools is defined and tools is not none and tools %}T{% else %}N{% endif %}{% if custom is defined %}C{{ custom }}{% endif %}{% if documents %}D{% endif %}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | map('trim') | join(' + ') }} {{ messages | map(attribute='role') | list | join(',') }} {{ (messages | first).role }} {{ (messages | last).role }} {{ messages | rejectattr('role', 'equalto', 'user') | list | length }}",
    "{{ bos_token }}{{ 'a' ~ 1 ~ 'b' }} {{ 'ab' * 3 }} {{ 7 // 2 }} {{ 7 % 3 }} {{ 2 ** 5 }} {{ 7 / 2 }} {{ -3 | abs }} {{ '5' | int + 1 }} {{ 3 == 3.0 }} {{ 'x' in 'xyz' }} {{ 'b' not in {'b': 1} }}{{ eos_token }}",
    "{% if messages[0].role != 'system' %}{{ raise_exception('A system message is needed') }}{% endif %}ok",
    "{% if 'tool_calls' in messages[1] %}{% for c in messages[1].tool_calls %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}{% endif %}{{ messages[1].tool_calls is defined }} {{ messages[0].name is defined }}",
    "{{ messages[0].missing }}|{{ messages[0].content is string }} {{ messages is iterable }} {{ messages[0] is mapping }} {{ 1 is number }} {{ none is none }} {{ messages[0].content | default('d') }} {{ nothing | default('d') }}",
    "{%- set x = 5 if messages else 6 %}{{ x }}{% set a, b = 1, 2 %}{{ a + b }}{% set block %}text {{ x }}{% endset %}[{{ block }}]{% filter upper %}shout{% endfilter %}{% raw %}{{ raw }}{% endraw %}",
    "{% for i in range(3) %}{{ i }}{% else %}none{% endfor %}{% for i in [] %}x{% else %}empty{% endfor %}{{ range(2, 10, 3) | list }}",
    "{{ ' a\\tb\\n' | trim }}|{{ 'aXbX' | replace('X', '-') }}|{{ 'one two' | capitalize }}|{{ 'abc' | reverse }}|{{ [3, 1, 2] | sort }}|{{ 'a\\nb' | indent(2) }}|{{ [1, 2] | max }}|{{ 'abc'[1] }}|{{ 'abcdef'[1:3] }}|{{ 'x' | string }}|{{ {'b': 1, 'a': 2} | dictsort }}",
    "{% set content = messages[0].content %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}{{ content }}",
    "{%+ if true +%}\n x \n{%+ endif %}\n  {{- ' y ' -}}  \nz{{ '\\n' }}\n\n",
    "{{ undefined_thing.attribute }}", "{% if", "{{ messages[0].content | nosuchfilter }}", "{{ 1 / 0 }}",
]


def cases():
    models = {
        "smollm2": ({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}, gguf_fields(SMOLLM2)["chat_template"]),
    }
    for name in ("llama3", "qwen3", "gemma3"):
        config = json.loads((MODELS / name / "tokenizer_config.json").read_text(encoding="utf-8"))
        tokens = {k: config[k] for k in ("bos_token", "eos_token") if config.get(k) is not None}
        models[name] = (tokens, config["chat_template"])
    for name, (tokens, source) in models.items():
        encode = REFERENCES[name]()
        for messages in ([USER], TURNS, TURNS[1:], TURNS[:1], TOOL_TURNS, THINKING):
            for extra in (
                {"add_generation_prompt": True},
                {"add_generation_prompt": False},
                {"add_generation_prompt": True, "tools": [TOOL, TOOL]},
                {"add_generation_prompt": True, "variables": {"enable_thinking": False}},
            ):
                case = {"template": name, **tokens, "messages": messages, **extra}
                yield case, source, encode
    for source in SOURCES:
        for messages in (TURNS, TOOL_TURNS):
            case = {"source": source, "bos_token": "<s>", "messages": messages, "add_generation_prompt": True}
            yield {**case, "tools": [TOOL], "variables": {"custom": [1, "x"]}}, source, None
            yield case, source, None


def render(case, source):
    tokens = {k: case[k] for k in ("bos_token", "eos_token") if k in case}
    try:
        texts, _ = render_jinja_template(
            conversations=[case["messages"]],
            tools=case.get("tools"),
            chat_template=source,
            add_generation_prompt=case["add_generation_prompt"],
            **tokens,
            **case.get("variables", {}),
        )
        return texts[0]
    except Exception:
        return None


if __name__ == "__main__":
    out = []
    for case, source, encode in cases():
        case["text"] = render(case, source)
        if encode and case["text"] is not None:
            case["ids"] = encode(case["text"], True)
        # Messages and tools repeat; the file names them.
        for key, values in (("messages", NAMED_MESSAGES := [[USER], TURNS, TURNS[1:], TURNS[:1], TOOL_TURNS, THINKING]),):
            case[key] = values.index(case[key])
        if "tools" in case:
            case["tools"] = len(case["tools"])
        out.append(case)
    document = {"messages": NAMED_MESSAGES, "tool": TOOL, "cases": out}
    with open(GOLDEN / "chat.json", "w", encoding="utf-8") as file:
        head = ",\n".join(f'"{key}": {json.dumps(document[key], ensure_ascii=False)}' for key in ("messages", "tool"))
        body = ",\n".join(json.dumps(case, ensure_ascii=False, separators=(",", ":")) for case in out)
        file.write("{\n" + head + ',\n"cases": [\n' + body + "\n]\n}\n")
    print(len(out), "cases,", sum(case["text"] is None for case in out), "refused")
