"""The command line, on a tiny random pair whose tokens are bytes, and on an engine that only writes down."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.text import Text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import Result

import slipstream
from slipstream.cli import app as cli
from slipstream.cli.app import say
from slipstream.core.model_options import ModelOptions
from slipstream.core.stats import Stats
from slipstream.engine.defaults import Defaults
from slipstream.engine.engine import Interrupted
from slipstream.engine.generation import Completion, Piece
from slipstream.engine.load import load
from terminal import run
from toys import FAMILIES, tiny

CONTEXT = 64
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


def save_tokenizer(folder: Path, template: str | None = None) -> None:
    vocab = {sign: number for number, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab={**vocab, "<eos>": 256}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folders = []
    for seed, name in enumerate(("target", "draft")):
        folder = tmp_path_factory.mktemp(name)
        sizes = {"vocab_size": 257, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        sizes |= {"num_attention_heads": 2, "max_position_embeddings": CONTEXT, "initializer_range": 0.02}
        tiny(FAMILIES["llama"], seed, **sizes).save_pretrained(folder)
        save_tokenizer(folder, TEMPLATE if name == "target" else None)
        folders.append(str(folder))
    return folders[0], folders[1]


@pytest.fixture
def generate(pair: tuple[str, str]) -> Callable[..., Result]:
    def call(*arguments: str, **rest: Any) -> Result:
        fixed = ["--target", pair[0], "--draft", pair[1], "--max-new-tokens", "12"]
        return run("generate", *fixed, *arguments, **rest)

    return call


def completions(pair: tuple[str, str], *prompts: Any, **options: Any) -> list[Completion]:
    return load(*pair).generate(prompts, **{"max_new_tokens": 12, **options})


def by_index(result: Result) -> list[dict[str, Any]]:
    return sorted(map(json.loads, result.stdout.splitlines()), key=lambda line: line["index"])


def complaints(result: Result) -> list[str]:
    """The lines on stderr, without the loading bars of transformers, which other tests may have switched on."""
    lines = re.split(r"[\r\n]+", result.stderr)
    return [line for line in lines if line and not line.startswith("Loading weights")]


# ---- output -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [[], ["--stream"]])
def test_text_follows_the_prompt(generate: Callable[..., Result], pair: tuple[str, str], mode: list[str]) -> None:
    one, two = completions(pair, "def f", "b")
    result = generate("def f", *mode)
    assert (result.exit_code, result.stdout, complaints(result)) == (0, f"def f{one.text}\n", [])
    result = generate("def f", "b", *mode)
    assert result.stdout == f"==> prompt 1 <==\ndef f{one.text}\n\n==> prompt 2 <==\nb{two.text}\n"


def test_json_lines(generate: Callable[..., Result], pair: tuple[str, str]) -> None:
    result = generate("a", "日本", "--json", "--temperature", "0.9", "--seed", "3", "--gamma", "5")
    lines = by_index(result)
    expected = completions(pair, "a", "日本", temperature=0.9, seed=3)
    assert [line["index"] for line in lines] == [0, 1]
    for line, completion in zip(lines, expected, strict=True):
        assert line["text"] == completion.text
        assert tuple(line["tokens"]) == completion.tokens
        assert (line["finish_reason"], line["prompt_tokens"]) == ("length", completion.prompt_tokens)
        assert line["stats"].keys() == completion.stats.as_dict().keys()
        assert line["stats"]["emitted"] == 12


def test_samples_of_a_prompt_have_lines_of_their_own(generate: Callable[..., Result], pair: tuple[str, str]) -> None:
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    want = [done.text for done in completions(pair, "a", "b", n=2, **sampled)]
    assert len(set(want)) == 4
    options = ["a", "b", "--n", "2", "--temperature", "1", "--seed", "3", "--gamma", "5"]
    lines = by_index(generate(*options, "--json"))
    assert [line["text"] for line in lines] == want
    places = [(line["index"], line["prompt"], line["sample"]) for line in lines]
    assert places == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    titles = [f"prompt {prompt}, sample {sample}" for prompt in (1, 2) for sample in (1, 2)]
    shown = zip(titles, "aabb", want, strict=True)
    whole = "\n".join(f"==> {title} <==\n{prompt}{text}\n" for title, prompt, text in shown)
    assert generate(*options, "--stream").stdout == generate(*options).stdout == whole


def test_json_has_logprobs_and_echo(generate: Callable[..., Result], pair: tuple[str, str]) -> None:
    sampled = ("--temperature", "1", "--top-k", "1")
    line = json.loads(generate("ab", "--json", "--logprobs", "2", "--echo", *sampled).stdout)
    [want] = completions(pair, "ab", logprobs=2, temperature=1.0, top_k=1)
    assert line["text"] == f"ab{want.text}" and want.logprobs
    assert [each["token"] for each in line["logprobs"]] == list(want.tokens)
    for each in line["logprobs"]:
        assert each["logprob"] == 0.0 and each["top"][0] == [each["token"], 0.0]
        assert each["top"][1][1] is None  # impossible: JSON has no -inf
    assert generate("ab", "--echo").stdout == generate("ab").stdout  # the prompt is printed anyway


def test_what_ends_a_text(generate: Callable[..., Result], pair: tuple[str, str]) -> None:
    tokens = completions(pair, "a")[0].tokens
    end = tokens[3]
    first = tokens.index(end)
    line = json.loads(generate("a", "--json", "--stop-token-ids", str(end)).stdout)
    assert (line["tokens"], line["finish_reason"]) == (list(tokens[: first + 1]), "stop")
    forbidden = json.loads(generate("a", "--json", "--logit-bias", f"{end}=-inf").stdout)["tokens"]
    assert end not in forbidden and forbidden[:first] == list(tokens[:first])


def test_plain_and_a_target_alone_draft_nothing(generate: Callable[..., Result], pair: tuple[str, str]) -> None:
    plain, drafted = (json.loads(generate("a", "--json", *more).stdout) for more in (["--plain"], []))
    assert plain["stats"]["drafted"] == 0 < drafted["stats"]["drafted"]
    assert plain["tokens"] == drafted["tokens"]
    alone = run("generate", "a", "--target", pair[0], "--max-new-tokens", "3", "--json")
    assert json.loads(alone.stdout)["stats"]["drafted"] == 0


@pytest.mark.parametrize(("prompts", "no_color"), [(["a"], None), (["a", "b"], None), (["a"], "1")])
def test_explain_in_a_file_has_marks_and_no_escapes(
    generate: Callable[..., Result], prompts: list[str], no_color: str | None
) -> None:
    colour = {"NO_COLOR": no_color, "FORCE_COLOR": "1"} if no_color else {}
    result = generate(*prompts, "--explain", **colour)
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert "round  kept of drafted" in result.stdout and "draft acceptance rate" in result.stdout
    assert ("prompt 2 ──" in result.stdout) is (len(prompts) > 1)


def test_explain_on_a_terminal_has_colours(generate: Callable[..., Result]) -> None:
    assert "\x1b[32m" in generate("a", "--explain", FORCE_COLOR="1").stdout


def test_a_person_who_watches_gets_figures(generate: Callable[..., Result]) -> None:
    result = generate("a", FORCE_COLOR="1", NO_COLOR="1")
    assert re.search(r"12 tokens, \d\.\d\d per target call, [\d.]+ per second", result.stderr)
    assert "12 tokens," not in result.stdout


# ---- prompts ----------------------------------------------------------------------------------------------------


def test_human_output_of_every_form(generate: Callable[..., Result], pair: tuple[str, str]) -> None:
    engine = load(*pair)
    ids = list(engine.encode("abc"))
    chat = [{"role": "user", "content": "hi"}]
    text, reply = (completion.text for completion in completions(pair, "abc", chat))
    assert generate("--prompts", "-", stdin=json.dumps({"tokens": ids})).stdout == f"abc{text}\n"
    assert generate("--prompts", "-", stdin=json.dumps({"messages": chat})).stdout == f"hi\n\n{reply}\n"
    assert generate("--chat", "hi").stdout == generate("--chat", "hi", "--stream").stdout == f"hi\n\n{reply}\n"
    explained = generate("--chat", "hi", "--explain").stdout  # what was written, without the template's marks
    assert "\nhi\n\n" in explained and "[user]" not in explained


def test_bad_prompts_do_not_take_the_others_with_them(
    generate: Callable[..., Result], pair: tuple[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "p.jsonl"
    lines = ['{"prompt": "a"}', "{oops", json.dumps({"prompt": "x" * 200}), '{"tokens": [999]}', '{"prompt": "b"}']
    file.write_text("\n".join(lines))
    result = generate("--prompts", str(file), "--json")
    assert result.exit_code == 2
    found = by_index(result)
    one, two = completions(pair, "a", "b")
    assert [found[0]["text"], found[4]["text"]] == [one.text, two.text]
    errors = [line["error"] for line in found[1:4]]
    assert [line["index"] for line in found] == [0, 1, 2, 3, 4]
    assert complaints(result) == [f"slipstream: {error}" for error in errors]
    assert errors[0].startswith(f"{file}:2: this is not JSON")
    assert errors[1].startswith(f"{file}:3: the prompt has 200 tokens, but")
    assert errors[2].startswith(f"{file}:4: the prompt has token ids outside 0..256")
    human = generate("--prompts", str(file))
    assert human.exit_code == 2
    assert human.stdout == f"==> {file}:1 <==\na{one.text}\n\n==> {file}:5 <==\nb{two.text}\n"


@pytest.mark.parametrize("mode", [[], ["--stream"], ["--explain"]])
def test_only_bad_prompts(mode: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.engine.load.load", lambda *_, **__: pytest.fail("nothing to load for"))
    result = run("generate", "", *mode)
    assert (result.exit_code, result.stdout) == (2, "")
    assert complaints(result) == ["slipstream: prompt 1: the prompt is empty."]


def test_a_chat_template_may_refuse(pair: tuple[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "strict"
    LlamaForCausalLM.from_pretrained(pair[0]).save_pretrained(folder)
    save_tokenizer(folder, "{{ raise_exception('only one turn, please') }}")
    result = run("generate", "--chat", "hi", "--target", str(folder))
    assert result.exit_code == 2
    said = "the chat template refuses these messages: only one turn, please"
    assert complaints(result) == [f"slipstream: prompt 1: {said}"]


def test_no_chat_template(pair: tuple[str, str]) -> None:
    result = run("generate", "--chat", "hi", "--target", pair[1])
    assert result.exit_code == 2
    assert "has no chat template" in complaints(result)[0]


# ---- what is wrong is one sentence ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["bogus"], "No such command 'bogus'."),
        (["generate", "x", "--gama", "3"], "No such option: --gama"),
        (["generate", "x", "--gamma", "-1"], "Invalid value for '--gamma'"),
        (["generate", "x", "--gamma", "many"], "Invalid value for '--gamma'"),
        (["generate", "x", "--max-tokens", "0"], "Invalid value for '--max-new-tokens'"),
        (["generate", "x", "--top-p", "2"], "Invalid value for '--top-p'"),
        (["generate", "x", "--dtype", "int3"], "Invalid value for '--dtype': 'int3' is not one of 'auto'"),
        (["generate", "x", "--seed"], "Option '--seed' requires an argument."),
        (["generate", "x", "--stop", ""], "--stop is empty"),
        (["generate", "x", "--logit-bias", "5"], "--logit-bias '5' is not possible: write a token id and a number"),
        (["generate", "x", "--logit-bias", "5=nan"], "logit_bias={5: nan} is not possible"),
        (["generate", "x", "--logit-bias", "5=1", "--logit-bias", "5=2"], "--logit-bias names the token 5 twice"),
        (["generate", "x", "--logprobs", "1"], "--logprobs are written as JSON only: add --json."),
        (["chat", "--raw", "--system", "x"], "--system and --raw exclude each other"),
        (["chat", "--target", "no/such-model"], "cannot load the model 'no/such-model'"),
        (["generate", "x", "--json", "--stream"], "--stream and --json exclude each other: choose one."),
        (["generate", "x", "--json", "--explain"], "--explain and --json exclude each other: choose one."),
        (["generate", "x", "--target", "no/such-model"], "cannot load the model 'no/such-model'"),
        (["generate", "x", "--target", "."], "cannot load the model '.'"),
        (["generate", "x", "--tree", "1000,1000,1000"], "a tree of shape (1000, 1000, 1000) is too large"),
        (["generate", "x", "--tree", "3,2", "--gamma", "4"], "tree and gamma=4 exclude each other"),
        *(
            (["generate", "x", "--tree", bad], f"Invalid value for '--tree': '{bad}' is not")
            for bad in ("", "3,x", "2;1")
        ),
        (["generate", "x", "--tree", "0,1"], "a tree of shape (0, 1) is not possible: give 1 or more"),
        (
            ["generate", "x", "--verify", "lenient:0.5", "--lossless"],
            "verify='lenient:0.5' is lossy, and lossless=True",
        ),
        (["check", "x", "--tree", "3,2", "--gamma", "4"], "tree and gamma=4 exclude each other"),
        (["check", "--samples", "999999999999"], "samples=999999999999 cannot be checked: use 1000000 or fewer"),
        (["generate", "x", "--device", "meta"], "device='meta' cannot be used"),
        (["generate", "x", "--device", "bogus"], "device='bogus' cannot be used: "),
        (["draft", "build", "datastore:", "x"], "'datastore:' cannot be built: give ngram:FILE, datastore:DIR"),
    ],
)
def test_errors(arguments: list[str], sentence: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(complaints(result)) == 1
    assert complaints(result)[0].startswith(f"slipstream: {sentence}")
    assert "Traceback" not in result.output


def test_greedy_ignores_top_p_and_says_so(generate: Callable[..., Result]) -> None:
    result = generate("a", "--top-p", "0.9", "--min-p", "0.1", "--json")
    assert result.exit_code == 0
    assert complaints(result) == ["slipstream: note: --temperature 0 is greedy and ignores --top-p, --min-p."]
    assert complaints(generate("a", "--top-p", "0.9", "--temperature", "1", "--json")) == []


# ---- an engine that writes down ---------------------------------------------------------------------------------


def completion(text: str, reason: str = "length") -> Completion:
    return Completion(text, tuple(text.encode()), reason, Stats(emitted=len(text), target_calls=1), 1)


class Recorder:
    def __init__(self) -> None:
        self.loaded: tuple[Any, ...] = ()
        self.asked: dict[str, Any] = {}
        self.error: BaseException | None = None
        self.notes: tuple[str, ...] = ()

    def __call__(self, *models: Any, **settings: Any) -> Recorder:
        self.loaded = (*models, settings)
        return self

    frame = None
    defaults = Defaults()

    def encode(self, prompt: Any) -> tuple[int, ...]:
        return (1,)

    def decode(self, tokens: Sequence[int]) -> str:
        return "?"

    def generate(
        self, prompts: Any, on_round: Any = None, on_completion: Any = None, **options: Any
    ) -> list[Completion]:
        self.asked = options
        if self.error:
            raise self.error
        done = {place: completion("ok") for place in range(len(prompts))}
        for place in reversed(done):
            if on_completion:
                on_completion(place, done[place])
        return [*done.values()]

    def stream_batch(self, prompts: Any, **options: Any) -> Iterator[tuple[int, Piece]]:
        self.asked = options
        yield 0, Piece("he", 1, "draft")
        if self.error:
            raise self.error
        yield 0, Piece("llo", 2, "bonus", completion("hello"))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr("slipstream.engine.load.load", recorder)
    return recorder


def test_defaults(engine: Recorder) -> None:
    assert run("generate", "x").stdout == "xok\n"
    assert engine.loaded == (ModelOptions(gamma="auto", verify="block"), {"progress": say})
    off = dict.fromkeys(("lossless", "plain", "echo", "ignore_eos"), False)
    penalties = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert engine.asked == {"max_new_tokens": 128, "stop": [], "seed": 0, "num_beams": 1} | off | penalties


def test_every_option_arrives(engine: Recorder) -> None:
    models = "--target big --draft small --dtype float32 --device cpu --gamma 3 --batch-size 2 --plain"
    rules = "--tree 3,2,1 --verify token --lossless --exact-shape --compile --task summarize"
    sampling = "--temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --typical-p 0.8 --seed 7 --max-new-tokens 9"
    penalties = "--repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty -0.3"
    ends = "--stop-token-ids 3 --stop-token-id 4 --min-tokens 2 --max-time 1.5 --no-repeat-ngram-size 3"
    biases = "--logit-bias 42=-inf --logit-bias 7=1.5 --logprobs 2 --echo --json --ignore-eos --bad-words no"
    stops = ["--stop", r"\n\n", "--stop", r"a\\n\t", "--stop", "é\\"]
    more = [*models.split(), *rules.split(), *sampling.split(), *penalties.split(), *ends.split(), *biases.split()]
    result = run("generate", "x", *more, *stops)
    assert result.exit_code == 0
    chosen = {"gamma": 3, "tree": (3, 2, 1), "verify": "token", "exact_shape": True, "compile": True, "batch_size": 2}
    models = ModelOptions("big", "small", task="summarize", dtype="float32", device="cpu", **chosen)
    assert engine.loaded == (models, {"progress": say})
    rules = {"lossless": True, "plain": True}
    sampling = {"temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8, "seed": 7}
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": -0.3}
    ends = {"stop_token_ids": [3, 4], "min_new_tokens": 2, "max_time": 1.5, "no_repeat_ngram_size": 3}
    ends |= {"max_new_tokens": 9, "stop": ["\n\n", "a\\n\t", "é\\"], "ignore_eos": True, "bad_words": ["no"]}
    biases = {"logit_bias": {42: -math.inf, 7: 1.5}, "logprobs": 2, "echo": True, "num_beams": 1}
    assert engine.asked == {**rules, **sampling, **penalties, **ends, **biases}


def test_names_of_other_engines(engine: Recorder) -> None:
    run("generate", "x", "--model", "a", "--draft-model", "b", "--num_speculative_tokens", "2", "--max-tokens", "3")
    models = engine.loaded[0]
    assert (models.target, models.draft, models.gamma) == ("a", "b", 2)
    assert engine.asked["max_new_tokens"] == 3


@pytest.mark.parametrize(
    ("mode", "stdout"),
    [([], "==> prompt 1 <==\nxall\n\n==> prompt 2 <==\nypar\n"), (["--json"], None), (["--explain"], "")],
)
def test_ctrl_c_prints_what_there_is(engine: Recorder, mode: list[str], stdout: str | None) -> None:
    done = [completion("all"), completion("par", "interrupted"), completion("", "interrupted")]
    engine.error = Interrupted(done)
    result = run("generate", "x", "y", "z", *mode)
    assert (result.exit_code, result.stderr) == (130, "")
    if stdout is None:
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        ends = [(line["text"], line["finish_reason"]) for line in lines]
        assert ends == [("all", "length"), ("par", "interrupted"), ("", "interrupted")]
    else:
        assert result.stdout == stdout


def test_ctrl_c_while_streaming(engine: Recorder) -> None:
    engine.error = KeyboardInterrupt()
    result = run("generate", "x", "--stream")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "xhe\n", "")


def test_ctrl_c_while_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("slipstream.engine.load.load", interrupt)
    result = run("generate", "x")
    assert (result.exit_code, result.output) == (130, "slipstream: interrupted.\n")


def test_damaged_weights_are_one_sentence(engine: Recorder) -> None:
    engine.error = FloatingPointError("big gives non-finite logits\nfor position 3.")
    result = run("generate", "x")
    assert (result.exit_code, result.stderr) == (2, "slipstream: big gives non-finite logits for position 3.\n")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("x: DefaultCPUAllocator: can't allocate memory: y")])
def test_too_little_memory_is_one_sentence(engine: Recorder, error: Exception) -> None:
    engine.error = error
    result = run("generate", "x")
    assert result.exit_code == 2 and complaints(result)[-1].startswith("slipstream: there is not enough memory: take")


def test_a_bug_of_ours_is_not_hidden(engine: Recorder) -> None:
    engine.error = AssertionError("ours")
    with pytest.raises(AssertionError, match="ours"):
        run("generate", "x")


# ---- the command itself -----------------------------------------------------------------------------------------


def test_help_groups_the_options() -> None:
    text = run("generate", "--help").stdout
    places = [text.index(f"─ {panel} ─") for panel in ("Models", "Sampling", "Output")]
    assert places == sorted(places)


def test_alone_it_shows_its_help() -> None:
    result = run()
    assert result.exit_code == 0 and "Usage: " in result.stdout and "generate" in result.stdout


def test_version_stands_in_one_place() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"] and "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "slipstream.version.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", slipstream.__version__) and "__version__" in dir(slipstream)
    assert run("--version").stdout == f"slipstream {slipstream.__version__}\n"


def every_command(words: list[str], command: Any) -> Iterator[tuple[list[str], Any]]:
    yield words, command
    for name, one in getattr(command, "commands", {}).items():
        yield from every_command([*words, name], one)


EVERY_COMMAND = list(every_command([], typer.main.get_command(cli.app)))


@pytest.mark.parametrize(("words", "command"), EVERY_COMMAND, ids=[" ".join(words) for words, _ in EVERY_COMMAND])
def test_help_has_examples_and_says_all_that_is_written(words: list[str], command: Any) -> None:
    shown = run(*words, "--help", COLUMNS="1000").stdout
    assert shown == run(*words, "-h", COLUMNS="1000").stdout
    assert f"Example: slipstream {' '.join(words)}".rstrip() in shown
    for parameter in command.params:
        text = getattr(parameter, "help", None) or ""
        assert Text.from_markup(text).plain.count("[") == text.replace("\\[", "[").count("["), text


def test_shell_completion() -> None:
    assert "--install-completion" in run("--help").stdout and "--show-completion" in run("--help").stdout
    script = beneath_bash("--show-completion")
    assert script.returncode == 0 and "_SLIPSTREAM_COMPLETE=complete_bash" in script.stdout
    asked = {"_SLIPSTREAM_COMPLETE": "complete_bash", "COMP_WORDS": "slipstream draft ", "COMP_CWORD": "2"}
    assert as_process([], asked).stdout.split() == ["build", "list", "forget"]
    asked = {"_SLIPSTREAM_COMPLETE": "complete_bash", "COMP_WORDS": "slipstream generate --max-n", "COMP_CWORD": "2"}
    assert as_process([], asked).stdout.split() == ["--max-new-tokens"]


def test_completion_is_installed_for_a_shell(tmp_path: Path) -> None:
    done = beneath_bash("--install-completion", {"HOME": str(tmp_path)})
    assert done.returncode == 0 and not done.stderr
    assert "slipstream" in (tmp_path / ".bashrc").read_text()


def beneath_bash(argument: str, more: dict[str, str] | None = None) -> Any:
    """`python -m slipstream ARGUMENT` started by bash: the option finds the shell by looking at its parent."""
    # The command after it keeps bash from replacing itself by the process.
    return as_process([argument], more, shell=["bash", "-c", '"$@"; exit $?', "bash"])


def as_process(
    arguments: list[str], more: dict[str, str] | None = None, shell: Sequence[str] = (), **streams: Any
) -> Any:
    """`python -m slipstream ARGUMENTS` as a process of its own, started by the command `shell` if there is one."""
    path = os.pathsep.join([str(Path(cli.__file__).parents[2]), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, **(more or {})}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    command = [*shell, sys.executable, "-m", "slipstream", *arguments]
    return subprocess.run(command, env=environment, text=True, **streams)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--alpha", "0.8", "--cost", "0.1", "--json"]])
def test_a_full_disk_behind_standard_output(arguments: list[str], buffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = as_process(arguments, {"PYTHONUNBUFFERED": buffered}, stdout=full)
    assert done.returncode == cli.BROKEN_PIPE
    assert done.stderr == "slipstream: cannot write to standard output: No space left on device.\n"


@pytest.mark.parametrize(
    ("closed", "code", "sentence"),
    [
        (">&-", cli.BROKEN_PIPE, "slipstream: standard output is closed: send it to a file, or to /dev/null.\n"),
        ("2>&-", 0, ""),
        ("<&-", 0, ""),
    ],
)
def test_streams_that_were_closed_before(closed: str, code: int, sentence: str) -> None:
    done = as_process(["--version"], shell=["sh", "-c", f'exec "$@" {closed}', "sh"])
    assert (done.returncode, done.stderr) == (code, sentence)
    assert done.stdout == ("" if code else f"slipstream {slipstream.__version__}\n")


@pytest.mark.slow
def test_our_warnings_are_notes(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "c++").write_text("#!/bin/sh\n")
    (tmp_path / "c++").chmod(0o755)
    broken = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "file"), "CXX": str(tmp_path / "c++")}
    done = as_process(["generate", "a", "--max-new-tokens", "1", "--plain"], broken)
    assert done.returncode == 0
    if sys.platform.startswith("linux"):
        assert done.stderr.startswith("slipstream: note: linear layers run slower") and done.stderr.count("\n") == 1


def test_a_reader_that_goes_away() -> None:
    """`slipstream --help | true`, as a process: no traceback, not even at exit."""
    read, write = os.pipe()
    os.close(read)
    done = as_process(["--help"], stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (cli.BROKEN_PIPE, "")


def test_answers_have_the_form_that_was_asked_for(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"enum": [{"a": 1}, {"b": 2}]}))
    lark = tmp_path / "form.lark"
    lark.write_text('start: "x" "y"+ "z"')
    forms = {
        ("--json-schema", str(schema)): r'\{"(a":1|b":2)\}',
        ("--regex", "[0-9]{3}"): "[0-9]{3}",
        ("--regex", ""): "",
        ("--choice", "yes", "--choice", "no"): "yes|no",
        ("--grammar", str(lark)): "xy+z?",
    }
    for form, fits in forms.items():
        done = run("generate", "x", "--json", "--max-new-tokens", "12", *form)
        assert done.exit_code == 0, done.stderr
        assert re.fullmatch(fits, json.loads(done.stdout)["text"].replace(" ", "")), form
    both = run("generate", "x", "--regex", "a", "--choice", "b")
    assert both.exit_code == 2 and "--regex, --choice exclude each other" in both.stderr
    schema.write_text("{")
    assert "no JSON" in run("generate", "x", "--json-schema", str(schema)).stderr
    assert "no such file" in run("generate", "x", "--grammar", str(tmp_path / "none")).stderr
