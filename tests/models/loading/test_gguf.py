"""Checkpoints of llama.cpp, written by its own package, read from their own codes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import slipstream
from slipstream.check import check
from slipstream.kernels.packing import QuantizedEmbedding, QuantizedLinear, inputs_as_they_are
from slipstream.models.loading.gguf_file import GgufFile
from slipstream.models.loading.gguf_tokenizer import tokenizer_of
from slipstream.models.loading.load import find_tokenizer, load_model
from toys.gguf_files import TEXT, as_it_is, finish, gap, interleaved, logits, raised, tiny, write
from toys.kernels import needs_kernel

gguf = pytest.importorskip("gguf")
pytestmark = needs_kernel


def plain(tied: bool = False, width: int = 64) -> Any:
    """A Llama whose queries have more heads than its keys."""
    return tiny("llama", hidden_size=width, intermediate_size=max(96, width), tie_word_embeddings=tied)


FAMILIES = {"llama": ("llama", interleaved), "qwen2": ("qwen2", as_it_is), "gemma3_text": ("gemma3", raised)}


def written(model: Any, file: Path, format: str, more: Any = None, **split: Any) -> dict[str, Tensor]:
    """Write a file, with `more` metadata -> what the matrices in it stand for, by the names of transformers."""
    config = model.config
    told = {"rope.dimension_count": config.hidden_size // config.num_attention_heads, "vocab_size": config.vocab_size}
    return write(model, file, *FAMILIES[config.model_type], told, format, more, **split)


def restored(model: Any, stands_for: dict[str, Tensor]) -> Any:
    """The model with the weights that a file stands for."""
    if FAMILIES[model.config.model_type][1] is interleaved:
        stands_for = {name: interleaved(name, each, model.config, (-1, 2)) for name, each in stands_for.items()}
    model.load_state_dict(stands_for, strict=False)
    return model.eval()


def layers(model: Any) -> dict[str, QuantizedLinear]:
    """The quantized layers by the names of their weights."""
    return {f"{name}.weight": each for name, each in model.named_modules() if isinstance(each, QuantizedLinear)}


CODES = dict.fromkeys(("Q8_0", "Q5_0", "Q5_1", "Q5_K", "IQ4_NL", "IQ4_XS", "MXFP4"), "int8?group=32")
CODES |= dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), "int4") | dict.fromkeys(("Q2_K", "Q3_K"), "int4?group=16")
CODES |= {"Q6_K": "int8?group=16"} | dict.fromkeys(("TQ1_0", "TQ2_0"), "int4?group=256")


@pytest.mark.parametrize("format", CODES)
def test_weights_are_exactly_what_the_files_say(format: str, tmp_path: Path) -> None:
    """Of layers and embeddings in codes, and of those that are read as numbers."""
    stands_for = written(plain(width=256), tmp_path / "tiny.gguf", format)
    loaded, numbers = load_model(tmp_path / "tiny.gguf"), load_model(tmp_path / "tiny.gguf", dequantize=True)
    found, embeddings = layers(loaded), loaded.get_input_embeddings()
    assert found.keys() == stands_for.keys() - {"model.embed_tokens.weight"} and len(found) == 15
    for name, layer in found.items():
        assert str(layer.precision) == CODES[format]
        assert torch.equal(interleaved(name, layer.plain_weight(), loaded.config), stands_for[name])
    assert isinstance(embeddings, QuantizedEmbedding) and not layers(numbers)
    assert torch.equal(embeddings.weight, stands_for["model.embed_tokens.weight"])
    assert torch.equal(embeddings(TEXT), stands_for["model.embed_tokens.weight"][TEXT])
    for name, weight in stands_for.items():
        assert torch.equal(interleaved(name, numbers.get_parameter(name), numbers.config), weight)


def test_control_a_weight_in_bfloat16_scales_is_not_what_the_file_says(tmp_path: Path) -> None:
    stands_for = written(plain(), tmp_path / "tiny.gguf", "Q4_1")
    name = "model.layers.0.mlp.up_proj.weight"
    layer = layers(load_model(tmp_path / "tiny.gguf"))[name]
    layer.scales.copy_(layer.scales.bfloat16())
    assert not torch.equal(layer.plain_weight(), stands_for[name])


@pytest.mark.parametrize(
    ("format", "dtype"), [("F16", torch.float32), ("BF16", torch.bfloat16), ("F32", torch.float32)]
)
def test_numbers_stay_what_they_are(format: str, dtype: torch.dtype, tmp_path: Path) -> None:
    stands_for = written(plain(), tmp_path / "tiny.gguf", format)
    loaded = load_model(tmp_path / "tiny.gguf")
    assert not layers(loaded) and loaded.dtype == dtype
    for name, weight in stands_for.items():
        assert torch.equal(interleaved(name, loaded.get_parameter(name), loaded.config).float(), weight)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_an_adapter_changes_dequantized_weights_and_the_notes_say_so(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    written(plain(), tmp_path / "tiny.gguf", "Q4_0")
    base, other = (load_model(tmp_path / "tiny.gguf", dequantize=True) for _ in range(2))
    adapted = peft.get_peft_model(other, peft.LoraConfig(lora_alpha=64))
    for name, weight in adapted.named_parameters():
        weight.data += 0.1 if "lora" in name else 0
    adapted.save_pretrained(tmp_path, save_embedding_layers=False)
    found, wanted = load_model(tmp_path / "tiny.gguf", adapter=tmp_path), adapted.merge_and_unload()(TEXT).logits
    assert torch.equal(found(TEXT).logits, wanted) and not torch.equal(base(TEXT).logits, wanted)
    assert any("Q4_0 were dequantized" in note for note in found.notes)


def test_a_format_without_a_kernel_is_dequantized_and_named(tmp_path: Path) -> None:
    stands_for = written(plain(width=256), tmp_path / "tiny.gguf", "IQ2_XS")
    engine = slipstream.load(tmp_path / "tiny.gguf")
    assert any("IQ2_XS" in note and "dequantized" in note for note in engine.notes)
    assert not any("rounded" in note for note in engine.notes)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(load_model(tmp_path / "tiny.gguf").get_parameter(name), stands_for[name])


def test_how_inputs_are_multiplied_is_said(tmp_path: Path) -> None:
    written(plain(), tmp_path / "tiny.gguf", "Q8_0")
    rounding, exact = (slipstream.load(tmp_path / "tiny.gguf", activations=each) for each in ("int8", "float"))
    assert any(note.startswith("tiny.gguf multiplies inputs rounded to 8 bits") for note in rounding.notes)
    assert not any("rounded" in note for note in exact.notes)


@pytest.mark.parametrize("format", ["Q8_0", "Q4_K", "Q6_K"])
def test_logits_are_those_of_the_weights_with_inputs_as_they_are(format: str, tmp_path: Path) -> None:
    """Rounded to 8 bits, inputs give others; with the offsets left out, they are far away."""
    want = logits(restored(plain(width=256), written(plain(width=256), tmp_path / "tiny.gguf", format)))
    exact, near = (load_model(tmp_path / "tiny.gguf", activations=each) for each in ("float", "int8"))
    assert gap(logits(exact), want) < 1e-4 < 1e-3 < gap(logits(near), want) < 0.2
    if format == "Q4_K":
        for layer in layers(exact).values():
            assert layer.zeros is not None
            layer.zeros.zero_()
        assert gap(logits(exact), want) > 0.5


def test_inputs_stay_as_they_are_for_a_while(tmp_path: Path) -> None:
    written(plain(), tmp_path / "tiny.gguf", "Q8_0")
    exact, rounding = (load_model(tmp_path / "tiny.gguf", activations=each) for each in ("float", "int8"))
    before = logits(rounding)
    with inputs_as_they_are(rounding) as rounds, inputs_as_they_are(exact) as never:
        assert rounds and not never and torch.equal(logits(rounding), logits(exact))
    assert torch.equal(logits(rounding), before) and not torch.equal(before, logits(exact))


@pytest.mark.parametrize("format", ["Q4_1", "Q4_K"])
def test_the_check_passes_on_it_and_a_broken_head_exceeds_its_bound(format: str, tmp_path: Path) -> None:
    """The bound follows from how far the rounding of inputs moves logits."""
    written(plain(width=256), tmp_path / "tiny.gguf", format)
    engine = slipstream.load(tmp_path / "tiny.gguf", "lookup")
    options: dict[str, Any] = {"max_new_tokens": 8, "samples": 100, "temperature": 0}

    def wrong() -> set[str]:
        report = check(engine, [[5, 17, 42, 5, 17]], **options)
        assert report.greedy is not None
        return {each.name for each in report.greedy.tests if not each.passed}

    assert wrong() == set()
    head = engine.decoder.target.model.get_output_embeddings()
    head.register_forward_hook(lambda _, given, found: found * 1.5 if given[0].shape[1] > 1 else found)
    assert "scores" in wrong()


def test_rows_of_other_families_stay_where_they_are(tmp_path: Path) -> None:
    """Qwen 2 has biases beside, which llama.cpp stores as they are too."""
    model = tiny("qwen2", tie_word_embeddings=False)
    stands_for = written(model, tmp_path / "tiny.gguf", "Q4_0")
    found = layers(load_model(tmp_path / "tiny.gguf"))
    assert len(found) == 15 and all(torch.equal(each.plain_weight(), stands_for[name]) for name, each in found.items())
    layer = found["model.layers.0.self_attn.q_proj.weight"]
    torch.testing.assert_close(layer.bias, model.model.layers[0].self_attn.q_proj.bias)


def test_rows_that_stayed_as_llama_cpp_orders_them_are_seen(tmp_path: Path) -> None:
    """The control of the comparison above: queries, of which half the rows would be elsewhere."""
    stands_for = written(plain(), tmp_path / "tiny.gguf", "Q8_0")
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = layers(load_model(tmp_path / "tiny.gguf"))[name].plain_weight()
    assert float((weight - stands_for[name]).abs().max()) > 0.1 * float(weight.abs().mean())


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_tied_head_and_the_embeddings_are_the_same_codes(family: str, tmp_path: Path) -> None:
    """Also where the embeddings have a factor, as Gemma's."""
    model = tiny(family, head_dim=16, query_pre_attn_scalar=16, tie_word_embeddings=True)
    stands_for = written(model, tmp_path / "tiny.gguf", "Q8_0", lambda writer: writer.add_key_length(16))
    loaded = load_model(tmp_path / "tiny.gguf", activations="float")
    head, embeddings = layers(loaded)["lm_head.weight"], loaded.get_input_embeddings()
    assert head.codes.data_ptr() == embeddings.codes.data_ptr()
    want = logits(restored(model, stands_for))
    assert gap(logits(loaded), want) < 1e-4


def test_rotations_of_llama_3_are_stretched(tmp_path: Path) -> None:
    """llama.cpp stores the factors only; factors of no known kind are refused."""
    model, others = tiny("llama", rope_parameters=STRETCHED), plain()
    factors = others.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq

    def more(writer: Any, factors: Tensor = factors) -> None:
        writer.add_tensor("rope_freqs.weight", factors.numpy())

    stands_for = written(model, tmp_path / "tiny.gguf", "Q8_0", more)
    want = logits(restored(model, stands_for))
    assert gap(logits(load_model(tmp_path / "tiny.gguf", activations="float")), want) < 1e-4
    assert gap(logits(restored(others, stands_for)), want) > 1e-3
    written(model, tmp_path / "odd.gguf", "Q8_0", lambda writer: more(writer, factors.flip(0)))
    with pytest.raises(ValueError, match=r"odd\.gguf.*rotations are stretched in a way"):
        load_model(tmp_path / "odd.gguf")


STRETCHED: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
STRETCHED |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_plain_and_speculative_texts_of_it_are_equal(tmp_path: Path) -> None:
    written(plain(tied=True), tmp_path / "tiny.gguf", "Q4_1")
    engine = slipstream.load(tmp_path / "tiny.gguf", "lookup", dtype="float32")
    prompts = [[5, 17, 42, 5, 17], [8, 90, 3, 1, 8, 90]]
    fast, slow = (engine.generate(prompts, max_new_tokens=24, temperature=0, plain=each) for each in (False, True))
    assert [each.tokens for each in fast] == [each.tokens for each in slow]
    with pytest.raises(ValueError, match="are quantized already: leave quantize=int8 out"):
        slipstream.load(tmp_path / "tiny.gguf", quantize="int8")


@pytest.mark.slow
def test_it_compiles_with_the_same_texts(tmp_path: Path) -> None:
    """Without a warning, which would be an error here: embeddings in codes take texts of any length."""
    written(plain(tied=True, width=256), tmp_path / "tiny.gguf", "Q4_K")
    engine = slipstream.load(tmp_path / "tiny.gguf", "lookup", compile=True, gamma=2)
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0}
    fast, slow = (engine.generate([5, 17, 42, 5, 17], plain=each, **options) for each in (False, True))
    assert fast[0].tokens == slow[0].tokens


def test_a_model_in_several_files_is_one(tmp_path: Path) -> None:
    stands_for = written(plain(), tmp_path / "tiny.gguf", "Q8_0", split_max_tensors=8)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    for named in (parts[0], parts[-1], tmp_path):
        found = layers(load_model(named))
        assert torch.equal(found["lm_head.weight"].plain_weight(), stands_for["lm_head.weight"])
    parts[1].unlink()
    with pytest.raises(ValueError, match=r"1 of its \d parts are missing \(tiny-00002-of-"):
        load_model(parts[0])


def test_its_name_is_that_of_the_file(tmp_path: Path) -> None:
    written(plain(), tmp_path / "tiny.gguf", "Q8_0")
    model = load_model(tmp_path / "tiny.gguf")
    assert model.config.name_or_path == str(tmp_path / "tiny.gguf")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert torch.equal(logits(model), logits(load_model(tmp_path)))
    for name in ("sha256-0af3", "TINY.GGUF"):
        again = load_model((tmp_path / "tiny.gguf").rename(tmp_path / name))
        assert torch.equal(logits(model), logits(again))
        (tmp_path / name).rename(tmp_path / "tiny.gguf")


def test_what_is_no_model_is_refused_in_a_sentence(tmp_path: Path) -> None:
    written(plain(), tmp_path / "tiny.gguf", "Q8_0")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    for name, size in (("short", len(whole) // 2), ("head", 200), ("begun", 10)):
        (tmp_path / f"{name}.gguf").write_bytes(whole[:size])
    (tmp_path / "other.gguf").write_bytes(b"PK" + whole)
    (tmp_path / "gone.gguf").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    for name, said in (
        ("short.gguf", "ends too early or is damaged"),
        ("head.gguf", "ends too early or is damaged"),
        ("begun.gguf", "ends too early or is damaged"),
        ("other.gguf", "does not begin as GGUF files do"),
        ("missing.gguf", "there is no such file, but begun.gguf, head.gguf, other.gguf, short.gguf, tiny.gguf in its"),
        ("empty", "no config.json and no .gguf file"),
        (".", "it has 5 files"),
    ):
        with pytest.raises(ValueError, match=f"^cannot load the model .*{said}"):
            load_model(tmp_path / name)


def test_an_unknown_family_is_refused_in_a_sentence(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "rwkv.gguf", "rwkv7")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    finish(writer)
    with pytest.raises(ValueError, match=r"rwkv\.gguf.*it is of the family 'rwkv7', which is not read from"):
        load_model(tmp_path / "rwkv.gguf")


def test_impossible_ways_of_reading_are_refused(tmp_path: Path) -> None:
    plain().save_pretrained(tmp_path / "plain")
    for options, said in (
        ({"activations": "int4"}, "activations='int4' is not possible: use int8 or float"),
        ({"dequantize": "yes"}, "dequantize"),
        ({"activations": "float"}, "are for quantized weights"),
    ):
        with pytest.raises(ValueError, match=said):
            load_model(tmp_path / "plain", **options)


def in_hub(folder: Path, *files: Path) -> None:
    """Put files into a folder as if they had been downloaded from the hub."""
    home = folder / "models--org--tiny"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0" * 40)
    for file in files:
        place = home / "snapshots" / ("0" * 40) / file.name
        place.parent.mkdir(parents=True, exist_ok=True)
        file.rename(place)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of downloads, without a network."""
    from huggingface_hub import constants
    from transformers.utils import hub as ours

    for module, name in ((constants, "HF_HUB_CACHE"), (ours.constants, "HF_HUB_CACHE")):
        monkeypatch.setattr(module, name, str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.mark.parametrize("wanted", ["tiny-Q8_0.gguf", "Q8_0", "q8_0"])
def test_hub_names_take_a_file_or_a_format(wanted: str, hub: Path, tmp_path: Path) -> None:
    stands_for = written(plain(), tmp_path / "tiny-Q8_0.gguf", "Q8_0")
    written(plain(), tmp_path / "tiny-Q4_0.gguf", "Q4_0")
    in_hub(hub, tmp_path / "tiny-Q8_0.gguf", tmp_path / "tiny-Q4_0.gguf")
    found = layers(load_model(f"org/tiny:{wanted}"))
    assert torch.equal(found["lm_head.weight"].plain_weight(), stands_for["lm_head.weight"])
    with pytest.raises(
        ValueError, match=r"org/tiny has no such file or format; it has tiny-Q4_0\.gguf, tiny-Q8_0\.gguf"
    ):
        load_model("org/tiny:Q6_K")
    with pytest.raises(ValueError, match="no file of org/other was downloaded"):
        load_model("org/other:Q6_K")


def with_words(writer: Any) -> None:
    """The metadata of a byte-level tokenizer of 96 tokens with a chat template."""
    letters = [chr(each) for each in range(33, 33 + 90)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*letters, "he", "<s>", "</s>", "<|eot_id|>", "<|im_end|>", "<think>"])
    writer.add_token_types([1] * 91 + [3, 3, 3, 3, 4])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(91)
    writer.add_eos_token_id(92)
    writer.add_eot_token_id(93)
    writer.add_pad_token_id(2**32 - 1)  # -1, for none
    writer.add_add_bos_token(True)
    writer.add_chat_template("{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}")
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 20)


def test_tokenizer_template_and_settings_come_from_the_file(tmp_path: Path) -> None:
    written(plain(), tmp_path / "tiny.gguf", "Q8_0", with_words)
    tokenizer, settings = find_tokenizer(tmp_path / "tiny.gguf"), load_model(tmp_path / "tiny.gguf").generation_config
    assert tokenizer is not None and (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert settings.pad_token_id is tokenizer.pad_token is None
    assert tokenizer("he</s><think>!").input_ids == [91, 90, 92, 95, 0]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert chat == "<s>user:he</s>"
    assert settings.eos_token_id == [92, 93, 94] and (settings.temperature, settings.top_k) == (0.5, 20)
    assert tokenizer.name_or_path == str(tmp_path / "tiny.gguf")
    written(plain(), tmp_path / "wordless.gguf", "Q8_0")
    assert find_tokenizer(tmp_path / "wordless.gguf") is None
    written(plain(), tmp_path / "odd.gguf", "Q8_0", lambda writer: writer.add_token_list(["a"]))
    with pytest.raises(ValueError, match=r"cannot load the tokenizer of .*odd\.gguf': .*, or pass tokenizer="):
        find_tokenizer(tmp_path / "odd.gguf")


def test_the_hub_is_not_asked_about_a_file_with_many_words() -> None:
    words = {"tokens": [*map(chr, range(33, 123)), *(f"<{i}>" for i in range(100_000))], "model": "gpt2", "merges": []}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in words.items()}
    file = GgufFile(Path("/no/folder/many.gguf"), {**metadata, "general.architecture": "llama"}, {}, ())
    assert tokenizer_of(file).name_or_path == str(file.path)
