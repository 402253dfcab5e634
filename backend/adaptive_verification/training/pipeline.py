"""From a target to a drafter directory: collect, train, evaluate, write. Every part continues where it was stopped."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from adaptive_verification.drafting import hidden_state_files
from adaptive_verification.drafting.hidden_state_network import HiddenStateNetwork, NetworkShape
from adaptive_verification.errors import SettingsError, UnsupportedModel
from adaptive_verification.forward.causal_model import CausalModel, ModelOptions
from adaptive_verification.forward.placement import choose_device, choose_dtype
from adaptive_verification.generation.text_codec import TextCodec
from adaptive_verification.settings import DrafterSettings
from adaptive_verification.training import report
from adaptive_verification.training.batches import make_batch
from adaptive_verification.training.closed_form import fit_linear_guess
from adaptive_verification.training.collection import Collector
from adaptive_verification.training.evaluation import Acceptance, evaluate
from adaptive_verification.training.first_guess import fit_first_guess
from adaptive_verification.training.jobs import SAMPLINGS, ChatFrame, plan_jobs, prompt_jobs, read_prompts
from adaptive_verification.training.objective import Objective, loss
from adaptive_verification.training.shards import CollectedSequence, ShardDirectory, read_shard
from adaptive_verification.training.trainer import Progress, Trainer, TrainingOptions
from adaptive_verification.training.unrolled_attention import ATTENTION_NAME

_SHARD_TOKENS = 20_000
_SECONDS_FILE = "collection-seconds.json"
_EVALUATED_DEPTH = 7
_WATCHED_DEPTH = 3
_WATCHED_SEQUENCES = 16
_TEMPLATE_TOKENS = 64
"""Room for what a chat template puts around a turn."""
_HELD_OUT_EVERY = 41
"""Without held-out prompts, one job in so many: a prime, so that all kinds of jobs are among them."""
_MAX_HELD_OUT_PROMPT_TOKENS = 1024
_HELD_OUT_ROWS = 32
"""Sequences written at once: few, for they are long."""
_FEW_WRITTEN_TOKENS = 2
"""A sequence with fewer teaches nothing about drafts after drafts."""


@dataclass(frozen=True)
class TrainDrafterOptions:
    """What `adaptive-verification train-drafter` takes."""

    target: str
    output: Path
    work: Path
    """Shards and checkpoints; kept, so that a later run continues or trains anew on the same text."""
    prompts: Sequence[Path]
    held_out: Sequence[Path]
    minutes: float
    collect_share: float = 0.5
    """Of the minutes."""
    dialogue_share: float = 0.4
    max_prompt_tokens: int = 256
    """Of the training text's prompts; held-out ones may be longer."""
    max_new_tokens: int = 192
    max_held_out: int = 40
    """Prompts of each held-out file, from all over it: files are often sorted by task."""
    rows: int = 112
    """Sequences collected at once."""
    hidden_layers: Sequence[int] | None = None
    """None: one third, two thirds and all of the way up."""
    num_layers: int = 1
    draft_vocabulary: int = 8192
    device: str = "auto"
    dtype: str = "auto"
    learning_rate: float = TrainingOptions.learning_rate
    seed: int = 0


class DrafterTraining:
    """One run."""

    def __init__(self, options: TrainDrafterOptions) -> None:
        """Raises SettingsError or UnsupportedModel before anything slow happens."""
        self._options = options
        self._tokenizer: Any = AutoTokenizer.from_pretrained(options.target)
        self._prompts = read_prompts(options.prompts)
        self._held_out_prompts = [_spread_out(read_prompts([path]), options.max_held_out) for path in options.held_out]
        self._end_tokens = TextCodec(self._tokenizer).end_token_ids(options.target)
        config = AutoConfig.from_pretrained(options.target).get_text_config()
        self._shape = NetworkShape(
            tuple(options.hidden_layers or _spread(config.num_hidden_layers)), options.num_layers
        )
        if self._shape.hidden_layers[-1] != config.num_hidden_layers:
            raise SettingsError(f"hidden_layers must end with the last layer, {config.num_hidden_layers}")
        if not 1 <= options.draft_vocabulary <= config.vocab_size:
            raise SettingsError(f"draft_vocabulary is {options.draft_vocabulary}; it must be 1 to {config.vocab_size}")
        self._longest_context = int(getattr(config, "max_position_embeddings", None) or 2**31)
        self._device = choose_device(options.device)
        self._dtype = choose_dtype(options.dtype, self._device)
        self._training_text = ShardDirectory(options.work / "text")
        self._held_out_text = ShardDirectory(options.work / "held-out")

    def run(self) -> list[Acceptance]:
        """Does what is still to be done; returns the drafter's expected acceptance on the held-out text."""
        options = self._options
        self._collect()
        training = _trainable(self._training_text)
        held_out = _trainable(self._held_out_text)
        if not held_out:  # by number: what is held out now is not trained on in a later run with more text
            held_out = [sequence for sequence in training if sequence.job % _HELD_OUT_EVERY == 0]
            training = [sequence for sequence in training if sequence.job % _HELD_OUT_EVERY]
        if not training or not held_out:
            raise SettingsError("too little was collected to train on; give more minutes")
        target: Any = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32)
        head: Tensor = target.get_output_embeddings().weight.detach().to(self._device)
        self._refuse_unshareable_head(head, training[0])
        token_ids = _most_frequent(training, options.draft_vocabulary, len(head))
        network = HiddenStateNetwork(self._shape, target, token_ids).to(self._device)
        del target
        network.layers.set_attn_implementation(ATTENTION_NAME)
        trainer = self._train(network, training, held_out)
        acceptances = self._evaluate(network, head, held_out)
        self._write(network, trainer.progress, training, acceptances)
        return acceptances

    def _collect(self) -> None:
        options = self._options
        seconds_file = options.work / _SECONDS_FILE
        spent = json.loads(seconds_file.read_text()) if seconds_file.exists() else 0.0
        budget = 60 * options.minutes * options.collect_share
        if self._held_out_prompts and not self._held_out_text.files():
            self._collect_held_out()
        if spent >= budget:
            return
        collector = self._collector(options.rows, options.max_prompt_tokens)
        started = time.monotonic()
        done = self._training_text.finished_jobs()
        jobs = (
            job
            for job in plan_jobs(
                self._tokenizer,
                self._prompts,
                dialogue_share=options.dialogue_share,
                max_prompt_tokens=options.max_prompt_tokens,
            )
            if job.number not in done
        )
        buffered: list[CollectedSequence] = []
        with tqdm(total=round(budget), initial=round(spent), unit="s", desc="training text") as bar:

            def elapsed() -> float:
                return spent + time.monotonic() - started

            def keep_going() -> bool:
                bar.update(round(min(elapsed(), budget)) - bar.n)
                return elapsed() < budget

            def flush() -> None:
                if buffered:
                    self._training_text.write(buffered)
                    buffered.clear()
                seconds_file.write_text(json.dumps(elapsed()))
                bar.set_postfix_str(f"{self._training_text.written_tokens():,} tokens")

            try:
                for sequence in collector.run(jobs, keep_going):
                    buffered.append(sequence)
                    if sum(one.num_written for one in buffered) >= _SHARD_TOKENS:
                        flush()
            finally:  # interrupted, it keeps what is finished
                flush()

    def _collect_held_out(self) -> None:
        room = self._longest_context - self._room_for_answers
        longest = max(min(_MAX_HELD_OUT_PROMPT_TOKENS, room), self._options.max_prompt_tokens)
        jobs = prompt_jobs(self._tokenizer, self._held_out_prompts, max_prompt_tokens=longest)
        collector = self._collector(min(self._options.rows, _HELD_OUT_ROWS), longest)
        total = len(SAMPLINGS) * sum(map(len, self._held_out_prompts))
        with tqdm(total=total, unit="sequence", desc="held-out text") as bar:
            self._held_out_text.write([_seen(bar, sequence) for sequence in collector.run(jobs, lambda: True)])

    def _collector(self, rows: int, max_prompt_tokens: int) -> Collector:
        options = self._options
        frame = ChatFrame(self._tokenizer) if self._tokenizer.chat_template is not None else None
        capacity = min(self._room_for_answers + max_prompt_tokens, self._longest_context)
        model = CausalModel.load(
            options.target,
            ModelOptions(self._dtype, self._device, rows, capacity),
            hidden_layers=self._shape.hidden_layers,
        )
        return Collector(
            model,
            end_tokens=self._end_tokens,
            handover=frame.handover if frame else [],
            max_new_tokens=options.max_new_tokens,
        )

    @property
    def _room_for_answers(self) -> int:
        """Tokens that may follow a prompt: two turns."""
        return 2 * (self._options.max_new_tokens + _TEMPLATE_TOKENS)

    def _refuse_unshareable_head(self, head: Tensor, sequence: CollectedSequence) -> None:
        """The objective takes the target's logits to be its head times its state; scaled or capped logits are not."""
        states = sequence.states[:, -head.shape[1] :].to(head.device, torch.float32)
        where = ~sequence.log_normalizer.isnan()
        expected = sequence.log_normalizer[where]
        got = (states[where.to(head.device)] @ head.T).logsumexp(-1).cpu()
        if not torch.allclose(got, expected, atol=0.5, rtol=0.02):
            raise UnsupportedModel(
                "the target's logits are not its head times its last hidden state; its head cannot be shared"
            )

    def _train(
        self, network: HiddenStateNetwork, training: list[CollectedSequence], held_out: list[CollectedSequence]
    ) -> Trainer:
        options = self._options
        watched = [sequence for sequence in held_out if SAMPLINGS[sequence.job % len(SAMPLINGS)].temperature == 1]
        watched_batch = make_batch((watched or held_out)[:_WATCHED_SEQUENCES], network.hidden_size).to(self._device)

        def watch() -> list[float]:
            with torch.no_grad():
                overlaps: list[float] = loss(network, watched_batch, Objective(), _WATCHED_DEPTH)[1].tolist()
            return overlaps

        trainer = Trainer(
            network,
            training,
            TrainingOptions(
                minutes=options.minutes * (1 - options.collect_share),
                learning_rate=options.learning_rate,
                seed=options.seed,
            ),
            Objective(),
            options.work,
            watch,
        )
        if trainer.progress.steps == 0:
            fit_linear_guess(network, training, lambda sequences: tqdm(sequences, unit="sequence", desc="linear start"))
        total = round(60 * options.minutes * (1 - options.collect_share))
        with tqdm(total=total, initial=round(trainer.progress.seconds), unit="s", desc="training") as bar:

            def show(progress: Progress) -> None:
                bar.update(round(min(progress.seconds, total)) - bar.n)
                overlap = " ".join(f"{value:.3f}" for value in progress.overlap)
                bar.set_postfix_str(f"epoch {progress.epoch}, {progress.written_tokens:,} tokens, overlap {overlap}")

            trainer.run(show)
        return trainer

    def _evaluate(
        self, network: HiddenStateNetwork, head: Tensor, held_out: list[CollectedSequence]
    ) -> list[Acceptance]:
        draft_top_k = int(DrafterSettings.model_fields["draft_top_k"].default)
        acceptances = []
        with tqdm(unit="place", desc="held-out acceptance") as bar:
            for place, sampling in enumerate(SAMPLINGS):
                # prompts given for it were continued with each sampling; text of the training's own is of all of them
                group = held_out
                if self._held_out_prompts:
                    group = [sequence for sequence in held_out if sequence.job % len(SAMPLINGS) == place]
                acceptances.append(
                    evaluate(
                        network,
                        head,
                        group,
                        sampling,
                        depth=_EVALUATED_DEPTH,
                        draft_top_k=draft_top_k,
                        report=bar.update,
                    )
                )
        return acceptances

    def _write(
        self,
        network: HiddenStateNetwork,
        progress: Progress,
        training: list[CollectedSequence],
        acceptances: list[Acceptance],
    ) -> None:
        options = self._options
        trained = {
            "target": Path(options.target).name,
            "collected_tokens": sum(sequence.num_written for sequence in training),
            "collected_sequences": len(training),
            "seconds": round(progress.seconds),
            "steps": progress.steps,
            "written_tokens": progress.written_tokens,
            "epoch": progress.epoch,
            "options": {"learning_rate": options.learning_rate, "objective": asdict(Objective())},
        }
        hidden_state_files.save(
            network,
            options.output,
            fingerprint=hidden_state_files.tokenizer_fingerprint(options.target),
            trained=trained,
        )
        fit_first_guess(acceptances).write(options.output)
        held_out = [path.name for path in options.held_out] or [
            "part of the collected text, never trained on; each sampling is judged on text of all of them"
        ]
        (options.output / "REPORT.md").write_text(
            report.markdown(network, trained, acceptances, held_out, progress.curve)
        )


def _spread(num_layers: int) -> tuple[int, ...]:
    return tuple(sorted({max(1, num_layers // 3), max(1, 2 * num_layers // 3), num_layers}))


def _spread_out(prompts: list[tuple[str, bool]], count: int) -> list[tuple[str, bool]]:
    """At most `count` of them, from all over the list."""
    return [prompts[place * len(prompts) // count] for place in range(count)] if count < len(prompts) else prompts


def _trainable(shards: ShardDirectory) -> list[CollectedSequence]:
    return [
        sequence
        for file in shards.files()
        for sequence in read_shard(file)
        if sequence.num_written >= _FEW_WRITTEN_TOKENS
    ]


def _most_frequent(sequences: Sequence[CollectedSequence], count: int, vocab_size: int) -> Tensor:
    """The ids of the most frequent tokens of the text, ascending; low ids where fewer occur at all."""
    frequency = Counter(token for sequence in sequences for token in sequence.tokens.tolist())
    ranked = sorted(range(vocab_size), key=lambda token: (-frequency[token], token))
    return torch.tensor(sorted(ranked[:count]))


def _seen(bar: Any, sequence: CollectedSequence) -> CollectedSequence:
    bar.update(1)
    return sequence
