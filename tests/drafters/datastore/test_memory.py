"""The memory of responses: nearest first, kept apart, bounded, and whole after a kill in mid-write."""

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from processes import forks
from slipstream.drafters.datastore.embedding import InputEmbeddings, VectorIndex, unit
from slipstream.drafters.datastore.memory import NamespaceLimits, ResponseMemory, Totals, forget, read_totals

DIMENSION = 8


class Spelled:
    """A request is its own vector: counts of its tokens."""

    name, dimension = "spelled", DIMENSION

    def __call__(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        return unit(np.bincount(np.array(tokens) % DIMENSION, minlength=DIMENSION).astype(np.float32))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "memory.sqlite"


@pytest.fixture
def memory(path: Path) -> Iterator[ResponseMemory]:
    memory = ResponseMemory(path, Spelled())
    yield memory
    memory.close()


def responses(memory: ResponseMemory, namespace: str, request: Sequence[int], count: int = 3) -> list[list[int]]:
    return [response.tolist() for _, response in memory.nearest(namespace, request, count)]


def test_the_nearest_requests_answer_first(memory: ResponseMemory) -> None:
    for request, response in (([1, 1, 1], [10]), ([1, 2], [20, 21]), ([5], [30])):
        memory.add("a", request, response)
    assert responses(memory, "a", [1]) == [[10], [20, 21], [30]]
    assert responses(memory, "a", [1, 1, 2, 2], 1) == [[20, 21]]
    assert memory.nearest("a", [1, 2], 1)[0][0] == pytest.approx(1, abs=1e-3)
    assert responses(memory, "a", [7], 0) == []


def test_namespaces_are_apart(memory: ResponseMemory) -> None:
    memory.add("a", [1], [10])
    memory.add("b", [1], [20])
    assert responses(memory, "a", [1]) == [[10]] and responses(memory, "b", [1]) == [[20]]
    assert responses(memory, "c", [1]) == responses(memory, "A", [1]) == responses(memory, "", [1]) == []
    forget(memory.path, "a")
    assert responses(memory, "a", [1]) == [] and responses(memory, "b", [1]) == [[20]]
    assert read_totals(memory.path) == [Totals("a", 0, 0), Totals("b", 1, 2 * DIMENSION + 4)]


def test_a_namespace_that_is_full_evicts_no_other(path: Path) -> None:
    memory = ResponseMemory(path, Spelled(), limits=NamespaceLimits(entries=4))
    memory.add("quiet", [1], [10])
    for token in range(40):
        memory.add("loud", [1], [token])
    assert responses(memory, "quiet", [1]) == [[10]]
    assert [total.entries for total in read_totals(memory.path)] in ([3, 1], [4, 1])
    memory.close()


def test_what_was_not_used_for_longest_goes_first(path: Path) -> None:
    memory = ResponseMemory(path, Spelled(), limits=NamespaceLimits(entries=3))
    for token in (1, 2, 3):
        memory.add("a", [token], [token])
    assert responses(memory, "a", [1], 1) == [[1]]  # used: younger than 2 and 3 now
    memory.add("a", [2], [2])  # known already: used as well
    memory.add("a", [4], [4])
    left = sorted(responses(memory, "a", [1, 2, 3, 4], 9))
    assert [4] in left and [3] not in left and len(left) < 4
    memory.close()
    again = ResponseMemory(path, Spelled())
    assert sorted(responses(again, "a", [1, 2, 3, 4], 9)) == left
    again.close()


def test_bytes_are_bounded(path: Path) -> None:
    limit = 1000
    memory = ResponseMemory(path, Spelled(), limits=NamespaceLimits(bytes=limit))
    for size in range(1, 60):
        memory.add("a", [size], list(range(size)))
        assert 0 < read_totals(memory.path)[0].bytes <= limit
    held = [len(response) for response in responses(memory, "a", [1], 99)]
    assert read_totals(memory.path)[0].bytes == sum(4 * size + 2 * DIMENSION for size in held)
    memory.add("a", [1], list(range(limit)))  # more than all room: not kept, and nothing has to go for it
    assert len(responses(memory, "a", [1], 99)) == len(held)
    memory.close()


def test_one_process_sees_what_another_writes_and_removes(path: Path, memory: ResponseMemory) -> None:
    other = ResponseMemory(path, Spelled())
    assert responses(memory, "a", [1]) == responses(other, "a", [1]) == []
    other.add("a", [1], [10])
    assert responses(memory, "a", [1]) == [[10]]
    memory.add("a", [1], [11])
    assert sorted(responses(other, "a", [1])) == [[10], [11]]
    forget(memory.path, "a")
    assert responses(memory, "a", [1]) == []
    other.add("a", [2], [12])
    assert responses(memory, "a", [1]) == [[12]]
    other.close()


def test_texts_are_for_the_owner_s_eyes(path: Path, memory: ResponseMemory) -> None:
    memory.add("a", [1], [10])
    assert {file.stat().st_mode & 0o077 for file in path.parent.iterdir()} == {0}


def in_sql(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)


def test_forgotten_bytes_are_gone_from_the_disk(path: Path, memory: ResponseMemory) -> None:
    secret = np.arange(70_000, 70_100, dtype="<u4").tobytes()
    memory.add("a", [1], np.frombuffer(secret, "<u4").tolist())
    memory.add("b", [1], [10])

    def on_disk() -> bool:
        in_sql(path, "PRAGMA wal_checkpoint(TRUNCATE)")
        return secret in path.read_bytes()

    assert on_disk()
    forget(memory.path, "a")
    assert not on_disk() and responses(memory, "b", [1]) == [[10]]


@pytest.mark.parametrize("limits", [{"entries": 0}, {"bytes": 0}])
def test_limits_are_checked(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        NamespaceLimits(**limits)


def test_empty_requests_are_refused(memory: ResponseMemory) -> None:
    for request, response in (([], [1]), ([1], [])):
        with pytest.raises(ValueError, match="at least one token"):
            memory.add("a", request, response)


def test_another_tokenizer_or_embedding_is_refused(path: Path) -> None:
    ResponseMemory(path, Spelled(), "ours").close()
    other = Spelled()
    other.name = "other"
    with pytest.raises(ValueError, match=r"another embedding .*\.$"):
        ResponseMemory(path, other, "ours")
    with pytest.raises(ValueError, match=r"another tokenizer .*\.$"):
        ResponseMemory(path, Spelled(), "theirs")
    ResponseMemory(path, Spelled()).close()  # nobody says which: not compared


def test_what_is_no_memory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"this is no database, but long enough to look like one" * 40)
    with pytest.raises(ValueError, match=r"damaged or no memory.*\.$"):
        ResponseMemory(tmp_path / "text", Spelled())
    with pytest.raises(OSError):
        ResponseMemory(tmp_path / "absent" / "folder", Spelled())


def test_a_failing_write_is_an_error_and_leaves_nothing(memory: ResponseMemory) -> None:
    memory.add("a", [1], [10])
    in_sql(memory.path, "CREATE TRIGGER no BEFORE INSERT ON entries BEGIN SELECT RAISE(ABORT, 'full'); END")
    with pytest.raises(OSError, match="full"):
        memory.add("a", [2], [20])
    in_sql(memory.path, "DROP TRIGGER no")
    assert responses(memory, "a", [2]) == [[10]] and read_totals(memory.path)[0].entries == 1
    memory.add("a", [2], [20])


# ---- several processes ------------------------------------------------------------------------------------------


def write(path: Path, first: int, told: Connection) -> None:
    """Add entries, and tell the number of each that was acknowledged, until the process is killed."""
    memory = ResponseMemory(path, Spelled())
    for number in range(first, first + 10**6):
        memory.add("shared", [number, number + 1], [number] * (1 + number % 50))
        told.send(number)


def test_two_write_and_one_is_killed_without_a_loss(path: Path) -> None:
    """All of them are killed in the end, each at some instruction; what each acknowledged is there and whole."""
    writers, acknowledged = [], [list[int]() for _ in range(3)]
    for place, lines in enumerate(acknowledged):
        heard, told = forks.Pipe(duplex=False)
        writers.append((forks.Process(target=write, args=(path, 10**6 * place, told), daemon=True), heard))
        writers[-1][0].start()
        told.close()
        lines.append(heard.recv())  # all of them run
    for last, ((process, heard), lines) in enumerate(zip(writers, acknowledged, strict=True)):
        lines += [heard.recv() for _ in range(15 * (last + 1))]  # the others go on meanwhile
        process.kill()
        with heard, suppress(EOFError, OSError):  # what was told before
            while True:
                lines.append(heard.recv())
        process.join(30)
    database = sqlite3.connect(path)
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    held = {}
    for vector, blob in database.execute("SELECT vector, response FROM entries"):
        response = np.frombuffer(blob, "<u4").tolist()
        number = response[0]
        assert response == [number] * (1 + number % 50)
        assert vector == Spelled()([number, number + 1]).astype("<f2").tobytes()
        held[number] = response
    counted = database.execute("SELECT entries, bytes FROM totals").fetchone()
    assert counted == (len(held), sum(2 * DIMENSION + 4 * len(response) for response in held.values()))
    database.close()
    for lines in acknowledged:
        assert len(lines) > 15 and set(lines) <= held.keys()
        assert sum(lines[0] <= number < lines[0] + 10**6 for number in held) - len(lines) in (0, 1)


def test_the_loss_of_an_entry_would_be_noticed(path: Path, memory: ResponseMemory) -> None:
    memory.add("shared", [1, 2], [1, 1])
    database = sqlite3.connect(path)
    database.execute("DELETE FROM entries")
    database.commit()
    assert database.execute("SELECT entries FROM totals").fetchone() == (1,)
    assert database.execute("SELECT count(*) FROM entries").fetchone() == (0,)
    database.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_opens_the_file_again(path: Path, memory: ResponseMemory) -> None:
    memory.add("a", [1], [10])
    child = os.fork()
    if not child:
        try:
            memory.add("a", [2], [20])
            os._exit(0 if len(responses(memory, "a", [1])) == 2 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sorted(responses(memory, "a", [1])) == [[10], [20]]


# ---- vectors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 5, 200])
def test_the_search_is_exact(size: int) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(size, DIMENSION)).astype(np.float32)
    held, half = VectorIndex(DIMENSION), size // 2
    held.add(np.arange(half), vectors[:half])
    held.add(np.arange(half, size), vectors[half:])
    query = rng.normal(size=DIMENSION).astype(np.float32)
    want = sorted(range(size), key=lambda i: -float(vectors[i] @ query))
    assert [name for _, name in held.search(query, 4)] == want[:4]
    odd = np.arange(1, size, 2)
    held.keep(odd)
    assert [name for _, name in held.search(query, 4)] == [i for i in want if i % 2][:4]


def test_of_equal_requests_the_latest_comes_first(memory: ResponseMemory) -> None:
    for token in (3, 4, 5):
        memory.add("a", [1], [token])
    assert responses(memory, "a", [1]) == [[5], [4], [3]]


# ---- embeddings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [16, 300])
def test_the_end_of_a_request_decides(width: int) -> None:
    torch.manual_seed(0)
    embed = InputEmbeddings(torch.randn(1000, width))
    policy, question, other = list(range(400)), list(range(400, 420)), list(range(500, 520))
    asked = embed([*policy, *question])
    assert asked.shape == (embed.dimension,) and np.linalg.norm(asked) == pytest.approx(1, abs=1e-4)
    near, far = embed([*policy[50:], *question]), embed([*policy, *other])
    assert asked @ near > asked @ far + 0.05
    assert embed.dimension == min(width, 256)


def test_the_name_tells_embeddings_apart() -> None:
    torch.manual_seed(0)
    weights = torch.randn(300, 8)
    assert InputEmbeddings(weights).name == InputEmbeddings(weights.clone()).name
    assert InputEmbeddings(weights).name != InputEmbeddings(weights + 1e-3).name
    assert InputEmbeddings(weights.bfloat16()).name.startswith("input-embeddings:")


def test_one_token_and_zero_weights_make_a_vector() -> None:
    embed = InputEmbeddings(torch.zeros(10, 4))
    assert embed([3]).tolist() == [0, 0, 0, 0]
