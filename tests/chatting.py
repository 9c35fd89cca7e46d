"""A tiny model that chats as Qwen3 does: it thinks, calls the tool `add`, and tells the sum when it has the result.

It sees a few tokens back only, so it says the same in every conversation, whatever a client puts into its prompts.
"""

from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from slipstream.models.loading.pairings import EMBEDDED

TEMPLATE = """{%- macro say(role, text) %}<|im_start|>{{ role }}
{{ text }}<|im_end|>
{% endmacro -%}
{%- if tools %}{{ say('system', 'You may call: ' + (tools | tojson)) }}{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ say('user', '<tool_response>' + message.content + '</tool_response>') }}
{%- elif message.role == 'assistant' -%}
<|im_start|>assistant
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% else -%}
{{ say(message.role, message.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A chat template in Qwen3's way: content is joined as text, arguments are objects."""

THOUGHT, SUM = "I have to add.", "The sum is 7."
CALL = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
ASKED, ANSWERED = f"<think>{THOUGHT}</think>{CALL}<|im_end|>", f"{SUM}<|im_end|>"
BEGIN = "<|im_end|>\n<|im_start|>assistant\n"
MARKS = ["<|im_start|>", "<|im_end|>", "<tool_response>", "</tool_response>"]
WINDOW = 10


def save_chatting(path: Path) -> Path:
    """Train the model, which takes some seconds, and save it with its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "target")
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS[:2]})
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>", *MARKS[2:]])
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", TEMPLATE
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "max_position_embeddings": 8192}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    window = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads, **window, **ends))
    lessons = [tokenizer.encode(text) for text in (BEGIN + ASKED, "</tool_response>" + BEGIN + ANSWERED)]
    begin = len(tokenizer.encode(BEGIN))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for place, lesson in enumerate(lessons):
            before = torch.randint(len(tokenizer) - len(MARKS), (2, WINDOW))
            ids = torch.cat([before, torch.tensor(lesson).expand(2, -1)], 1)
            labels = ids.clone()
            labels[:, : WINDOW + place + begin] = -100
            loss = loss + model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        model.lm_head.weight *= 4  # so that it says the same at any usual temperature
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
