"""A suffix automaton: finds the longest earlier occurrence of a text's last tokens, in time linear in the text."""

from __future__ import annotations

import sys
from collections.abc import Sequence

DEPTH = 64
"""How many nested suffixes learn of a new occurrence. Only texts that loop have more; bounds the work per token."""


class SuffixAutomaton:
    """A growing text and the longest suffix of it that occurred before, in amortised constant time per token.

    A state stands for the substrings that end at the same places; `links` leads to the state of its longest suffix
    that also ends elsewhere. So the link of the whole text is the longest suffix that occurred before. `length` is
    its length, at most `limit`; 0 if the last token is new. Occurrences may overlap. `followers` says for every
    state which token leads to which state.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit or sys.maxsize
        self._clear()

    def _clear(self) -> None:
        self.text: list[int] = []
        self.length = 0
        self.followers: list[dict[int, int]] = [{}]  # state 0 is the empty text
        self.links, self._longest = [-1], [0]
        self._recent = [0]  # where the last known occurrence ends, the newest place of the text aside
        self._whole = self._match = 0

    def follow(self, tokens: list[int]) -> None:
        """Make these tokens the text. The text inside a draft is cut where the draft is refused: it is read anew."""
        if self.text != tokens[: len(self.text)]:
            self._clear()
        self.extend(tokens[len(self.text) :])

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._remember()
            follower = self.followers[self._match].get(token, 0)
            self._grow(token)
            self.text.append(token)
            self._find(follower)

    def following(self, count: int) -> list[int]:
        """The `count` tokens after the most recent earlier occurrence of the match; none without a match.

        Where the occurrence reaches into the end of the text, the copy goes on with itself: a loop is continued.
        """
        copy: list[int] = []
        start = self._recent[self._match] - len(self.text)  # negative: counted from the end
        for place in range(start, start + count) if self.length else ():
            copy.append(self.text[place] if place < 0 else copy[place])
        return copy

    def _remember(self) -> None:
        """The match and its suffixes now have an occurrence at the end of the text."""
        state = self._match
        for _ in range(DEPTH):
            if not state:
                return
            self._recent[state] = len(self.text)
            state = self.links[state]

    def _grow(self, token: int) -> None:
        """Blumer's step: the automaton of the text and one more token."""
        new = self._add(self._longest[self._whole] + 1, 0, {}, len(self.text) + 1)
        state, self._whole = self._whole, new
        while state >= 0 and token not in self.followers[state]:
            self.followers[state][token] = new
            state = self.links[state]
        if state >= 0:
            self.links[new] = self._split(state, token)

    def _split(self, state: int, token: int) -> int:
        """The state of exactly the longest string of `state` and the token; made if it had longer ones too."""
        old, length = self.followers[state][token], self._longest[state] + 1
        if self._longest[old] == length:
            return old
        clone = self._add(length, self.links[old], dict(self.followers[old]), self._recent[old])
        self.links[old] = clone
        while state >= 0 and self.followers[state].get(token) == old:
            self.followers[state][token] = clone
            state = self.links[state]
        return clone

    def _add(self, longest: int, link: int, following: dict[int, int], recent: int) -> int:
        self._longest.append(longest)
        self.links.append(link)
        self.followers.append(following)
        self._recent.append(recent)
        return len(self.followers) - 1

    def _find(self, follower: int) -> None:
        """The state of the match. `follower` holds the last match and the new token, if that occurred before."""
        state = self.links[self._whole]
        if self._longest[state] > self._limit:  # the last match had the full size: go on from it, not from the top
            state = follower
            while self._longest[self.links[state]] >= self._limit:
                state = self.links[state]
        self._match, self.length = state, min(self._longest[state], self._limit)
