"""The output of /v1/responses: items, and the events that tell of them, from the parts of an assistant's message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slipstream.serve import answers
from slipstream.serve.ids import new_id
from slipstream.serve.response_answers import (
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
)
from slipstream.serve.response_schema import InputCall, InputMessage, InputReasoning, InputText, Kept

Told = tuple[str, dict[str, Any]]
"""The kind of an event, without `response.`, and its fields."""


class ResponseOutput:
    """The items of one response, in the order in which they are written; one of them is open."""

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self._open: OutputItem | None = None

    def add(self, delta: answers.Delta) -> Iterator[Told]:
        """Add a part of the message -> the events that tell of it."""
        if delta.reasoning_content:
            if not isinstance(self._open, OutputReasoning):
                yield from self._begin(OutputReasoning(id=f"rs_{new_id()}", content=[ReasoningText(text="")]))
            yield from self._write(delta.reasoning_content)
        if delta.content:
            if not isinstance(self._open, OutputMessage):
                yield from self._begin(OutputMessage(id=f"msg_{new_id()}", content=[OutputText(text="")]))
            yield from self._write(delta.content)
        for call in delta.tool_calls or ():
            if call.function.name is not None:
                assert call.id is not None, "the first part of a call has its id"
                begun = OutputCall(id=f"fc_{new_id()}", call_id=call.id, name=call.function.name, arguments="")
                yield from self._begin(begun)
            yield from self._write(call.function.arguments)

    def end(self, status: str) -> Iterator[Told]:
        """End the output -> the last events; a response without any item gets a message without a text."""
        if not self.items:
            yield from self._begin(OutputMessage(id=f"msg_{new_id()}", content=[OutputText(text="")]))
        yield from self._close(status)

    @property
    def as_input(self) -> dict[str, Kept]:
        """The items by their ids, as the input of a later request has them."""
        found: dict[str, Kept] = {}
        for item in self.items:
            if isinstance(item, OutputCall):
                call = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
                found[item.id] = InputCall(type="function_call", **call)
            elif isinstance(item, OutputMessage):
                found[item.id] = InputMessage(role="assistant", content=item.content[0].text)
            else:
                text = InputText(type="reasoning_text", text=item.content[0].text)
                found[item.id] = InputReasoning(type="reasoning", content=[text])
        return found

    def _begin(self, item: OutputItem) -> Iterator[Told]:
        yield from self._close("completed")
        self._open = item
        self.items.append(item)
        bare = item if isinstance(item, OutputCall) else item.model_copy(update={"content": []})
        yield "output_item.added", {"output_index": self._place["output_index"], "item": bare.model_copy()}
        if not isinstance(item, OutputCall):
            yield "content_part.added", {**self._place, "content_index": 0, "part": item.content[0].model_copy()}

    def _write(self, text: str) -> Iterator[Told]:
        item = self._open
        if isinstance(item, OutputCall):
            item.arguments += text
            if text:
                yield "function_call_arguments.delta", {**self._place, "delta": text}
        elif item is not None:
            [part] = item.content
            part.text += text
            yield f"{part.type}.delta", {**self._place, **_of_text(part), "delta": text}

    def _close(self, status: str) -> Iterator[Told]:
        item, self._open = self._open, None
        if item is None:
            return
        item.status = status
        if isinstance(item, OutputCall):
            done = {"name": item.name, "arguments": item.arguments}
            yield "function_call_arguments.done", {**self._place, **done}
        else:
            [part] = item.content
            yield f"{part.type}.done", {**self._place, **_of_text(part), "text": part.text}
            yield "content_part.done", {**self._place, "content_index": 0, "part": part}
        yield "output_item.done", {"output_index": self._place["output_index"], "item": item}

    @property
    def _place(self) -> dict[str, Any]:
        """The fields of events that say which item they are about: the last one."""
        return {"item_id": self.items[-1].id, "output_index": len(self.items) - 1}


def _of_text(part: OutputText | ReasoningText) -> dict[str, Any]:
    return {"content_index": 0, **({"logprobs": []} if isinstance(part, OutputText) else {})}
