"""Rows beside a draft server: they come and go in ragged batches, from several clients, behind TLS, inside others."""

import shutil
import ssl
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from remotes import Here, connected, serving
from slipstream.core.request import Row
from slipstream.core.stats import Stats
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder, NoDraft
from slipstream.decoding.generate import generate
from slipstream.decoding.rules import BLOCK, COUPLED, MATCH, TOKEN
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.build_context import BuildContext
from slipstream.drafters.chain import ChainDrafter
from slipstream.drafters.choice import Choice
from slipstream.drafters.lookup import Lookup
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.remote.drafter import RemoteDrafter
from slipstream.drafters.remote.frames import VocabularySketch
from slipstream.drafters.remote.link import DraftConnection
from slipstream.drafters.remote.messages import DraftMode, OpenRow, settings_of
from slipstream.drafters.specification import drafter
from slipstream.engine.load import load
from slipstream.models.causal import CausalScorer
from slipstream.models.loading.load import load_tokenizer
from slipstream.models.loading.pairings import EMBEDDED
from slipstream.serve.drafts.rows import DraftRows, Served
from slipstream.serve.drafts.server import build, tls_context
from toys.families import FAMILIES, HF_VOCAB, tiny
from toys.tables import PAIRS, VOCAB, TableScorer, scorer
from toys.texts import GREEDY, SAMPLE, request

TARGET, DRAFT = PAIRS["generic"]


def asked(sampler: Sampling = GREEDY, count: int = 9) -> list[Any]:
    """More texts than places, of all lengths: rows come and go."""
    return [
        request((0, 2, *[key % 3] * (key % 4)), 4 + 5 * (key % 5), sampler, key=key, eos=frozenset([key % 7]))
        for key in range(count)
    ]


def texts(rows: Sequence[Row]) -> list[list[int]]:
    return [row.tokens for row in rows]


def counts(rows: Sequence[Row]) -> tuple[int, ...]:
    """Accepted tokens and calls of the target; fewer are drafted elsewhere, for what follows the end is cut."""
    total = sum((row.stats for row in rows), Stats())
    return total.accepted, total.target_calls


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(("sampler", "rule"), [(GREEDY, TOKEN), (SAMPLE, COUPLED)], ids=["greedy", "coupled"])
def test_rows_come_and_go(sampler: Sampling, rule: Any, ahead: bool) -> None:
    """Texts, drafts and what stood of them are those of the same draft beside the target, going ahead or not."""
    local = Decoder(scorer(TARGET), ModelDrafter(scorer(DRAFT)), rule.verify, Fixed(3), 3, rule.rng)
    want = generate(local, asked(sampler))
    with serving(ModelDrafter(scorer(DRAFT)), VOCAB) as port, connected(port, VOCAB, ahead=ahead, timeout=5.0) as far:
        rows = generate(replace(local, drafter=far), asked(sampler))
    assert texts(rows) == texts(want)
    assert counts(rows) == counts(want)


def test_real_caches_follow_what_is_committed() -> None:
    """A tiny model goes ahead on its cache and comes back, from right guesses and from wrong ones."""
    some = [request(range(1, 4 + key), 12 + key, GREEDY, key=key) for key in range(4)]
    for seed, right in ((1, True), (2, False)):
        drafts = [ModelDrafter(CausalScorer(tiny(FAMILIES["llama"], seed))) for _ in range(2)]
        local = Decoder(CausalScorer(tiny(FAMILIES["llama"], 1)), drafts[0], TOKEN.verify, Fixed(4), 2)
        there = generate(replace(local, drafter=RemoteDrafter(Here(drafts[1]), HF_VOCAB)), some)
        here = generate(local, some)
        assert texts(there) == texts(here) and counts(there) == counts(here)
        assert bool(counts(there)[0] > 20) == right


def test_the_server_has_the_next_draft_ready_where_all_stood() -> None:
    """Going ahead saves the wait: no token is drafted after the question, if the bonus token was guessed too."""
    passes, waits = [0], list[int]()

    class Counted(TableScorer):
        def extend(self, *args: Any, **named: Any) -> Any:
            passes[0] += 1
            return super().extend(*args, **named)

    class Watched(DraftRows):
        def draft(self, asking: Sequence[Served]) -> None:
            before = passes[0]
            super().draft(asking)
            waits.append(passes[0] - before)

    for ahead in (True, False):
        link = Here(ModelDrafter(Counted(TARGET, VOCAB)))
        link.rows = Watched(link.rows.drafter, 64)
        far = RemoteDrafter(link, VOCAB, ahead=ahead)
        generate(Decoder(scorer(TARGET), far, TOKEN.verify, Fixed(2)), [request((0, 2), 12, GREEDY)])
    assert waits == [2, 0, 0, 0, 2, 2, 2, 2]


def test_two_clients_share_the_passes_of_one_server() -> None:
    local = Decoder(scorer(TARGET), ModelDrafter(scorer(DRAFT)), MATCH.verify, Fixed(3), 2)
    want, found = generate(local, asked()), dict[int, list[Row]]()
    with (
        serving(ModelDrafter(scorer(DRAFT)), VOCAB) as port,
        connected(port, VOCAB, timeout=5.0) as first,
        connected(port, VOCAB, timeout=5.0) as second,
    ):

        def work(name: int, far: RemoteDrafter) -> None:
            found[name] = generate(replace(local, target=scorer(TARGET), drafter=far), asked())

        threads = [threading.Thread(target=work, args=each) for each in enumerate((first, second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    for rows in found.values():
        assert texts(rows) == texts(want) and counts(rows) == counts(want)
    assert len(found) == 2


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    mixed = [replace(each, sampler=(GREEDY, SAMPLE)[key % 2]) for key, each in enumerate(asked())]
    local = Decoder(scorer(TARGET), ModelDrafter(scorer(DRAFT)), BLOCK.verify, Fixed(3), 3)
    far = RemoteDrafter(Here(ModelDrafter(scorer(DRAFT))), VOCAB, trust=True)
    assert texts(generate(replace(local, drafter=far), mixed)) == texts(generate(local, mixed))


def test_a_remote_draft_in_a_choice_and_under_a_chain() -> None:
    """Beside copies, and drafting for a draft, whose texts are cut again and again."""
    link = Here(ModelDrafter(scorer(DRAFT)))
    plain = Decoder(scorer(TARGET), NoDraft(), TOKEN.verify, Fixed(4), 2)
    for made in (
        Choice([Lookup(), RemoteDrafter(link, VOCAB)]),
        ChainDrafter(scorer(PAIRS["same"][0]), RemoteDrafter(link, VOCAB), VOCAB),
    ):
        rows = generate(replace(plain, drafter=made), asked())
        assert texts(rows) == texts(generate(plain, asked())) and counts(rows)[0]


def test_too_many_rows_are_refused_and_decoded_plainly() -> None:
    plain = Decoder(scorer(TARGET), NoDraft(), TOKEN.verify, Fixed(3), 3)
    with serving(ModelDrafter(scorer(DRAFT)), VOCAB, most_rows=1) as port, connected(port, VOCAB, timeout=5.0) as far:
        rows = generate(replace(plain, drafter=far), asked())
    assert texts(rows) == texts(generate(plain, asked()))
    assert sum((row.stats for row in rows), Stats()).undrafted["refused"]


def test_settings_of_sampling_travel() -> None:
    sampling = Sampling(
        temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.2, logit_bias={3: -2.0}, min_new_tokens=2,
        eos=frozenset([1]),
    )  # fmt: skip
    opened = OpenRow(1, DraftMode.LAW, settings_of(sampling), (1, 2), 1)
    assert repr(opened.sampler()) == repr(sampling)
    assert repr(replace(opened, mode=DraftMode.GUESS).sampler()) == repr(replace(sampling, temperature=0.0))


# ---- as users write it ------------------------------------------------------------------------------------------


def test_the_embedded_draft_over_tcp() -> None:
    """By name, with the tokenizer compared, and the same text as plain decoding."""
    served, vocabulary = build("embedded", "float32")
    with serving(served, vocabulary.size, vocabulary=vocabulary) as port:
        engine = load(draft=f"tcp://127.0.0.1:{port}?timeout-ms=20000", gamma=3)
        assert "guesses" in " ".join(engine.notes) and "toy" in " ".join(engine.notes)
        found = engine.generate("def f(x):", max_new_tokens=12)[0]
        assert found.tokens == engine.generate("def f(x):", max_new_tokens=12, plain=True)[0].tokens
        assert found.stats.accepted and not found.stats.undrafted
        wrong = VocabularySketch.of(vocabulary.size, load_tokenizer(EMBEDDED / "target"))
        assert vocabulary.fits(wrong) and not vocabulary.fits(VocabularySketch(vocabulary.size, ("other",)))


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        ("tcp://nowhere", "write tcp://HOST:PORT"),
        ("tcp:localhost:80", "write tcp://HOST:PORT"),
        ("tcp://h:1?timeout-ms=0", "milliseconds above 0"),
        ("tcp://h:1?timeout-ms=nan", "milliseconds above 0"),
        ("tcp://h:1?top=0", "candidates"),
        ("tcp://h:1?speed=9", "no option 'speed'"),
        ("tcp://h:1?key-file=missing.key", "missing.key"),
        ("lookup>tcp://h:1", "cannot be drafted for"),
    ],
)
def test_a_wrong_address_is_one_sentence(draft: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        drafter(draft, BuildContext(scorer(TARGET)))
    assert "\n" not in str(error.value)


def test_a_server_that_is_not_there_is_a_note() -> None:
    engine = load(draft="tcp://127.0.0.1:1?timeout_ms=50", gamma=2)
    assert "cannot be reached" in engine.notes[0]
    assert engine.generate("a", max_new_tokens=4)[0].stats.undrafted == {"disconnected": 3}


@pytest.mark.parametrize(
    ("draft", "says"),
    [("lookup", "--tokenizer"), ("tcp://h:1", "pass on"), ("exit:3", "--tokenizer"), ("nonsense/none", "nonsense")],
)
def test_a_draft_that_cannot_be_served_says_why(draft: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build(draft)


def test_copies_are_served_for_a_tokenizer_that_is_named() -> None:
    copies, vocabulary = build("lookup", tokenizer=str(EMBEDDED / "target"))
    assert vocabulary.sketch and isinstance(copies, Lookup)
    with pytest.raises(ValueError, match="cannot draft for itself"):
        build("exit:3", tokenizer=str(EMBEDDED / "target"))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_tls(tmp_path: Path) -> None:
    """Whoever has no reason to believe the certificate does not connect."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*made, "-keyout", str(key), "-out", str(cert), *names], check=True, capture_output=True)
    plain = Decoder(scorer(TARGET), NoDraft(), TOKEN.verify, Fixed(3))
    with serving(ModelDrafter(scorer(DRAFT)), VOCAB, tls=tls_context(cert, key)) as port:
        with connected(port, VOCAB, tls=True, ca_file=str(cert), timeout=5.0) as far:
            rows = generate(replace(plain, drafter=far), asked())
            assert texts(rows) == texts(generate(plain, asked())) and counts(rows)[0]
        with connected(port, VOCAB, tls=True) as stranger:
            assert isinstance(stranger.link, DraftConnection) and "certificate" in stranger.link.first_word(5).lower()
    with pytest.raises(ValueError, match="no certificate"):
        tls_context(key, cert)
    assert isinstance(tls_context(cert, key), ssl.SSLContext)
