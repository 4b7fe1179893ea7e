"""Short chat templates with the parts that real ones have for tools, written for these tests."""

from __future__ import annotations

# Qwen2.5, Hermes 2 Pro: tools in the system turn, arguments as an object, results in a user turn.
HERMES = """
{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
</tools>
Answer <tool_call>{"name": …, "arguments": …}</tool_call>.<|im_end|>
{% endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + m.role }}
        {%- if m.content %}{{ '\\n' + m.content }}{% endif %}
        {%- for call in m.tool_calls %}
            {%- if call.function is defined %}{% set call = call.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

# Llama 3.1: `tools` may be undefined, a message with the key tool_calls must hold exactly one.
LLAMA3 = """
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{{- '<|begin_of_text|>' }}
{%- if tools is not none %}
    {{- '<|system|>Environment: ipython. Respond with {"name": …, "parameters": …}.' }}
    {%- for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}
{%- endif %}
{%- for m in messages %}
    {%- if 'tool_calls' in m %}
        {%- if not m.tool_calls | length == 1 %}
            {{- raise_exception('only single tool-calls at once') }}
        {%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|assistant|>{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- call.arguments | tojson + '}<|eot_id|>' }}
    {%- elif m.role in ('tool', 'ipython') %}
        {{- '<|ipython|>' }}
        {%- if m.content is mapping or m.content is iterable %}{{ m.content | tojson }}
        {%- else %}{{ m.content }}{% endif %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|' + m.role + '|>' + m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""

_MISTRAL = """
{{- '<s>' }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools is not none and m == users[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.function.items() if key != 'return' %}
                    {%- if value is string %}{{ '"' + key + '": "' + value + '"' }}
                    {%- else %}{{ '"' + key + '": ' + value | tojson }}{% endif %}
                    {%- if not loop.last %}{{ ', ' }}{% endif %}
                {%- endfor %}
                {{- '}}' }}
            {%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + m.content + '[/INST]' }}
    {%- elif m.tool_calls is defined and m.tool_calls is not none %}
        CALLS
    {%- elif m.role == 'tool' %}
        {%- if not m.tool_call_id is defined or m.tool_call_id | length != 9 %}
            {{- raise_exception('ids must have length 9') }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content | string + ', ' }}
        {{- '"call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{ ' ' + m.content + '</s>' }}{% endif %}
{%- endfor %}
"""

# Mistral 7B v0.3: a list of functions with ids of nine characters.
MISTRAL = _MISTRAL.replace(
    "CALLS",
    """{{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- if not call.id is defined or call.id | length != 9 %}
                {{- raise_exception('ids must have length 9') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{ ', ' }}{% endif %}
        {%- endfor %}
        {{- ']</s>' }}""",
)

# Mistral Small 3.2, Devstral, Ministral 3: a name and its arguments for each call.
MISTRAL_ARGS = _MISTRAL.replace(
    "CALLS",
    """{%- for call in m.tool_calls %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}
        {{- '</s>' }}""",
)

QWEN3_CODER = "{{ tools }}<tool_call>\n<function=f>\n<parameter=arguments>"
