"""A drafter's training report: what it is, what it was trained on, and how often it would be accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from adaptive_verification.drafting.hidden_state_network import HiddenStateNetwork
from adaptive_verification.training.evaluation import Acceptance
from adaptive_verification.training.trainer import CurvePoint


def markdown(
    network: HiddenStateNetwork,
    trained: Mapping[str, Any],
    acceptances: Sequence[Acceptance],
    held_out: Sequence[str],
    curve: Sequence[CurvePoint],
) -> str:
    """The report as Markdown."""
    own = sum(parameter.numel() for parameter in network.parameters())
    depth = len(acceptances[0].by_position)
    lines = [
        f"# Hidden-state drafter for {trained['target']}",
        "",
        f"- network: {network.shape.num_layers} layer(s), {own / 1e6:.1f} M parameters of its own, hidden states of "
        f"layers {', '.join(map(str, network.shape.hidden_layers))}, draft vocabulary {len(network.token_ids):,}",
        f"- text: {trained['collected_tokens']:,} tokens in {trained['collected_sequences']:,} sequences, written by "
        "the target itself",
        f"- training: {trained['seconds'] / 60:.1f} minutes, {trained['steps']:,} steps, "
        f"{trained['written_tokens']:,} tokens over {trained['epoch'] + 1} epoch(s)",
        f"- held out: {', '.join(held_out)}",
        "",
        "Expected acceptance (sum of min(p, q)) at each position, given that the drafts before it were accepted:",
        "",
        "| sampling | places | " + " | ".join(f"{position}" for position in range(1, depth + 1)) + " | tokens/step |",
        "|---" * (depth + 3) + "|",
    ]
    for acceptance in acceptances:
        numbers = " | ".join(f"{value:.3f}" for value in acceptance.by_position)
        length = acceptance.tokens_per_step(depth)
        lines.append(f"| {acceptance.sampling} | {acceptance.num_places:,} | {numbers} | {length:.2f} |")
    lines += ["", f"tokens/step: with {depth} drafts, all of them verified."]
    lines += [
        "",
        "How it got there: expected acceptance at temperature 1, on a few of the held-out sequences, within the draft",
        "vocabulary and without a limit on candidates. The first line is the linear start.",
        "",
        "| tokens trained on | minutes | " + " | ".join(f"{i}" for i in range(1, len(curve[0].overlap) + 1)) + " |",
        "|---" * (2 + len(curve[0].overlap)) + "|",
    ]
    for point in curve:
        numbers = " | ".join(f"{value:.3f}" for value in point.overlap)
        lines.append(f"| {point.written_tokens:,} | {point.seconds / 60:.1f} | {numbers} |")
    return "\n".join(lines) + "\n"
