"""Servers that are slow, dead, lying or gone: they cost drafts, never a text, an error, or more than their time.

Every kind of fault is put between a real server and a real client. Greedy and coupled texts have to equal those of
plain decoding, each call has to end in time, and the fault has to have happened: its reason stands in the statistics.
"""

import gc
import io
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from remotes import Fault, Wire, changed, connected, each_draft, serving
from slipstream.core.request import Row
from slipstream.core.stats import Stats
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder, NoDraft
from slipstream.decoding.generate import generate
from slipstream.decoding.rules import BLOCK, COUPLED, Rule
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.remote.drafter import RemoteDrafter
from slipstream.drafters.remote.frames import HEAD, LARGEST, Frame, FrameType, Refused, VocabularySketch, encode
from slipstream.drafters.remote.link import DraftConnection, Settings
from toys.tables import PAIRS, VOCAB, scorer
from toys.texts import GREEDY, SAMPLE, request

TARGET, DRAFT = PAIRS["same"]  # every guess is right, so that what is spoilt would be missed
LENGTH = 18
BOUND = 5.0
"""Seconds in which a call has to end, whatever the server does; without faults it takes some 0.05."""


def model() -> ModelDrafter:
    return ModelDrafter(scorer(DRAFT, "draft"))


def decoder(drafter: Any, rule: Rule = COUPLED, batch_size: int = 2) -> Decoder:
    return Decoder(scorer(TARGET), drafter, rule.verify, Fixed(3), batch_size, rule.rng)


def requests(sampler: Sampling, count: int = 3) -> list[Any]:
    return [request((0, 2, *[1] * key), LENGTH - 3 * key, sampler, key=key) for key in range(count)]


def bounded(work: Callable[[], list[Row]]) -> list[Row]:
    found = list[Row]()
    thread = threading.Thread(target=lambda: found.extend(work()), daemon=True)
    thread.start()
    thread.join(BOUND)
    assert not thread.is_alive(), "it hangs"
    return found


def summed(rows: Sequence[Row]) -> Stats:
    return sum((row.stats for row in rows), Stats())


def check_texts(remote: RemoteDrafter) -> Stats:
    """Greedy and coupled texts beside a spoilt server are those of plain decoding -> what was counted."""
    total = Stats()
    for sampler in (GREEDY, SAMPLE):
        rows = bounded(lambda sampler=sampler: generate(decoder(remote), requests(sampler)))  # type: ignore[misc]
        want = generate(decoder(NoDraft()), requests(sampler))
        assert [row.tokens for row in rows] == [row.tokens for row in want]
        total += summed(rows)
    return total


@contextmanager
def behind(
    fault: Fault, kinds: Sequence[FrameType] = (FrameType.DRAFT,), **settings: Any
) -> Iterator[tuple[RemoteDrafter, Wire]]:
    """A client of a server behind a wire that spoils frames of these kinds."""
    how = {"timeout": 0.08, "quiet": 0.4, **settings}
    with (
        serving(model(), VOCAB) as port,
        Wire(port, fault, kinds) as wire,
        connected(wire.port, VOCAB, **how) as remote,
    ):
        yield remote, wire


# ---- faults in frames -------------------------------------------------------------------------------------------


def head(data: bytes, **other: Any) -> bytes:
    names = ("magic", "version", "kind", "sequence", "length")
    values = dict(zip(names, HEAD.unpack(data[: HEAD.size]), strict=True)) | other
    return HEAD.pack(*(values[name] for name in names)) + data[HEAD.size :]


def body(data: bytes, content: bytes) -> bytes:
    return head(data[: HEAD.size], length=len(content)) + content


def tokens(change: Callable[[int], Any], times: int = 1) -> Fault:
    """Other tokens."""
    return lambda wire, data: each_draft(data, lambda draft: {"tokens": times * list(map(change, draft["tokens"]))})


def rows(change: Callable[[int], int]) -> Fault:
    return lambda wire, data: each_draft(data, lambda draft: {"row": change(draft["row"])})


def held_back(wire: Wire, data: bytes) -> bytes:
    """Every second answer comes after the one behind it."""
    wire.kept.append(data)
    if len(wire.kept) % 2:
        return b""
    return wire.kept[-1] + wire.kept[-2]


def later(wire: Wire, data: bytes) -> bytes:
    """Each answer comes when nobody waits for it any more."""
    time.sleep(0.12)
    return data


def cut_often(wire: Wire, data: bytes) -> bytes | None:
    """Every third answer is the last of its connection."""
    return data if wire.spoilt % 3 else None


def half(wire: Wire, data: bytes) -> bytes:
    """The connection ends in the middle of a frame."""
    wire.fault = lambda wire, data: None
    return data[: len(data) // 2]


def once_wrong(wire: Wire, data: bytes) -> bytes:
    """One answer is for other rows, the others are as they should be."""
    return rows(lambda row: row + 1)(wire, data) if wire.spoilt % 2 else data


DEEP = b'{"drafts":' + b"[" * 100_000 + b"]" * 100_000 + b"}"

FAULTS: dict[str, tuple[Fault, str]] = {
    "truncated": (lambda wire, data: head(data, length=HEAD.unpack(data[: HEAD.size])[-1] - 3), "disconnected"),
    "longer than it is": (lambda wire, data: head(data, length=HEAD.unpack(data[: HEAD.size])[-1] + 9), "late"),
    "huge": (lambda wire, data: head(data, length=LARGEST + 1), "disconnected"),
    "wrong magic": (lambda wire, data: head(data, magic=b"HTTP"), "disconnected"),
    "wrong version": (lambda wire, data: head(data, version=99), "disconnected"),
    "unknown kind": (lambda wire, data: head(data, kind=77), "disconnected"),
    "a client's kind": (lambda wire, data: head(data, kind=FrameType.OPEN), "disconnected"),
    "wrong sequence": (lambda wire, data: head(data, sequence=12345), "late"),
    "garbage": (lambda wire, data: bytes(range(256)), "disconnected"),
    "no JSON": (lambda wire, data: body(data, b"\xff{]"), "disconnected"),
    "other JSON": (lambda wire, data: body(data, b"[1,2]"), "disconnected"),
    "deep JSON": (lambda wire, data: body(data, DEEP), "disconnected"),
    "bytes left over": (lambda wire, data: body(data, b"{}12"), "disconnected"),
    "nothing in it": (lambda wire, data: body(data, b"{}"), "refused"),
    "no objects": (lambda wire, data: body(data, b'{"drafts":[1,2]}'), "refused"),
    "ids too large": (tokens(lambda token: token + 1000), "refused"),
    "ids negative": (tokens(lambda token: token - 1000), "refused"),
    "texts for ids": (tokens(str), "refused"),
    "truth for ids": (tokens(bool), "refused"),
    "rows missing": (lambda wire, data: body(data, b'{"drafts":[]}'), "refused"),
    "another row": (rows(lambda row: row + 1), "refused"),
    "another row at times": (once_wrong, "refused"),
    "more than was asked": (tokens(int, 40), "refused"),
    "refusals": (
        lambda wire, data: encode(Frame(FrameType.REFUSAL, HEAD.unpack(data[:16])[3], {"reason": "no"})),
        "refused",
    ),
    "late": (later, "late"),
    "silent": (lambda wire, data: b"", "late"),
    "reordered": (held_back, "late"),
    "closed in mid-frame": (half, "disconnected"),
    "closed now and then": (cut_often, "disconnected"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_drafts_and_nothing_else(name: str) -> None:
    fault, reason = FAULTS[name]
    with behind(fault) as (remote, wire):
        counted = check_texts(remote)
    assert wire.spoilt, "nothing was spoilt"
    assert counted.undrafted.get(reason), f"{counted.undrafted}: the fault did not show"


@pytest.mark.parametrize("fault", [lambda wire, data: data, lambda wire, data: data + data], ids=["whole", "twice"])
def test_control_an_answer_that_is_whole_is_used(fault: Fault) -> None:
    """Also where it comes twice: the second is for nobody."""
    with behind(fault, timeout=2.0) as (remote, _):
        counted = check_texts(remote)
    assert not counted.undrafted
    assert counted.accepted == counted.drafted > 0


def test_wrong_ids_that_are_possible_are_only_refused_by_the_target() -> None:
    """A server may say what it likes: texts stay, and what it drafts is counted as drafted."""
    with behind(tokens(lambda token: (token + 1) % VOCAB), timeout=2.0) as (remote, _):
        counted = check_texts(remote)
    assert not counted.undrafted and not counted.accepted and counted.drafted


# ---- laws -------------------------------------------------------------------------------------------------------


def laws(**change: Callable[[list[Any]], list[Any]]) -> Fault:
    """Other ids or weights of laws."""

    def spoil(draft: dict[str, Any]) -> dict[str, Any]:
        return {"laws": [{**law, **{name: to(law[name]) for name, to in change.items()}} for law in draft["laws"]]}

    return lambda wire, data: each_draft(data, spoil)


def weights(change: Callable[[float], Any]) -> Fault:
    return laws(weights=lambda found: list(map(change, found)))


def impossible(wire: Wire, data: bytes) -> bytes:
    """Laws that leave out the very token that was drafted."""

    def spoil(draft: dict[str, Any]) -> dict[str, Any]:
        return {"laws": [{"ids": [(token + 1) % VOCAB], "weights": [1.0]} for token in draft["tokens"]]}

    return each_draft(data, spoil)


LAWS: dict[str, Fault] = {
    "sums to two": weights(lambda weight: 2 * weight),
    "sums to a half": weights(lambda weight: weight / 2),
    "negative": weights(lambda weight: -weight),
    "NaN": lambda wire, data: body(data, re.sub(rb'"weights":.[^],]*', b'"weights":[NaN', data[HEAD.size :])),
    "not a number": weights(lambda weight: None),
    "zeros": weights(lambda weight: 0 * weight),
    "ids not ascending": laws(ids=lambda ids: ids[::-1]),
    "ids out of range": laws(ids=lambda ids: [each + 7 for each in ids]),
    "token not drawn": tokens(lambda token: (token + 1) % VOCAB),
    "token of no weight": impossible,
    "an id too many": laws(ids=lambda ids: [*ids, VOCAB - 1]),
    "a weight too many": laws(weights=lambda found: [*found, 1e-9]),
    "one too many": lambda wire, data: each_draft(data, lambda draft: {"laws": [*draft["laws"], *draft["laws"][:1]]}),
    "left out": lambda wire, data: each_draft(data, lambda draft: {"laws": []}),
}


@pytest.mark.parametrize("name", LAWS)
def test_a_law_that_cannot_be_is_refused(name: str) -> None:
    """Every round is a plain step then, so the sampled texts are those of plain decoding, number by number."""
    with behind(LAWS[name], trust=True, timeout=2.0) as (remote, wire):
        asked = [replace(each, max_new_tokens=6) for each in requests(SAMPLE)]
        rows = bounded(lambda: generate(decoder(remote, BLOCK), asked))
    want = generate(decoder(NoDraft(), BLOCK), asked)
    assert [row.tokens for row in rows] == [row.tokens for row in want]
    assert wire.spoilt and summed(rows).undrafted.get("refused") and not summed(rows).drafted


def test_control_a_law_that_is_whole_is_used() -> None:
    with behind(lambda wire, data: data, trust=True, timeout=2.0) as (remote, _):
        rows = bounded(lambda: generate(decoder(remote, BLOCK), requests(SAMPLE)))
    assert summed(rows).drafted and not summed(rows).undrafted


# ---- the beginning, and the end ---------------------------------------------------------------------------------


def refusal(port: int, vocab: int = VOCAB, **settings: Any) -> str:
    connection = DraftConnection(Settings("127.0.0.1", port, quiet=1.0, **settings), VocabularySketch(vocab))
    try:
        with pytest.raises(Refused) as error:
            connection.first_word(5)
    finally:
        connection.close()
    return str(error.value)


def test_a_wrong_key_is_one_sentence_on_both_sides() -> None:
    with serving(model(), VOCAB, key=b"right") as port:
        for key in (b"", b"wrong"):
            assert "keys" in refusal(port, key=key) and "differ" in refusal(port, key=key)
        with connected(port, VOCAB, key=b"right", timeout=2.0) as remote:
            assert not check_texts(remote).undrafted
    with serving(model(), VOCAB) as port:
        assert "keys" in refusal(port, key=b"a key that the server lacks")


def test_a_server_without_the_key_is_not_believed() -> None:
    """It lets the client in, but cannot answer the client's own number."""

    def forged(wire: Wire, data: bytes) -> bytes:
        return changed(data, lambda frame: replace(frame, values={**frame.values, "proof": 64 * "0"}))

    with serving(model(), VOCAB, key=b"k") as port, Wire(port, forged, (FrameType.WELCOME,)) as wire:
        assert "keys" in refusal(wire.port, key=b"k")


def test_another_vocabulary_is_one_sentence() -> None:
    with serving(model(), VOCAB) as port:
        assert "3" in (text := refusal(port, vocab=5000)) and "5000" in text and "tokenizer" in text


def test_vocabularies_are_compared_by_what_ids_mean() -> None:
    ours = VocabularySketch(9000, tuple("abcdefghi"))
    assert ours.fits(VocabularySketch(9100, tuple("abcdefghj")))  # some tokens were added at the end
    assert ours.fits(VocabularySketch(9000)) and not ours.fits(VocabularySketch(9100))
    assert not ours.fits(VocabularySketch(9000, tuple("abcdefXYi")))
    assert not VocabularySketch(50, ("a",)).fits(VocabularySketch(50, ("b",)))


def test_what_is_no_draft_server_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            client, _ = other.accept()
            with client:
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                client.recv(1000)

        thread = threading.Thread(target=answer)
        thread.start()
        assert "no frames of a draft server" in refusal(other.getsockname()[1])
        thread.join(5)


@pytest.mark.parametrize("greets", [False, True], ids=["nobody speaks", "half-open"])
def test_a_server_that_says_nothing_costs_little(greets: bool) -> None:
    """One that never greets, and one whose answers and pongs stop: rounds go on, and the connection is given up."""
    kinds = (FrameType.DRAFT, FrameType.PONG) if greets else (FrameType.HELLO,)
    with behind(lambda wire, data: b"", kinds, quiet=0.15) as (remote, wire):
        counted = check_texts(remote)
        time.sleep(0.3)
        check_texts(remote)
        assert counted.undrafted.keys() <= {"late", "disconnected"} and not counted.drafted
    assert wire.spoilt


def test_a_server_that_comes_back_is_used_again() -> None:
    """Rows go on from their whole texts; while nobody is there, rounds are plain steps."""
    with serving(model(), VOCAB) as port, connected(port, VOCAB, timeout=2.0) as remote:
        assert not check_texts(remote).undrafted
    with connected(port, VOCAB, timeout=2.0) as remote:
        gone = check_texts(remote)
        assert set(gone.undrafted) == {"disconnected"} and not gone.drafted
        with serving(model(), VOCAB, port=port):
            until = time.monotonic() + 5
            while not remote.link.generation and time.monotonic() < until:
                time.sleep(0.01)
            assert check_texts(remote).drafted


def test_a_server_ends_though_its_clients_go_on_writing() -> None:
    """Python 3.11's `wait_for` loses being cancelled where a frame comes at that moment, and the server would wait."""
    for _ in range(5):
        with serving(model(), VOCAB) as port:
            connection = DraftConnection(Settings("127.0.0.1", port, quiet=1.0), VocabularySketch(VOCAB))
            connection.first_word(5)
            generation, ended = connection.generation, threading.Event()
            assert generation

            def write(to: DraftConnection = connection, number: int = generation, end: threading.Event = ended) -> None:
                while not end.wait(0.0002):
                    to.tell(number, [Frame(FrameType.PING, 1)] * 20)

            writing = threading.Thread(target=write)
            writing.start()
            time.sleep(0.05)
        ended.set()
        writing.join(5)
        connection.close()


def test_a_server_ends_cleanly_while_clients_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is left open and no task is dropped, whatever the moment; either would be a warning, an error here.

    Some clients are being accepted, some greeted, and some are leaving when the server ends.
    """
    said = io.StringIO()
    monkeypatch.setattr(logging.getLogger("asyncio"), "handlers", [logging.StreamHandler(said)])
    for _ in range(8):
        with serving(model(), VOCAB) as port:
            early = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
            late = [socket.socket() for _ in range(8)]
            for client in early:
                client.recv(1)
                client.close()
            for client in late:
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", port))
        for client in late:
            client.close()
    gc.collect()
    assert "pending" not in said.getvalue()


def test_a_server_that_dies_and_comes_back_in_the_middle_of_texts() -> None:
    """Every few answers the connection ends; there are drafts before and after, and no text differs."""
    with behind(cut_often, timeout=2.0) as (remote, wire):

        def patient(tokens: list[int]) -> None:
            until = time.monotonic() + 2
            while not remote.link.generation and time.monotonic() < until:
                time.sleep(0.005)

        asked = [replace(each, stop=patient) for each in requests(GREEDY)]
        rows = bounded(lambda: generate(decoder(remote), asked))
    want = generate(decoder(NoDraft()), requests(GREEDY))
    assert [row.tokens for row in rows] == [row.tokens for row in want]
    assert wire.spoilt >= 6 and summed(rows).undrafted["disconnected"] >= 2 and summed(rows).accepted >= 10


def test_an_answer_that_was_late_does_not_stand_for_the_next_one() -> None:
    """A sequence number that comes back late is thrown away, and the next answer counts again."""

    def first_late(wire: Wire, data: bytes) -> bytes:
        if wire.spoilt == 1:
            time.sleep(0.3)
        return data

    with behind(first_late, timeout=0.2, quiet=5.0) as (remote, _):
        counted = check_texts(remote)
    assert counted.undrafted.get("late", 0) >= 1
    assert counted.accepted == counted.drafted > 0


def test_the_server_survives_what_clients_send() -> None:
    """Garbage, huge frames, questions about unknown rows: the one who sends them is sent away, the others go on."""
    with serving(model(), VOCAB) as port:
        stranger = HEAD.pack(b"SLDR", 2, FrameType.PROOF, 0, LARGEST)  # no bytes are kept of who has not shown the key
        for nonsense in (b"\0" * 64, bytes(range(256)), HEAD.pack(b"SLDR", 2, 4, 0, 9), stranger, b"SLDR", b""):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(nonsense)
                client.shutdown(socket.SHUT_WR)
                client.settimeout(5)
                while client.recv(4096):
                    pass
        with connected(port, VOCAB, timeout=2.0) as remote:
            generation = remote.link.generation
            remote.link.tell(
                generation, [Frame(FrameType.PROPOSE, 5, {"asks": [{"row": 1}]}), Frame(FrameType.OPEN, 5, {"row": -1})]
            )
            assert not check_texts(remote).undrafted


@dataclass
class Broken:
    inner: ModelDrafter
    calls: int = 0

    def propose(self, context: Any, gammas: Sequence[int]) -> Any:
        self.calls += 1
        if self.calls % 5 == 0:
            raise RuntimeError("out of something")
        return self.inner.propose(context, gammas)

    def observe(self, round: Any) -> None:
        self.inner.observe(round)


def test_a_draft_that_fails_is_refused_and_opened_again(capfd: pytest.CaptureFixture[str]) -> None:
    with serving(Broken(model()), VOCAB) as port, connected(port, VOCAB, timeout=2.0) as remote:
        counted = check_texts(remote)
    assert counted.undrafted["refused"] and counted.drafted
    assert "out of something" in capfd.readouterr().err


def test_reasons_stand_in_the_statistics_that_users_see() -> None:
    with connected(1, VOCAB, timeout=0.05) as remote:
        rows = generate(decoder(remote), requests(GREEDY, 1))
    shown = json.loads(json.dumps(rows[0].stats.as_dict()))
    assert shown["undrafted"] == {"disconnected": rows[0].stats.target_calls - 1}
