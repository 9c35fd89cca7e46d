"""Training networks that draft from a target's hidden states: EAGLE-3 drafts, and heads of the target's own kind.

The target is frozen. It reads a window of text once; the network learns the target's own law one token later, from the
target's states, and then, as when drafting, further laws from its own states (training-time test, arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from slipstream.core.values import check_least
from slipstream.execution.passes import PassMasks
from slipstream.files import atomic_write
from slipstream.kernels.packing import plain_weight
from slipstream.models.heads.eagle3 import Eagle3, Eagle3Settings
from slipstream.models.heads.hidden_states import LAST
from slipstream.models.heads.scorer import Behind, Head
from slipstream.text.jsontext import json_text
from slipstream.training.lessons import TextWindows, objective_of
from slipstream.training.trainer import Checkpoint, Steps, Trainer, Watch, muon_and_adam, trapezoid

KEPT = (
    *("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "rope_parameters", "max_position_embeddings", "hidden_act"),
)
"""The settings that the layer of a new draft takes from a Llama-like target."""


@dataclass(frozen=True)
class AheadSettings:
    """The settings of a training: a step reads `rows` windows of `length` tokens, and drafts `unroll` in a row."""

    steps: int = 300
    rows: int = 8
    length: int = 128
    rate: float = 2e-3
    unroll: int = 3
    seed: int = 0
    objective: str = "kl"
    bfloat16: bool = False  # multiply in bfloat16: faster where the processor can

    def __post_init__(self) -> None:
        objective_of(self.objective)
        check_least(self, steps=1, rows=1, unroll=1)
        if self.length < self.unroll + 3:
            raise ValueError(f"length={self.length} is too short to draft {self.unroll} tokens: give more.")


def new_eagle3(model: Any, tokens: Sequence[int] | np.ndarray, draft_vocab: int, seed: int = 0) -> Eagle3:
    """Make an untrained EAGLE-3 draft for a Llama-like model, with the `draft_vocab` most frequent tokens of a text."""
    config = model.config.get_text_config()
    if not 1 <= draft_vocab <= config.vocab_size:
        raise ValueError(f"draft_vocab={draft_vocab} is not possible: the model has {config.vocab_size} tokens.")
    layer = {name: value for name in KEPT if (value := getattr(config, name, None)) is not None}
    record = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": draft_vocab,
        "norm_before_residual": True,
        "transformer_layer_config": {"model_type": "llama", **layer, "num_hidden_layers": 1},
    }
    torch.manual_seed(seed)
    settings = Eagle3Settings.read(record, "the new draft")
    net = Eagle3(settings, settings.places(config.num_hidden_layers))
    counts = torch.bincount(torch.as_tensor(np.asarray(tokens, dtype=np.int64)), minlength=config.vocab_size)
    net.targets = counts.argsort(descending=True, stable=True)[:draft_vocab].sort().values
    embeddings, head = model.get_input_embeddings().weight, plain_weight(model.get_output_embeddings())
    with torch.no_grad():
        net.embed_tokens.weight.copy_(embeddings.float())
        net.lm_head.weight.copy_(head[net.targets].float())
    net.embed_tokens.requires_grad_(False)
    return net.to(model.device)


def save_eagle3(net: Eagle3, folder: str | Path) -> None:
    """Write a draft as speculators does: config.json and model.safetensors, each whole or not at all."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = net.settings
    layer = {"model_type": settings.layer.model_type, **settings.layer.to_diff_dict()}
    record = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": settings.draft_vocab,
        "eagle_aux_hidden_state_layer_ids": list(net.places),
        "norm_before_residual": settings.norm_before_residual,
        "norm_before_fc": settings.norm_before_fc,
        "fc_norm": settings.fc_norm,
        "norm_output": settings.norm_output,
        "target_hidden_size": settings.target_width,
        "transformer_layer_config": layer,
    }
    tensors = {name: weight.detach().cpu().contiguous() for name, weight in net.state_dict().items()}
    del tensors["embed_tokens.weight"]  # these are the target's
    if settings.draft_vocab < net.vocab:
        targets = net.targets.cpu()
        tensors["d2t"] = targets - torch.arange(len(targets))
        tensors["t2d"] = torch.zeros(net.vocab, dtype=torch.bool).index_fill_(0, targets, True)
    with atomic_write(folder / "model.safetensors") as part:
        save_file(tensors, part, {"format": "pt"})
    with atomic_write(folder / "config.json") as part:
        part.write_text(json_text(record), encoding="utf-8")


class AheadTrainer:
    """Trains a network that drafts from a frozen target's hidden states.

    `train` resumes after an interruption, also in a new process.
    """

    def __init__(
        self,
        head: Head,
        layers: nn.Module,
        model: Any,
        tokens: Sequence[int] | np.ndarray,
        settings: AheadSettings,
        checkpoint: Checkpoint,
    ) -> None:
        """Begin a training, or resume it from its checkpoint.

        `layers` have the weights of the head that are trained; `tokens` is the whole text. Raises ValueError if the
        text is shorter than four windows, or if the checkpoint belongs to another training.
        """
        self.windows = TextWindows(tokens, settings.length)
        self.head, self.layers, self.model, self.settings = head, layers, model.eval(), settings
        self._objective = objective_of(settings.objective)
        checkpoint.settings.update({**asdict(settings), "text_tokens": len(self.windows.text)})
        self._trainer = Trainer(
            layers,
            muon_and_adam(layers, muon=10 * settings.rate, adam=settings.rate),
            trapezoid(0.05, 0.6, first=0.1),
            Steps(settings.steps, save_every=50),
            checkpoint,
        )

    @property
    def step(self) -> int:
        return self._trainer.progress.steps

    def train(self, watch: Watch = lambda progress, loss: None) -> None:
        """Take the steps that are left, and save the state, also if interrupted."""
        self._trainer.train(self._loss, watch)
        self._trainer.save()

    @torch.inference_mode()
    def alpha(self, windows: int = 16) -> list[float]:
        """Measure the mean of sum_x min(p(x), q(x)) on the held-out end of the text, for each token drafted in a row.

        Drafts follow tokens of the text.
        """
        laws = self._laws(self.windows.to_measure(windows))
        return [float(torch.minimum(p.exp(), q.exp()).sum(-1).mean()) for p, q in laws]

    def _loss(self, step: int, used: float) -> tuple[Tensor, int]:
        settings, share = self.settings, torch.tensor(used)
        laws = self._laws(self.windows.random(settings.rows, settings.seed, step))
        losses = [self._objective(log_p, log_q, share.to(log_p.device)).mean() for log_p, log_q in laws]
        return torch.stack(losses).mean(), settings.rows * settings.length

    def _laws(self, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return log p and log q on windows (rows, length), for the first, the second, ... token drafted in a row.

        Each is (rows, positions, tokens of the draft's vocabulary). After the first token the network reads its own
        states.
        """
        tokens = tokens.to(self.model.device)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.settings.bfloat16):
            with torch.no_grad():
                out = self.model(input_ids=tokens, use_cache=False, output_hidden_states=True)
            # Of transformers' hidden states only the last one is normed.
            states = torch.cat([out.hidden_states[-1 if place == LAST else place] for place in self.head.places], -1)
            log_p = functional.log_softmax(out.logits.float(), -1)
            hidden, laws = self.head.combine(states[:, :-1]), []
            for ahead in range(self.settings.unroll):
                count = tokens.shape[1] - 1 - ahead
                slots = torch.arange(count, device=tokens.device)[None]
                behind = Behind(slots, None, PassMasks.chain(slots, count))
                step = min(ahead, self.head.depth - 1)
                hidden = self.head(step, tokens[:, 1 + ahead :], hidden[:, :count], behind)
                log_q = functional.log_softmax(self.head.logits(hidden).float(), -1)
                known = log_q[0, 0].isfinite().nonzero()[:, 0]
                laws.append((log_p[:, 1 + ahead :, known], log_q[..., known]))
        return laws
