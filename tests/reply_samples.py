"""Replies with tool calls as models write them, by parser: text, content, and the calls that are in it."""
from __future__ import annotations

from isthmus.core.parsers.contract import Tool

TOOLS = {tool.name: tool for tool in (
    Tool("get_weather", {"type": "object", "properties": {
        "city": {"type": "string"}, "unit": {"type": "string", "enum": ["C", "F"]}, "days": {"type": "integer"}},
        "required": ["city"]}),
    Tool("write_file", {"type": "object", "properties": {
        "path": {"type": "string"}, "text": {"type": "string"}, "lines": {"type": "array",
        "items": {"type": "integer"}},
        "options": {"type": "object"}, "force": {"type": "boolean"}},
        "required": ["path", "text"]}),
    Tool("ping", {}))}

OSLO = ("get_weather", {"city": "Oslo"})
ROME = ("get_weather", {"city": "Rome", "unit": "C", "days": 3})
CODE = 'def f(a):\n    return "</tool_call>" + a[0]  # "quoted" \\n {x}\n'
FILE = ("write_file", {"path": "a.py", "text": CODE, "lines": [1, 2], "options": {"a": {"b": None}}, "force": True})
PING = ("ping", {})

_ARGUMENTS = r'"path": "a.py", "text": "def f(a):\n    return \"</tool_call>\" + a[0]  # \"quoted\" \\n {x}\n", ' \
    '"lines": [1, 2], "options": {"a": {"b": null}}, "force": true'
_XML = "def f(a):\n    return \"</tool_call>\" + a[0]  # \"quoted\" \\n {x}\n"
_ROME = '"city": "Rome", "unit": "C", "days": 3'
_DS = ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
       "<\uff5ctool\u2581call\u2581end\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>")
_KIMI = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
         "<|tool_calls_section_end|>")
_DSML = "\uff5cDSML\uff5c"


def _invoke(prefix: str, group: str) -> str:
    return (f'Sure.\n\n<{prefix}{group}>\n<{prefix}invoke name="get_weather">\n<{prefix}parameter name="city" '
        f'string="true">'
            f'Rome</{prefix}parameter>\n<{prefix}parameter name="unit" string="true">C</{prefix}parameter>\n'
            f'<{prefix}parameter name="days" string="false">3</{prefix}parameter>\n</{prefix}invoke>\n'
            f'<{prefix}invoke name="ping">\n</{prefix}invoke>\n</{prefix}{group}>')


SAMPLES: list[tuple[str, str, str, list[tuple[str, dict]]]] = [
    ("hermes", 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {' + _ROME
    + '}}\n</tool_call>\n<tool_call>\n'
     '{"name": "write_file", "arguments": {' + _ARGUMENTS + '}}\n</tool_call>', "Let me see.", [ROME, FILE]),
    ("hermes", '<tool_call>{"arguments": {"city": "Oslo"}, "name": "get_weather"}</tool_call>', "", [OSLO]),
    ("hermes", '<tool_call>{"name": "ping"}', "", [PING]),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}\n</tool_call>', "",
    [OSLO]),
    ("cohere", '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": '
    '"Oslo"}},\n'
     ' {"tool_call_id": "1", "tool_name": "ping", "parameters": {}}\n]<|END_ACTION|>', "", [OSLO, PING]),
    ("apertus", '<|tools_prefix|>[{"get_weather": {"city": "Oslo"}}, {"ping": {}}]<|tools_suffix|>', "", [OSLO, PING]),
    ("phi4", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]<|/tool_call|>', "", [OSLO]),
    ("qwen3-coder", "I write "
    "it.\n<tool_call>\n<function=write_file>\n<parameter=path>\na.py\n</parameter>\n<parameter=text>\n"
     + _XML + '\n</parameter>\n<parameter=lines>\n[1, 2]\n</parameter>\n<parameter=options>\n{"a": {"b": '
         'null}}\n</parameter>\n'
     "<parameter=force>\nTrue\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=ping>\n</function>\n"
     "</tool_call>", "I write it.", [FILE, PING]),
    ("qwen3-coder", "<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>", "",
    [OSLO]),
    ("functionary", '<function=get_weather>{"city": "Oslo"}</function>', "", [OSLO]),
    ("glm", "Fine.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>unit</arg_key"
    "><arg_value>C"
     "</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>ping</tool_call>", "Fine.",
     [ROME, PING]),
    ("glm", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>", "", [OSLO]),
    ("deepseek-dsml", _invoke(_DSML, "tool_calls"), "Sure.", [ROME, PING]),
    ("deepseek-dsml", _invoke(_DSML, "function_calls"), "Sure.", [ROME, PING]),
    ("minimax", _invoke("", "minimax:tool_call"), "Sure.", [ROME, PING]),
    ("deepseek", f'Ok{_DS[0]}{_DS[1]}function{_DS[2]}get_weather\n```json\n{{{_ROME}}}\n```{_DS[3]}\n{_DS[1]}'
     f"function{_DS[2]}ping\n```json\n{{}}\n```{_DS[3]}{_DS[4]}", "Ok", [ROME, PING]),
    ("deepseek-v31", f'Ok{_DS[0]}{_DS[1]}get_weather{_DS[2]}{{{_ROME}}}{_DS[3]}{_DS[1]}ping{_DS[2]}{{}}{_DS[3]}'
     f"{_DS[4]}", "Ok", [ROME, PING]),
    ("kimi", f"Ok{_KIMI[0]}{_KIMI[1]}functions.get_weather:0{_KIMI[2]}{{{_ROME}}}{_KIMI[3]}{_KIMI[1]}functions.ping:1"
     f"{_KIMI[2]}{{}}{_KIMI[3]}{_KIMI[4]}", "Ok", [ROME, PING]),
    ("mistral", 'Ok[TOOL_CALLS]get_weather[ARGS]{' + _ROME + '}[TOOL_CALLS]ping[ARGS]{}', "Ok", [ROME, PING]),
    ("mistral", '[TOOL_CALLS]get_weather{"city": "Oslo"}', "", [OSLO]),
    ("mistral", '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Oslo"}', "", [OSLO]),
    ("mistral-list", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {' + _ROME
    + '}}, {"name": "ping", "arguments": {}}]',
     "", [ROME, PING]),
    ("llama3-json", '{"name": "get_weather", "parameters": {"city": "Oslo"}}', "", [OSLO]),
    ("llama3-json", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}; {"name": "ping", '
    '"parameters": {}}',
     "", [OSLO, PING]),
    ("json", '```json\n[{"name": "get_weather", "arguments": {"city": "Oslo"}}]\n```', "", [OSLO]),
    ("pythonic", "[get_weather(city='Rome', unit=\"C\", days=3), ping()]", "", [ROME, PING]),
    ("pythonic", 'Ok <|tool_call_start|>[write_file(path="a.py", text=' + repr(CODE)
    + ", lines=[1, 2], options={'a': {'b': "
     "None}}, force=True)]<|tool_call_end|>", "Ok", [FILE]),
    ("pythonic", '<function_calls>\nget_weather(city="Oslo")\nping()\n</function_calls>', "", [OSLO, PING]),
    ("gemma4", 'Ok<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:3,unit:<|"|>C<|"|>}<tool_call|><|tool_ca'
    'll>call:ping{}'
     "<tool_call|>", "Ok", [ROME, PING]),
    ("gemma4", '<|tool_call>call:write_file{path:<|"|>a.py<|"|>,text:<|"|>' + CODE
    + '<|"|>,lines:[1,2],options:{<|"|>a<|"|>:{b:'
     "null}},force:true}<tool_call|>", "", [FILE]),
    ("functiongemma", "<start_function_call>call:get_weather{city:<escape>Oslo<escape>}<end_function_call>", "",
    [OSLO]),
    ("harmony", '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>',
    "", [OSLO]),
    ("harmony", '<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant '
    'to=functions.get_weather<|channel|>'
     'commentary json<|message|>{"city": "Oslo"}', "Let me look.", [OSLO]),
]

# What is no call: comes back as content, whole.
BROKEN: list[tuple[str, str]] = [
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os'),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {city: Oslo}}\n</tool_call>'),
    ("hermes", "<tool_call>\nget_weather\n</tool_call> <tool"),
    ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999999}}</tool_call>'.replace("1e999999", "NaN")),
    ("cohere", '<|START_ACTION|>[]<|END_ACTION|>'),
    ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n"),
    ("qwen3-coder", "<tool_call>\nfunction=f"),
    ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1"),
    ("deepseek-dsml", f'<{_DSML}tool_calls>\n<{_DSML}invoke name="f">\n<{_DSML}parameter name="a">1'),
    ("mistral", "[TOOL_CALLS]f[ARGS]{"),
    ("mistral-list", '[TOOL_CALLS] [{"name": "f", "arguments": {}}'),
    ("llama3-json", '{"name": "unknown", "parameters": {}}'),
    ("llama3-json", '{"answer": 42}'),
    ("llama3-json", "{ a: 1 }"),
    ("json", "[1, 2, 3]"),
    ("pythonic", "[search(a=1, b=2"),
    ("pythonic", "[ping(1)]"),
    ("pythonic", "[1] is a reference."),
    ("gemma4", '<|tool_call>call:f{a:<|"|>x<tool_call|>'),
]
