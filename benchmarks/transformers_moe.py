"""The same mixture of experts in Hugging Face transformers (Qwen3-MoE), and a check that it computes the same."""

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from models import (
    AUXILIARY_COEFFICIENT,
    BLOCKS,
    CHANNELS,
    EXPERTS,
    GROUPS,
    HEADS,
    HIDDEN,
    SEQUENCE,
    TOP_K,
    VOCABULARY,
    WIDTH,
    Loss,
    build,
    loss_of,
    random_batch,
)
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from megagate.gate import QKVLayout

IMPLEMENTATIONS = ("grouped_mm", "eager")
"""Of the experts; the first is the default of transformers. `batched_mm` copies an expert's weights for each token,
here over 1 GB per layer, and takes minutes."""

TOLERANCE = 1e-4


def build_transformers(
    experts: str = IMPLEMENTATIONS[0], auxiliary_coefficient: float = AUXILIARY_COEFFICIENT
) -> Qwen3MoeForCausalLM:
    """Return a fresh model on scaled_dot_product_attention, with the experts' implementation given by name."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=CHANNELS,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=WIDTH,
        norm_topk_prob=True,
        output_router_logits=True,
        router_aux_loss_coef=auxiliary_coefficient,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=False,
        use_cache=False,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        attn_implementation="sdpa",
        experts_implementation=experts,
    )
    return Qwen3MoeForCausalLM(config).train()


def transformers_loss_of(model: Qwen3MoeForCausalLM) -> Loss:
    """Return the function that computes a model's mean loss, the load-balancing loss added."""
    return lambda tokens, labels: model(input_ids=tokens, labels=labels, shift_labels=labels).loss


def as_transformers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename and split tensors that are named and shaped as our model's parameters."""
    layout = QKVLayout(HEADS, GROUPS, CHANNELS)
    result = {
        "model.embed_tokens.weight": tensors["embedding.word_embeddings.weight"],
        "model.norm.weight": tensors["decoder.final_norm.weight"],
        "lm_head.weight": tensors["output_layer.weight"],
    }
    for block in range(BLOCKS):
        attention, moe = f"decoder.layers.{2 * block}.", f"decoder.layers.{2 * block + 1}."
        experts = [f"{moe}mlp.experts.local_experts.{expert}." for expert in range(EXPERTS)]
        qkv = layout.split_weight(tensors[f"{attention}self_attention.linear_qkv.weight"])
        layer = {
            "input_layernorm.weight": tensors[f"{attention}input_layernorm.weight"],
            "self_attn.q_proj.weight": qkv.query,
            "self_attn.k_proj.weight": qkv.key,
            "self_attn.v_proj.weight": qkv.value,
            "self_attn.q_norm.weight": tensors[f"{attention}self_attention.q_layernorm.weight"],
            "self_attn.k_norm.weight": tensors[f"{attention}self_attention.k_layernorm.weight"],
            "self_attn.o_proj.weight": tensors[f"{attention}self_attention.linear_proj.weight"],
            "post_attention_layernorm.weight": tensors[f"{moe}pre_mlp_layernorm.weight"],
            "mlp.gate.weight": tensors[f"{moe}mlp.router.weight"],
            "mlp.experts.gate_up_proj": torch.stack([tensors[f"{name}linear_fc1.weight"] for name in experts]),
            "mlp.experts.down_proj": torch.stack([tensors[f"{name}linear_fc2.weight"] for name in experts]),
        }
        result |= {f"model.layers.{block}.{name}": tensor for name, tensor in layer.items()}
    return result


def largest_difference() -> float:
    """Return the largest relative difference between the two models' losses and gradients, from the same weights.

    Without the load-balancing loss: transformers takes one over the tokens of all layers together, Megatron one per
    layer, which is other mathematics, though the same work.
    """
    ours, theirs = build("baseline", auxiliary_coefficient=0.0), build_transformers(auxiliary_coefficient=0.0)
    randomize(ours)
    weights = dict(ours.named_parameters())
    theirs.load_state_dict(as_transformers({name: weight.detach() for name, weight in weights.items()}))
    batch = random_batch()
    losses = loss_of(ours)(*batch), transformers_loss_of(theirs)(*batch)
    for loss in losses:
        loss.backward()
    difference = float((losses[0] - losses[1]).abs() / losses[1])
    gradients = as_transformers({name: weight.grad for name, weight in weights.items()})
    expected = {name: weight.grad for name, weight in theirs.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        difference = max(difference, float((gradient - expected[name]).abs().max() / expected[name].abs().max()))
    return difference


@torch.no_grad()
def randomize(model: HybridModel) -> None:
    """Let no norm's weight be one."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(0.2 * torch.randn_like(parameter))
