"""The package as others see it: its imports and its public signatures."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path

import pytest

from training import objectives

FOLDER = Path(objectives.__file__).parent

SIGNATURES = {
    "masked_mean": "(x, mask, dim=None)",
    "masked_var": "(x, mask, unbiased=True)",
    "masked_whiten": "(x, mask, shift_mean=True)",
    "token_log_probs": "(logits, labels, temperature=1.0)",
    "token_entropy": "(logits, temperature=1.0)",
    "kl_penalty": "(log_probs, ref_log_probs, kind)",
    "FixedKLController": "(kl_coef)",
    "AdaptiveKLController": "(kl_coef, target_kl, horizon)",
    "token_level_rewards": "(scores, response_mask, kl=None, kl_coef=0.0)",
    "gae": "(token_level_rewards, values, response_mask, gamma, lam)",
    "aggregate": "(x, mask, mode, num_tokens=None, num_sequences=None)",
    "policy_loss": "(log_probs, old_log_probs, advantages, response_mask, *, clip_ratio_low=0.2, clip_ratio_high=0.2, "
    "clip_ratio_c=3.0, weights=None, loss_agg_mode='token-mean', num_tokens=None, num_sequences=None)",
    "PolicyLoss": "(loss, clip_frac, clip_frac_lower, approx_kl)",
    "value_loss": "(values, old_values, returns, response_mask, *, cliprange_value=0.5, weights=None, "
    "loss_agg_mode='token-mean', num_tokens=None, num_sequences=None)",
    "ValueLoss": "(loss, clip_frac, explained_variance)",
    "value_fit": "(values, returns, response_mask)",
    "bradley_terry_loss": "(chosen_scores, rejected_scores, *, margin=None, label_smoothing=0.0, center_coef=0.0, "
    "weights=None, num_pairs=None)",
    "preference_kl": "(teacher_margins, student_margins, *, num_pairs=None)",
    "distill_loss": "(teacher_chosen, teacher_rejected, student_chosen, student_rejected, *, temperature=1.0, "
    "margin_weight, pointwise_weight, label_weight, label_weights=None, score_offset=None, num_pairs=None)",
}


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_public_signature(name: str) -> None:
    signature = inspect.signature(getattr(objectives, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    bare = [p for p in bare if p.name != "self"]
    assert str(inspect.Signature(bare)) == SIGNATURES[name]


def test_everything_exported_exists() -> None:
    assert set(SIGNATURES) <= set(objectives.__all__)
    for name in objectives.__all__:
        assert hasattr(objectives, name)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_only_torch_is_imported(path: Path) -> None:
    roots: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            roots |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            roots.add(node.module or "")
    foreign = {name for name in roots if name.partition(".")[0] not in sys.stdlib_module_names | {"torch"}}
    assert all(name.startswith("training.objectives.") for name in foreign), foreign
