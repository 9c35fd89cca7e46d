"""What is proposed for a target without a draft: its own weights in fewer bits, where that works and may pay."""

import slipstream
from slipstream.engine.load import self_draft_proposal
from slipstream.kernels.packing import quantized
from slipstream.kernels.quantization import Precision
from slipstream.models.causal import CausalScorer
from toys import FAMILIES, SEQ2SEQ, dirichlet_table, tiny
from toys.kernels import needs_kernel
from toys.tables import TableScorer

pytestmark = needs_kernel


def test_a_target_may_draft_for_itself() -> None:
    for model, bits in ((tiny(FAMILIES["llama"]), 4), (tiny(SEQ2SEQ["t5"]), 8), (tiny(SEQ2SEQ["whisper"]), 8)):
        [said] = self_draft_proposal(CausalScorer(model, "toy"), least=0)
        assert said.startswith(f"toy decodes without a draft; draft='int{bits}' (--draft int{bits})")
        assert "slipstream plan" in said
        assert self_draft_proposal(CausalScorer(quantized(model, Precision(8, 64)), "toy"), 0) == [said] * (bits < 8)


def test_nothing_is_proposed_where_it_would_not_work_or_not_pay() -> None:
    model = tiny(FAMILIES["llama"])
    assert self_draft_proposal(CausalScorer(model, "toy")) == []  # it lies in the caches
    assert self_draft_proposal(CausalScorer(quantized(model, Precision(4, 32)), "toy"), least=0) == []
    assert self_draft_proposal(CausalScorer(tiny(FAMILIES["llama"]).half(), "toy"), least=0) == []
    assert self_draft_proposal(TableScorer(dirichlet_table(1), 3, "table"), least=0) == []


def test_load_proposes_it_unless_a_draft_is_named() -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 6144, "num_hidden_layers": 1}
    model = tiny(FAMILIES["llama"], **sizes)
    assert "--draft int4" in slipstream.load(model).notes[-1]
    assert slipstream.load(model, "lookup").notes == ()
