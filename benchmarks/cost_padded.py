"""Enlarge a trained Llama-type model without changing its function: a small model's alpha at the cost of a large one.

python benchmarks/cost_padded.py SOURCE DEST --preset target-134m
python benchmarks/cost_padded.py SOURCE DEST --hidden 768 --layers 12 --heads 12 --intermediate 2304 [--vocab 32000]

A figure measured with such a model is labelled "cost-padded": text and acceptance are those of the small model, the
arithmetic and the memory traffic of a step are those of the large one. Nothing is skipped: every matrix is dense, and
every entry that cannot matter is noise of the usual size, so nothing is cheaper for being zero or denormal. What makes
the noise not matter:

- wider: the new channels of the residual stream stay zero, since nothing writes to them. The root mean square over more
  channels is smaller by the factor sqrt(old / new): norm weights are multiplied by that, and eps by old / new;
- more heads and more hidden units of the MLP: their columns of o_proj and down_proj are zero. The head size and the
  number of query heads per key head stay, so that rotation and grouping do;
- deeper: all of o_proj and down_proj of the new layers is zero;
- a larger vocabulary: one new channel of the residual stream holds a constant c, which eps of every norm compensates
  (eps_new * new = eps_old * old - c * c). The layers give it weight zero; the head gives the added ids a huge negative
  logit from it, so that their probability is exactly zero although their logits are computed. Embedding and head are
  then no longer tied (a step reads one row of the embedding, so this costs memory and no time).
"""

import argparse
import sys
from dataclasses import dataclass
from math import floor, log2
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

NOISE = 0.02  # the usual standard deviation of a fresh weight
FLOOR = 2.0**20  # logit of an added id: -FLOOR / root mean square of the last hidden state


@dataclass(frozen=True)
class Size:
    """The size to enlarge a model to; None keeps the model's own. A larger `vocab` needs a larger `hidden`."""

    hidden: int | None = None
    layers: int | None = None
    intermediate: int | None = None
    heads: int | None = None
    vocab: int | None = None


# Per layer as many weights as a model with as many key heads as heads and an MLP of 2048 (768): see `weights_read`.
PRESETS = {
    "target-134m": Size(768, 12, 2304, 12, 32000),
    "draft-24m": Size(288, 6, 896, 4, 32000),
    "target-1b": Size(2048, 16, 8192, 32, 32000),
    "target-6b": Size(4096, 32, 11008, 64, 32000),
}


def enlarge(model: LlamaForCausalLM, size: Size, seed: int = 0) -> LlamaForCausalLM:
    """Return a model of the given size with the same logits up to rounding, in the model's dtype and on its device.

    Raises ValueError if the model is of another type, or if a size is smaller than what the model has.
    """
    new, constant = enlarged_config(model.config, size)
    torch.manual_seed(seed)
    with torch.device(model.device):
        large = LlamaForCausalLM(new).to(model.dtype).eval()
    small, rng = model.state_dict(), torch.Generator(model.device).manual_seed(seed)
    with torch.no_grad(), torch.device(model.device):
        for name, weight in large.state_dict().items():
            if name == "lm_head.weight" and new.tie_word_embeddings:
                continue
            weight.copy_(torch.randn(weight.shape, generator=rng) * NOISE)
            _fill(name, weight, small.get(name), model.config.hidden_size)
        if constant:
            _add_vocabulary(large, model.config, constant)
    return large


def _fill(name: str, weight: Tensor, old: Tensor | None, hidden: int) -> None:
    """Put the trained weights into the corner of the noise, and zeros where the noise would matter."""
    if name.endswith("norm.weight"):
        weight.zero_()
        weight[:hidden] = (torch.ones(hidden) if old is None else old) * (hidden / len(weight)) ** 0.5
        return
    if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight")):
        weight.zero_()  # all that writes to the residual stream
    if old is not None:
        weight[: old.shape[0], : old.shape[1]] = old


def _add_vocabulary(large: LlamaForCausalLM, old: LlamaConfig, constant: float) -> None:
    """Make the first new channel hold a constant, from which the head computes the negative logits of the added ids."""
    channel, amplified = old.hidden_size, 2.0**14
    large.model.embed_tokens.weight[:, channel] = constant
    large.model.norm.weight[channel] = amplified * (old.hidden_size / large.config.hidden_size) ** 0.5
    large.lm_head.weight[: old.vocab_size, channel] = 0
    large.lm_head.weight[old.vocab_size :, channel] = -FLOOR / (amplified * constant)


def enlarged_config(old: LlamaConfig, size: Size) -> tuple[LlamaConfig, float]:
    """Return the configuration of the large model, and the constant of its added channel (0: no larger vocabulary)."""
    _refuse(old, size)
    hidden, heads, vocab = (
        size.hidden or old.hidden_size,
        size.heads or old.num_attention_heads,
        size.vocab or old.vocab_size,
    )
    square = old.rms_norm_eps * old.hidden_size  # what eps adds to the sum of squares
    # A power of two is exact in every dtype; its square takes at most a quarter of what eps gives.
    constant = 2.0 ** floor(log2(square / 4) / 2) if vocab > old.vocab_size else 0.0
    new = LlamaConfig.from_dict(
        {
            **old.to_dict(),
            "hidden_size": hidden,
            "num_hidden_layers": size.layers or old.num_hidden_layers,
            "intermediate_size": size.intermediate or old.intermediate_size,
            "num_attention_heads": heads,
            "num_key_value_heads": heads * old.num_key_value_heads // old.num_attention_heads,
            "head_dim": old.head_dim,
            "vocab_size": vocab,
            "rms_norm_eps": (square - constant**2) / hidden,
            "tie_word_embeddings": old.tie_word_embeddings and not constant,
        }
    )
    return new, constant


def _refuse(old: LlamaConfig, size: Size) -> None:
    if old.model_type != "llama" or old.attention_bias or old.mlp_bias:
        raise ValueError(f"a {old.model_type} model cannot be enlarged here: give a Llama-type model without biases.")
    has = Size(old.hidden_size, old.num_hidden_layers, old.intermediate_size, old.num_attention_heads, old.vocab_size)
    for name, least in vars(has).items():
        if (getattr(size, name) or least) < least:
            raise ValueError(f"{name}={getattr(size, name)} is smaller than the model's {least}: give {least} or more.")
    group = old.num_attention_heads // old.num_key_value_heads
    if (size.heads or 0) % group:
        raise ValueError(f"heads={size.heads} cannot be shared by {group} per key head: give a multiple of {group}.")
    if (size.hidden or old.hidden_size) % (size.heads or old.num_attention_heads):
        raise ValueError(f"hidden={size.hidden} is no multiple of the heads, as transformers wants it: change one.")
    if (size.vocab or 0) > old.vocab_size and (size.hidden or 0) <= old.hidden_size:
        raise ValueError(f"vocab={size.vocab} needs a free channel: give a hidden size above {old.hidden_size}.")


def weights_read(model: LlamaForCausalLM) -> int:
    """Return the number of weights in the matrices that a step reads: all but the embedding."""
    inner = sum(weight.numel() for name, weight in model.named_parameters() if name.endswith("proj.weight"))
    return inner + model.lm_head.weight.numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder or name of a Llama-type model")
    parser.add_argument("dest", type=Path, help="folder to write")
    parser.add_argument("--preset", choices=PRESETS, help="a size; the options below change it")
    for name in vars(Size()):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--dtype", default="auto", help="of the written weights (default: as stored)")
    parser.add_argument(
        "--device", default="cpu", help="where to do it: the noise of billions of weights takes a CPU minutes"
    )
    args = parser.parse_args()
    options = {name: getattr(args, name) for name in vars(Size()) if getattr(args, name)}
    size = Size(**{**(vars(PRESETS[args.preset]) if args.preset else {}), **options})
    try:
        write(args.source, args.dest, size, args.dtype, args.device)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def write(source: str, dest: Path, size: Size, dtype: str = "auto", device: str = "cpu") -> None:
    """Enlarge the model of a folder, compare the logits, and write it with its tokenizer."""
    disable_progress_bar()  # our own messages say what is being done
    say(f"reading {source}")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device).eval()
    say(f"enlarging {model.num_parameters() / 1e6:.1f} M parameters, a step reads {weights_read(model) / 1e6:.1f} M")
    large = enlarge(model, size)
    say(f"now {large.num_parameters() / 1e6:.1f} M parameters, a step reads {weights_read(large) / 1e6:.1f} M")
    text = torch.arange(1, 1 + min(64, model.config.vocab_size - 1), device=device)[None]
    say(f"largest difference of a logit in {model.dtype}: {difference(model, large, text):.2g}")
    large.save_pretrained(dest)
    AutoTokenizer.from_pretrained(source).save_pretrained(dest)
    say(f"written to {dest}")


@torch.inference_mode()
def difference(model: LlamaForCausalLM, large: LlamaForCausalLM, text: Tensor) -> float:
    """Return the largest difference between both models' logits of the old ids on a text (rows, length).

    Raises ArithmeticError if an added id has a probability above zero.
    """
    old, new = model(text).logits, large(text).logits
    known = old.shape[-1]
    if (new[..., known:].amax(-1) > old.amin(-1) - 200).any() if new.shape[-1] > known else False:
        raise ArithmeticError("an added id got a probability above zero.")
    return float((new[..., :known].double() - old.double()).abs().max())


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
