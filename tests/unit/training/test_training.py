"""Training: the loss and the attention against plain formulas, stopping and going on, and the whole command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.tiny_models import CONFIGS, VOCAB_SIZE, VOCABULARY, save, tiny_model
from tests.unit.drafting.test_hidden_state_model import HIDDEN_SIZE, network_for, states_of
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from adaptive_verification.drafting.hidden_state_network import HiddenStateNetwork
from adaptive_verification.errors import SettingsError
from adaptive_verification.serving.cli import main
from adaptive_verification.training import pipeline
from adaptive_verification.training.batches import epochs, make_batch
from adaptive_verification.training.evaluation import evaluate
from adaptive_verification.training.jobs import Sampling
from adaptive_verification.training.objective import Objective, loss
from adaptive_verification.training.pipeline import DrafterTraining, TrainDrafterOptions
from adaptive_verification.training.shards import CollectedSequence, ShardDirectory, read_shard
from adaptive_verification.training.trainer import Progress, Trainer, TrainingOptions
from adaptive_verification.training.unrolled_attention import ATTENTION_NAME, Unrolling

TARGET = tiny_model(CONFIGS["llama"])


def text(count: int = 6, length: int = 20) -> list[CollectedSequence]:
    """Sequences whose last three quarters the target is said to have written."""
    generator = torch.Generator().manual_seed(5)
    sequences = []
    for number in range(count):
        tokens = torch.randint(0, VOCAB_SIZE, (length + number,), generator=generator)
        with torch.inference_mode():
            log_normalizer = TARGET(input_ids=tokens[None, :-1]).logits[0].logsumexp(-1)
        log_normalizer = log_normalizer.clone()
        log_normalizer[: length // 4] = torch.nan
        states = states_of(TARGET, tokens[:-1], (1, 3)).to(torch.bfloat16)
        sequences.append(CollectedSequence(number, tokens.int(), states, log_normalizer))
    return sequences


def fresh_network() -> HiddenStateNetwork:
    network = network_for(TARGET)
    network.layers.set_attn_implementation(ATTENTION_NAME)
    return network


def test_unrolled_attention_is_attention_over_the_prefix_that_a_draft_has() -> None:
    generator = torch.Generator().manual_seed(1)
    heads, length, dim, depth = 2, 7, 4, 3
    passes = [[torch.randn(1, heads, length, dim, generator=generator) for _ in range(3)] for _ in range(depth)]
    unrolling = Unrolling()
    outputs = [unrolling.attend(0, query, key, value, 0.5) for query, key, value in passes]
    for number in range(depth):
        for place in range(number, length):
            # places up to place - number come from the first pass, each later one from the next pass
            sources = [(max(0, t - (place - number)), t) for t in range(place + 1)]
            keys = torch.stack([passes[i][1][0, :, t] for i, t in sources], dim=1)  # [heads, place + 1, dim]
            values = torch.stack([passes[i][2][0, :, t] for i, t in sources], dim=1)
            query = passes[number][0][0, :, place]
            weights = (torch.einsum("hd,htd->ht", query, keys) * 0.5).softmax(-1)
            expected = torch.einsum("ht,htd->hd", weights, values)
            torch.testing.assert_close(outputs[number][0, place], expected)


def test_the_reported_overlap_is_the_evaluations_and_a_sum_of_minima() -> None:
    network, sequences = fresh_network(), text(3)
    batch = make_batch(sequences, HIDDEN_SIZE)
    _, overlaps = loss(network, batch, Objective(), 2)
    head = TARGET.get_output_embeddings().weight.detach()
    evaluated = evaluate(network, head, sequences, Sampling(1.0), depth=2, draft_top_k=VOCAB_SIZE)
    torch.testing.assert_close(
        overlaps.double(), torch.tensor(evaluated.by_position, dtype=torch.float64), atol=2e-3, rtol=2e-3
    )
    assert evaluated.num_places == sum(sequence.num_written for sequence in sequences)
    with torch.inference_mode():
        p = TARGET(input_ids=sequences[0].tokens[None, :-1].long()).logits[0].softmax(-1)
        hidden = network(
            batch.tokens[:1],
            network.context_of_target(batch.previous_states[:1]),
            torch.arange(batch.tokens.shape[1])[None],
            unrolling=Unrolling(),
        )
        q = torch.zeros(batch.tokens.shape[1], VOCAB_SIZE)
        q[:, network.token_ids] = network.logits(hidden)[0].softmax(-1)
    first = evaluate(network, head, sequences[:1], Sampling(1.0), depth=1, draft_top_k=VOCAB_SIZE).by_position[0]
    written = ~sequences[0].log_normalizer.isnan()
    assert torch.minimum(p[written], q[: len(p)][written]).sum(-1).mean().item() == pytest.approx(first, abs=5e-3)


def test_at_temperature_0_acceptance_is_how_often_the_most_likely_tokens_agree() -> None:
    network, sequences = fresh_network(), text(2)
    head = TARGET.get_output_embeddings().weight.detach()
    evaluated = evaluate(network, head, sequences, Sampling(0.0), depth=3, draft_top_k=8)
    places = evaluated.num_places
    for value in evaluated.by_position:
        assert value * places == pytest.approx(round(value * places), abs=1e-6)


class Stop(Exception):
    """Ends training after a number of steps."""


def train(trainer: Trainer, steps: int) -> None:
    def stop(progress: Progress) -> None:
        if progress.steps == steps:
            raise Stop

    with pytest.raises(Stop):
        trainer.run(stop)


def test_training_raises_the_overlap_at_every_depth(tmp_path: Path) -> None:
    sequences = text()
    options = TrainingOptions(minutes=60, batch_tokens=200, learning_rate=5e-3, warmup_share=0.0)
    trainer = Trainer(fresh_network(), sequences, options, Objective(), tmp_path)
    batch = make_batch(sequences, HIDDEN_SIZE)
    with torch.no_grad():
        before = loss(trainer.network, batch, Objective(), 3)[1]
    train(trainer, steps=80)
    with torch.no_grad():
        after = loss(trainer.network, batch, Objective(), 3)[1]
    p = (
        trainer.network.logits(batch.target_states[batch.is_written]) - batch.log_normalizer[batch.is_written][:, None]
    ).exp()
    reachable = p.sum(-1).mean()  # the rest lies outside the draft vocabulary
    assert (reachable - after < 0.5 * (reachable - before)).all()


def test_interrupted_training_goes_on_where_it_was(tmp_path: Path) -> None:
    options = TrainingOptions(minutes=60, batch_tokens=200)
    trainer = Trainer(fresh_network(), text(), options, Objective(), tmp_path)

    def interrupt(progress: Progress) -> None:
        if progress.steps == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.run(interrupt)
    other = Trainer(fresh_network(), text(), options, Objective(), tmp_path)
    assert other.progress == trainer.progress
    for mine, theirs in zip(other.network.parameters(), trainer.network.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    moments = [one._optimizer.state_dict()["state"] for one in (other, trainer)]
    assert moments[0].keys() == moments[1].keys()
    assert all(torch.equal(moments[0][key]["exp_avg"], moments[1][key]["exp_avg"]) for key in moments[0])
    assert moments[0]
    train(other, steps=7)
    assert other.progress.seconds > trainer.progress.seconds


def test_an_epoch_has_every_sequence_once_in_batches_of_the_size_asked_for() -> None:
    sequences = text(9)
    seen = []
    for epoch, batch in epochs(sequences, batch_tokens=70, hidden_size=HIDDEN_SIZE, seed=0):
        if epoch:
            break
        assert batch.tokens.numel() <= 70
        seen += [tuple(row[:10].tolist()) for row in batch.tokens]
    assert sorted(seen) == sorted(tuple(sequence.tokens[:10].tolist()) for sequence in sequences)


def test_the_command_makes_a_drafter_and_goes_on_when_it_is_given_more_minutes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save(tmp_path / "target")
    names = {"default": target}
    monkeypatch.setattr("adaptive_verification.serving.train_commands.resolve_model", names.__getitem__)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"token{i}"}) + "\n" for i in range(20)))
    arguments = ["train-drafter", "--target", "default", "--output", str(tmp_path / "drafter"), "--rows", "4"]
    arguments += ["--prompts", str(prompts), "--draft-vocabulary", "50", "--max-new-tokens", "8", "--device", "cpu"]
    arguments += ["--max-prompt-tokens", "16", "--held-out", str(prompts), "--max-held-out", "3"]
    assert main([*arguments, "--minutes", "0.1"]) == 0
    report = (tmp_path / "drafter" / "REPORT.md").read_text()
    assert report in capsys.readouterr().out
    assert report.count("| temperature") == 4
    held_out = _sequences(tmp_path / "drafter.work" / "held-out")
    assert {int(sequence.tokens[0]) for sequence in held_out} == {0, 6, 13}  # from all over the file
    first = json.loads((tmp_path / "drafter" / "config.json").read_text())["trained"]
    assert main([*arguments, "--minutes", "0.2"]) == 0
    second = json.loads((tmp_path / "drafter" / "config.json").read_text())["trained"]
    assert second["collected_tokens"] > first["collected_tokens"] > 0
    assert second["steps"] > first["steps"] > 0
    curve = (tmp_path / "drafter" / "REPORT.md").read_text().partition("| tokens trained on |")[2].splitlines()[2:]
    assert [line.split(" | ")[0] for line in curve] == [
        f"| {tokens:,}" for tokens in (0, first["written_tokens"], second["written_tokens"])
    ]


def test_held_out_prompts_stay_whole_where_training_prompts_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save(tmp_path / "target")
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="token0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(target)
    monkeypatch.setattr(pipeline, "_TEMPLATE_TOKENS", 0)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": " ".join(f"token{i}" for i in range(1, 81))}) + "\n")
    options = TrainDrafterOptions(
        target=target,
        output=tmp_path / "drafter",
        work=tmp_path / "work",
        prompts=[prompts],
        held_out=[prompts],
        minutes=0.1,
        rows=4,
        max_new_tokens=8,
        max_prompt_tokens=16,
        draft_vocabulary=50,
        device="cpu",
    )
    DrafterTraining(options).run()
    for part, length in (("held-out", 80), ("text", 16)):
        for sequence in _sequences(tmp_path / "work" / part):
            assert sequence.tokens[:length].tolist() == list(range(1, length + 1))
            assert len(sequence.tokens) - sequence.num_written == length


def _sequences(directory: Path) -> list[CollectedSequence]:
    return [sequence for file in ShardDirectory(directory).files() for sequence in read_shard(file)]


def test_without_held_out_prompts_part_of_the_text_is_held_out_and_stays_so(tmp_path: Path) -> None:
    target = save(tmp_path / "target")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"token{i}"}) + "\n" for i in range(20)))
    for minutes in (0.1, 0.15):
        options = TrainDrafterOptions(
            target=target,
            output=tmp_path / "drafter",
            work=tmp_path / "work",
            prompts=[prompts],
            held_out=[],
            minutes=minutes,
            rows=4,
            max_new_tokens=8,
            max_prompt_tokens=16,
            draft_vocabulary=50,
            device="cpu",
        )
        training = DrafterTraining(options)
        acceptances = training.run()
        assert all(acceptance.num_places > 0 for acceptance in acceptances)
        written = json.loads((tmp_path / "drafter" / "config.json").read_text())["trained"]
        jobs = [one.job for one in _sequences(tmp_path / "work" / "text") if one.num_written > 1]
        assert 0 in jobs
        assert written["collected_sequences"] == len([job for job in jobs if job % 41])


def test_a_draft_vocabulary_that_is_none_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    options = TrainDrafterOptions(
        target=save(tmp_path / "target"),
        output=tmp_path / "drafter",
        work=tmp_path / "work",
        prompts=[],
        held_out=[],
        minutes=1,
        draft_vocabulary=VOCAB_SIZE + 1,
    )
    with pytest.raises(SettingsError, match="draft_vocabulary is 98; it must be 1 to 97"):
        DrafterTraining(options)
    assert not (tmp_path / "drafter").exists()
