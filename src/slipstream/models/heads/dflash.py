"""DFlash drafts (arXiv 2602.06036) through transformers' classes: one call drafts a whole block of tokens.

The network's cache holds keys and values of the target's hidden states. After them it reads the pending token and a
mask in place of every token to draft; all of these attend to each other. The law of a drafted token depends on the text
before the block, and not on the other tokens drafted in it. That is exact, since verification only needs the law that
each token was drawn from.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModel

from slipstream.core.draft import Tree
from slipstream.core.protocols import HasModel
from slipstream.core.values import first_sentence
from slipstream.execution.names import with_cache
from slipstream.execution.passes import additive
from slipstream.models.heads.scorer import PREFILL_TOKENS, OnTargetStates
from slipstream.models.loading.dropped_tensors import read_record

NEEDED = ("block_size", "mask_token_id", "target_layer_ids", "hidden_size")


def load_dflash(source: str | Path, target: Any) -> Any:
    """Load a DFlash draft from a folder or hub name, for a target of transformers, in its dtype and on its device."""
    record = read_record(source, "config.json")
    if record is None or any(name not in record for name in NEEDED):
        raise ValueError(
            f"{str(source)!r} is no DFlash draft (its config.json has no {', '.join(NEEDED)}): give a folder or a hub "
            "name of one that transformers has a class for."
        )
    config = target.config.get_text_config()
    if record["hidden_size"] != config.hidden_size or record["mask_token_id"] >= config.vocab_size:
        raise ValueError(
            f"{source} was made for a target with hidden size {record['hidden_size']} and more than "
            f"{record['mask_token_id']} tokens, but this one has {config.hidden_size} and {config.vocab_size}: use the "
            "target that it was trained for."
        )
    try:
        net = AutoModel.from_pretrained(source, dtype=target.dtype)
    except Exception as error:  # the files come from elsewhere, and damaged ones raise errors of any type
        raise ValueError(f"cannot load the draft {str(source)!r}: {first_sentence(error)}.") from error
    return net.to(target.device).eval()


class DFlashScorer(OnTargetStates):
    """A DFlash network and its cache (see `core.protocols.Scorer` for the contract). Chains only.
    Its cache holds the target's states of all tokens but the pending one."""

    def __init__(self, target: HasModel, net: Any, name: str) -> None:
        super().__init__(target, [layer + 1 for layer in net.config.target_layer_ids], target.vocab, name)
        self.block_size = int(net.config.block_size)
        self._net, self._call = net, with_cache(net)
        self._embed, self._project = target.model.get_input_embeddings(), target.model.get_output_embeddings()

    @torch.inference_mode()
    def prefill(self, texts: Sequence[Sequence[int]], first: int = 0) -> None:
        assert first == 0, "a draft has the rows that run, and no others"
        for start in range(0, max(map(len, texts), default=0), PREFILL_TOKENS):
            counts = [len(text[start : start + PREFILL_TOKENS]) for text in texts]
            self._pass(counts, torch.zeros(len(texts), 1, dtype=torch.long, device=self.device))

    @torch.inference_mode()
    def extend(self, tokens: Tensor, counts: Sequence[int], first: int = 0, tree: Tree | None = None) -> Tensor:
        """Return the logits of the token after `counts[r]` of tokens (rows, n), repeated to (rows, n, vocab)."""
        assert first == 0 and tree is None, "a block is drafted for the rows that run"
        return self.block(tokens, counts)[:, :1].expand(-1, tokens.shape[1], -1)

    @torch.inference_mode()
    def block(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """Draft a block after the pending token -> logits (rows, block - 1, vocab) of the tokens that follow it.

        Of tokens (rows, n), `counts[r]` are real; the last of these is pending, and the target has states of the rest.
        """
        last = (torch.tensor(list(counts), device=self.device) - 1).clamp(min=0)
        anchor = tokens.gather(1, last[:, None])
        noise = pad(anchor, (0, self.block_size - 1), value=int(self._net.config.mask_token_id))
        return self._project(self._pass([max(0, count - 1) for count in counts], noise)[:, 1:])

    def _pass(self, counts: Sequence[int], noise: Tensor) -> Tensor:
        """Run the network on `counts[r]` states of the target, then noise (rows, n) -> states (rows, n, width).
        Rows with fewer states than others have a gap before their noise, which is masked."""
        wide, texts = max(counts), self._memory.texts
        slots = texts.place(wide + noise.shape[1]).to(self.device)
        starts, new = slots[:, :1], torch.tensor(list(counts), device=self.device)[:, None]
        offsets = torch.arange(slots.shape[1], device=self.device)
        # The position of each state or piece of noise in the text, without the gap.
        own = torch.where(offsets < wide, slots, slots - wide + new)
        places = torch.arange(texts.end, device=self.device)[None]
        others = torch.where(places < starts + wide, places, places - wide + new)
        seen = (places < starts + new) | ((places >= starts + wide) & (places < starts + slots.shape[1]))
        behind = own[:, wide:, None] - others[:, None]
        full = seen[:, None].expand(behind.shape)
        masks = {"full_attention": full, "sliding_attention": full & (behind.abs() <= self._net.config.sliding_window)}
        out = self._call(
            noise_embeds=self._embed(noise),
            context_hidden_states=self._states.of(slots[:, :wide]).to(self._net.dtype),
            attention_mask={kind: additive(mask, self._net.dtype).unsqueeze(1) for kind, mask in masks.items()},
            position_ids=own,
            cache=self._cache,
        )
        texts.advance(counts)
        return out.last_hidden_state
