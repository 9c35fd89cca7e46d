"""`ChatTemplate`: which forms of messages a model's chat template takes, and the messages of a chat in these forms."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import Any

from slipstream.core.values import OptionError
from slipstream.text.jsontext import json_text

Message = Mapping[str, Any]

REASONING = ("reasoning_content", "reasoning", "thinking")
"""The names that clients and chat templates have for the reasoning in a message of the assistant."""

TOOL = {  # a tool to render a template with, to see whether it writes tools
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "probe"}},
            "required": ["key"],
        },
    },
}
WITHHELD = (  # Parameters of `apply_chat_template` that `Chat.template_kwargs` may not set
    *("conversation", "messages", "tools", "chat_template", "tokenize", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"),
)

NINE = re.compile(r"[A-Za-z0-9]{9}")


class ChatTemplate:
    """The chat template of `owner`, a tokenizer or a processor: what it takes is found out by rendering it.
    `source` is the template itself. `in_parts`: it takes contents in parts, as those of processors do, unless it fails
    then or writes the parts as Python does, and takes texts."""

    def __init__(self, owner: Any, of_processor: bool = False) -> None:
        self._owner, template, self.in_parts = owner, owner.chat_template, of_processor
        self.source = "\n".join(template.values()) if isinstance(template, dict) else str(template)
        if of_processor and "'type'" in (self._rendered([self._message("user")]) or "'type'"):
            self.in_parts = self._rendered([{"role": "user", "content": "x"}]) is None

    def write(self, messages: Sequence[Message], tools: Sequence[Any] | None, **options: Any) -> Any:
        """Return the text of a chat, or its token ids with `tokenize`. Raises ValueError for one that is refused."""
        try:
            return self._owner.apply_chat_template(list(messages), tools=tools, return_dict=False, **options)
        except Exception as error:  # chat templates are programs and may raise any error
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def fit(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return messages, as any client writes them, in the forms that the template takes.

        Every message gets a content, "" if it has none; the arguments of calls are objects, or JSON text for a template
        that joins texts; results have the names of their functions; fields that are None, and empty lists of calls,
        are left out. `developer` becomes `system`, and reasoning gets the template's name for it, or is left out,
        where the template has no such name.
        """
        found = list[dict[str, Any]]()
        functions: dict[Any, Any] = {}  # names by the ids of the calls so far
        short: dict[Any, str] = {}  # ids as the template takes them
        for message in messages:
            fitted = {name: value for name, value in message.items() if value is not None and name not in REASONING}
            calls = [self._call(call) for call in fitted.pop("tool_calls", ())]
            if fitted["role"] == "developer" and not self._developers:
                fitted["role"] = "system"
            fitted.setdefault("content", fitted.get("refusal", ""))
            reasoning = next((message[name] for name in REASONING if message.get(name)), None)
            if reasoning and self._reasoning:
                fitted[self._reasoning] = reasoning
            if calls:
                fitted["tool_calls"] = calls
                functions |= {call.get("id"): _function(call).get("name") for call in calls}
            if fitted["role"] == "tool" and (name := functions.get(fitted.get("tool_call_id"))):
                fitted.setdefault("name", name)
            for named, key in [*((call, "id") for call in calls), (fitted, "tool_call_id")]:
                if named.get(key) and self._short_ids and not NINE.fullmatch(named[key]):
                    named[key] = short.setdefault(named[key], f"{len(short):09}")
            found.append(fitted)
        return found

    def _call(self, call: Message) -> dict[str, Any]:
        function = _function(call)
        arguments = function.get("arguments")
        if self._objects and isinstance(arguments, str):
            with suppress(ValueError, RecursionError):  # what is not JSON stays as it is
                parsed = json.loads(arguments or "{}")
                arguments = parsed if isinstance(parsed, dict) else arguments
        elif not self._objects and isinstance(arguments, Mapping):
            arguments = json_text(arguments, ensure_ascii=False)
        function = {**function, "arguments": arguments}
        return {**call, "function": function} if "function" in call else function

    def check_tools(self, name: str) -> None:
        if not self.takes_tools:
            raise OptionError(
                f"tools are given, but the chat template of {name} does not write them, so the model would not "
                "know them: leave them out, or give a chat template that has tools."
            )

    @cached_property
    def takes_tools(self) -> bool:
        chats = [self._message("user")], [self._message("system"), self._message("user")]
        return any(self._rendered(chat) != self._rendered(chat, [TOOL]) for chat in chats)

    @cached_property
    def _objects(self) -> bool:
        """Whether the arguments of calls are objects: text if objects fail, or come out as Python writes them."""
        written = self._with_call({"key": "value"})
        if written is not None and "'key'" not in written:
            return True
        return self._with_call('{"key": "value"}') is None

    @cached_property
    def _developers(self) -> bool:
        chat = [self._message("developer"), self._message("user")]
        return "developer" in self.source and self._rendered(chat) not in (None, self._rendered(chat[1:]))

    @cached_property
    def _short_ids(self) -> bool:
        """Whether the ids of calls have to be nine letters and digits, as those of Mistral."""
        return self._with_call({}) is not None and self._with_call({}, "call_0123456789") is None

    @cached_property
    def _reasoning(self) -> str | None:
        return next((name for name in REASONING if re.search(rf"\b{name}\b", self.source)), None)

    def _with_call(self, arguments: Any, id: str = "000000000") -> str | None:
        call = {"id": id, "type": "function", "function": {"name": "probe", "arguments": arguments}}
        asked = {**self._message("assistant", ""), "tool_calls": [call]}
        result = {**self._message("tool"), "name": "probe", "tool_call_id": id}
        return self._rendered([self._message("user"), asked, result], [TOOL])

    def _message(self, role: str, text: str = "x") -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}] if self.in_parts else text}

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str | None:
        try:
            return str(self.write(messages, tools, tokenize=False, add_generation_prompt=True))
        except ValueError:
            return None


@lru_cache(maxsize=8)
def chat_template(owner: Any, source: str, of_processor: bool) -> ChatTemplate:
    """Return a chat template, which is looked at once unless its source changes."""
    return ChatTemplate(owner, of_processor)


def _function(call: Message) -> Message:
    """Return the function of a call, which some clients write without the object around it."""
    function = call.get("function", call)
    return function if isinstance(function, Mapping) else {}
