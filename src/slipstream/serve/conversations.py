"""Keeps the last responses of a server, for requests that go on with them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace

from slipstream.serve.faults import BadRequest, ServeError
from slipstream.serve.response_output import ResponseAnswer
from slipstream.serve.response_schema import InputMessage, InputReference, Kept, ResponsesRequest

RESPONSES, BYTES = 1000, 64 << 20  # most responses that are kept, and the most bytes of their requests together


class NoSuchResponse(BadRequest):
    """A request goes on with a response that is not kept (400)."""

    code = "previous_response_not_found"

    def __init__(self, what: str, param: str) -> None:
        kept = f"the last {RESPONSES} responses, {BYTES >> 20} MiB of requests at most, until the server ends"
        super().__init__(f"{what}, but this server keeps only {kept}: send the whole conversation as input.", param)


class NoResponse(ServeError):
    """A request names a response that is not kept (404)."""

    status, kind, code = 404, "invalid_request_error", "response_not_found"


@dataclass(frozen=True)
class StoredConversation:
    """The items of a tenant's conversation, the last response, its items by their ids, and the bytes that they took."""

    tenant: str
    items: tuple[Kept, ...] = ()
    answered: dict[str, Kept] = field(default_factory=dict)
    size: int = 0
    response: ResponseAnswer | None = None


class Conversations:
    """The conversations of the last responses, the oldest dropped first; every tenant finds only its own."""

    def __init__(self, most: int = RESPONSES, size: int = BYTES) -> None:
        self._most, self._size = most, size
        self._kept: OrderedDict[tuple[str, str], StoredConversation] = OrderedDict()
        self._total = 0

    def resume(self, body: ResponsesRequest, tenant: str, size: int) -> StoredConversation:
        """Return the conversation that a request of `size` bytes goes on with, and its own items.

        Raises NoSuchResponse if it names a response, or an item of one, that is not kept.
        """
        before = StoredConversation(tenant)
        if body.previous_response_id is not None:
            found = self._kept.get((tenant, body.previous_response_id))
            if found is None:
                raise NoSuchResponse(f"previous_response_id is {body.previous_response_id!r}", "previous_response_id")
            before = found
        given = [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input
        new = [self._item(each.id, tenant) if isinstance(each, InputReference) else each for each in given]
        return StoredConversation(tenant, (*before.items, *new), {}, before.size + size)

    def find(self, response: str, tenant: str) -> ResponseAnswer:
        found = self._kept.get((tenant, response))
        if found is None or found.response is None:
            raise NoResponse(f"the response {response!r} is not kept here.", "response_id")
        return found.response

    def drop(self, response: str, tenant: str) -> None:
        self.find(response, tenant)
        self._total -= self._kept.pop((tenant, response)).size

    def keep(self, response: ResponseAnswer, conversation: StoredConversation, answered: dict[str, Kept]) -> None:
        items = (*conversation.items, *answered.values())
        kept = replace(conversation, items=items, answered=answered, response=response)
        self._kept[conversation.tenant, response.id] = kept
        self._total += conversation.size
        while len(self._kept) > self._most or self._total > self._size:
            self._total -= self._kept.popitem(last=False)[1].size

    def _item(self, name: str, tenant: str) -> Kept:
        for (owner, _), conversation in reversed(self._kept.items()):
            if owner == tenant and name in conversation.answered:
                return conversation.answered[name]
        raise NoSuchResponse(f"input refers to the item {name!r}", "input")
