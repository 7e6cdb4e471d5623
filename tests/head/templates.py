"""Chat templates written for the tests, in the ways that model families write theirs."""

from __future__ import annotations

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful assistant.<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

# One expression per turn, `|trim` on the content, the first token prepended to the first turn's text.
LLAMA3 = """{%- set loop_messages = messages -%}
{%- for message in loop_messages -%}
    {%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
        + message['content'] | trim + '<|eot_id|>' -%}
    {%- if loop.index0 == 0 -%}{%- set content = bos_token + content -%}{%- endif -%}
    {{- content -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"""

# A namespace, alternation checked with an exception, the system prompt folded into the first user turn.
MISTRAL = """{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}
        {{- raise_exception('After the optional system message, roles must alternate user/assistant') }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {%- if loop.last and system_message is defined %}
            {{- '[INST] ' + system_message + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}"""

# Roles renamed, concatenation with `~`, a macro, a block assignment.
GEMMA = """{{ bos_token }}
{%- macro turn(role, content) -%}
<start_of_turn>{{ role }}
{{ content | trim }}<end_of_turn>
{% endmacro -%}
{%- if messages[0].role == 'system' -%}
    {%- set first -%}{{ messages[0].content }}

{% endset -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set first = '' -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- set role = 'model' if message.role == 'assistant' else message.role -%}
    {{- turn(role, (first if loop.first else '') ~ message.content) -}}
{%- endfor -%}
{%- if add_generation_prompt -%}<start_of_turn>model
{% endif -%}"""

# Full-width bars, history stripped of its reasoning by splitting, a dictionary of marks, loop controls.
DEEPSEEK = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set marks = {'user': '<｜User｜>', 'assistant': '<｜Assistant｜>'} -%}
{%- set ns = namespace(system='', is_first=true) -%}
{%- for message in messages -%}
    {%- if message['role'] != 'system' -%}{%- continue -%}{%- endif -%}
    {%- if ns.is_first -%}{%- set ns.system = message['content'] -%}{%- set ns.is_first = false -%}
    {%- else -%}{%- set ns.system = ns.system + '\\n\\n' + message['content'] -%}{%- endif -%}
{%- endfor -%}
{{- bos_token }}{{ ns.system }}
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}{%- continue -%}{%- endif -%}
    {%- set content = message['content'] -%}
    {%- if message['role'] == 'assistant' and '</think>' in content -%}
        {%- set content = content.split('</think>')[-1].strip() -%}
    {%- endif -%}
    {{- marks[message['role']] }}{{ content }}
    {%- if message['role'] == 'assistant' -%}{{ '<｜end▁of▁sentence｜>' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<｜Assistant｜>' + '<think>\\n' -}}{%- endif -%}"""

# The role inside the control token, `generation` marks for training, a date.
PHI = """{%- for message in messages -%}
{%- if loop.first -%}{{ '<|system|>' ~ 'Today is ' ~ strftime_now('%d %b %Y') ~ '.' ~ '<|end|>' }}{%- endif -%}
{{ '<|' + message['role'] + '|>' }}{% generation %}{{ message['content'] }}{% endgeneration %}{{ '<|end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"""

ALL = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "deepseek": DEEPSEEK,
    "phi": PHI,
}
