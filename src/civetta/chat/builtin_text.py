"""The chat format of the model as Jinja text with our own wording (model.md A.10).

`BUILTIN_TEMPLATE` is embedded in checkpoints trained here; builtin.py says the same in Python and a
test holds the two to each other. The sentences on effort and tools are this project's own: files of
the published model bring theirs.
"""

from __future__ import annotations

import re

EFFORT_SENTENCES = {
    "xhigh": "Reasoning effort: xhigh. Think carefully and check your work before you answer.",
    "medium": "",
    "low": "Reasoning effort: low. Think briefly, then answer.",
}
TOOLS_HEAD = "# Tools\n\nThese functions can be called:\n\n<tools>"
TOOLS_TAIL = (
    "\n</tools>\n\nTo call a function, end the reply with a block of this form:\n\n"
    "<tool_call>\n<function=name_of_function>\n<parameter=name_of_parameter>\nvalue, which may"
    " take\nseveral lines\n</parameter>\n</function>\n</tool_call>\n\n"
    "Every required parameter must be given. Text may stand before a call but not after it."
    " When no function fits, answer without one and do not mention functions."
)
IMAGE_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO_TEXT = "<|vision_start|><|video_pad|><|vision_end|>"

NO_MESSAGES = "There are no messages."
NO_QUERY = "There is no user query in the messages."
BAD_ROLE = "A message has an unknown role."
SYSTEM_LATE = "A system message must be the first message."
SYSTEM_MEDIA = "A system message cannot hold images or videos."
BAD_PART = "A message part is neither text nor image nor video."
BAD_EFFORT = "The reasoning effort must be xhigh, medium or low."


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


_JINJA = """\
{%- set seen = namespace(images=0, videos=0, query=-1) %}
{%- macro flat(content, counted) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content %}
        {%- for part in content %}
            {%- if part.type == 'text' %}
                {{- part.text }}
            {%- elif part.type == 'image' %}
                {%- if counted %}
                    {%- set seen.images = seen.images + 1 %}
                    {%- if add_vision_id %}
                        {{- 'Picture ' ~ seen.images ~ ': ' }}
                    {%- endif %}
                {%- endif %}
                {{- @IMAGE_TEXT@ }}
            {%- elif part.type == 'video' %}
                {%- if counted %}
                    {%- set seen.videos = seen.videos + 1 %}
                    {%- if add_vision_id %}
                        {{- 'Video ' ~ seen.videos ~ ': ' }}
                    {%- endif %}
                {%- endif %}
                {{- @VIDEO_TEXT@ }}
            {%- else %}
                {{- raise_exception(@BAD_PART@) }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if not messages %}
    {{- raise_exception(@NO_MESSAGES@) }}
{%- endif %}
{%- set thinking = enable_thinking is undefined or enable_thinking is true %}
{%- set lead = '' %}
{%- if thinking %}
    {%- set effort = reasoning_effort|default('xhigh') %}
    {%- if effort == 'xhigh' %}
        {%- set lead = @XHIGH@ %}
    {%- elif effort == 'low' %}
        {%- set lead = @LOW@ %}
    {%- elif effort != 'medium' %}
        {{- raise_exception(@BAD_EFFORT@) }}
    {%- endif %}
{%- endif %}
{%- set instructions = '' %}
{%- if messages[0].role == 'system' %}
    {%- if messages[0].content is not string %}
        {%- for part in messages[0].content or [] %}
            {%- if part.type != 'text' %}
                {{- raise_exception(@SYSTEM_MEDIA@) }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {%- set instructions = flat(messages[0].content, false)|trim %}
{%- endif %}
{%- if tools or lead or instructions %}
    {{- '<|im_start|>system\\n' + lead }}
    {%- if tools %}
        {{- ('\\n\\n' if lead else '') + @TOOLS_HEAD@ }}
        {%- for tool in tools %}
            {{- '\\n' }}
            {{- tool|tojson }}
        {%- endfor %}
        {{- @TOOLS_TAIL@ }}
    {%- endif %}
    {%- if instructions %}
        {{- ('\\n\\n' if tools or lead else '') + instructions }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set text = flat(message.content, false)|trim %}
        {%- if not (text.startswith('<tool_response>') and text.endswith('</tool_response>')) %}
            {%- set seen.query = loop.index0 %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if seen.query < 0 %}
    {{- raise_exception(@NO_QUERY@) }}
{%- endif %}
{%- for message in messages %}
    {%- set text = flat(message.content, true)|trim %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}
            {{- raise_exception(@SYSTEM_LATE@) }}
        {%- endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + text + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if preserve_thinking is undefined or preserve_thinking is true
            or loop.index0 > seen.query %}
            {%- set thought = message.reasoning_content %}
            {{- '<think>\\n' }}
            {{- thought|trim if thought is string else '' }}
            {{- '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- text }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '\\n' if not loop.first else ('\\n\\n' if text else '') }}
            {{- '<tool_call>\\n<function=' + call.name + '>\\n' }}
            {%- for name, value in (call.arguments or {})|items %}
                {{- '<parameter=' + name + '>\\n' }}
                {{- value if value is string else value|tojson }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + text + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- raise_exception(@BAD_ROLE@) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {{- '<think>\\n' if thinking else '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
"""

_WORDS = {
    "IMAGE_TEXT": IMAGE_TEXT,
    "VIDEO_TEXT": VIDEO_TEXT,
    "XHIGH": EFFORT_SENTENCES["xhigh"],
    "LOW": EFFORT_SENTENCES["low"],
    "TOOLS_HEAD": TOOLS_HEAD,
    "TOOLS_TAIL": TOOLS_TAIL,
    "NO_MESSAGES": NO_MESSAGES,
    "NO_QUERY": NO_QUERY,
    "BAD_ROLE": BAD_ROLE,
    "SYSTEM_LATE": SYSTEM_LATE,
    "SYSTEM_MEDIA": SYSTEM_MEDIA,
    "BAD_PART": BAD_PART,
    "BAD_EFFORT": BAD_EFFORT,
}
BUILTIN_TEMPLATE = re.sub(r"@(\w+)@", lambda match: _quoted(_WORDS[match[1]]), _JINJA)
