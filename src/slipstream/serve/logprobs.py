"""Log probabilities in the two forms of OpenAI's interface."""

from collections.abc import Sequence
from math import isnan, nan

from slipstream.engine.generation import Generation, TokenLogprobs
from slipstream.serve import answers
from slipstream.text.detokenize import BROKEN, Detokenizer
from slipstream.text.spelling import Spelling

LEAST = -9999.0  # number sent for minus infinity, which JSON lacks


def for_chat(found: Sequence[TokenLogprobs], spelling: Spelling) -> answers.ChatLogprobs:
    def top(token: int, logprob: float) -> answers.TopLogprob:
        return answers.TopLogprob(
            token=spelling.text(token), logprob=max(LEAST, logprob), bytes=list(spelling.write(token))
        )

    return answers.ChatLogprobs(
        content=[
            answers.TokenLogprob(
                **top(each.token, each.logprob).model_dump(), top_logprobs=[top(*pair) for pair in each.top]
            )
            for each in found
        ]
    )


class TextTokens:
    """Lists the log probabilities of a completion's tokens, as they come, in the older form.

    `text_offset` counts the characters of the choice's text that are complete before a token. If the prompt is scored,
    its tokens come first, of which the first has no log probability.
    """

    def __init__(self, spelling: Spelling, wanted: int, generation: Generation) -> None:
        self._spelling, self._wanted, self._echoed = spelling, wanted, len(generation.echo)
        prompt = generation.request.prompt
        self._scored = generation if generation.request.prompt_logprobs is not None else None
        before = [] if self._scored else [token for token in prompt if token not in spelling.hidden]
        self._reader, self._length = Detokenizer(spelling.decode, before), 0 if self._scored else self._echoed

    def read(self, found: Sequence[TokenLogprobs]) -> answers.TextLogprobs:
        """Return the log probabilities of the tokens that come next, with those of the prompt before the first."""
        starts = list[int]()
        if (scored := self._scored) is not None:
            assert scored.row is not None, "the worker has put it into a row"
            prompt = [TokenLogprobs(scored.request.prompt[0], nan, ()), *scored.row.prompt_logprobs]
            starts = [self._begin(each.token) for each in prompt]
            self._scored, self._length, found = None, self._echoed, [*prompt, *found]
        starts += [self._begin(each.token) for each in found[len(starts) :]]
        named = [self._names(each) for each in found]
        tops = [
            None if isnan(each.logprob) else {names[token]: max(LEAST, logprob) for token, logprob in each.top}
            for names, each in zip(named, found, strict=True)
        ]
        return answers.TextLogprobs(
            text_offset=starts,
            token_logprobs=[None if isnan(each.logprob) else max(LEAST, each.logprob) for each in found],
            tokens=[names[each.token] for names, each in zip(named, found, strict=True)],
            top_logprobs=tops if self._wanted else None,
        )

    def _begin(self, token: int) -> int:
        begin = self._length
        if token not in self._spelling.hidden:
            self._length += len(self._reader.push(token))
        return begin

    def _names(self, found: TokenLogprobs) -> dict[int, str]:
        """Return the names of the tokens of one place: their texts, or what tells them apart from each other.

        As in OpenAI's interface, a part of a character is named by its bytes; as in vLLM's, a token whose name is that
        of a more probable one by its id.
        """
        names = dict[int, str]()
        for token in (*(token for token, _ in found.top), found.token):
            written, name = self._spelling.write(token), self._spelling.text(token)
            if BROKEN in name and name.encode() != written:
                name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)
            if token not in names:
                names[token] = f"token_id:{token}" if name in names.values() else name
        return names
