"""Types that users choose instead of a recipe's, and what a file would be."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.paths import DATA

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.files.quantizing import recipes

from ...golden_files import model, path


def types_of(file):
    return {name: info.type.name for name, info in jq.gguf.read_header(file).tensors.items()}


CHOSEN = {
    r"^output\.": "Q8_0",
    r"blk\.0\.attn_[kv]\.": "F16",
    "attn_v": "Q6_K",
    "ffn": "Q5_0",
}


def test_choices_have_precedence_in_their_order(tmp_path):
    """Names of norms fit, too, but keep their type."""
    file = tmp_path / "out.gguf"
    models.quantize_file(path("llama-gqa"), file, "Q4_K_S", types=CHOSEN)
    types, usual = types_of(file), types_of(path("llama-gqa"))
    assert types["output.weight"] == "Q8_0" and types["token_embd.weight"] == "Q4_K"
    assert types["blk.0.attn_v.weight"] == types["blk.0.attn_k.weight"] == "F16"
    assert types["blk.1.attn_v.weight"] == "Q6_K" and types["blk.1.attn_k.weight"] == "Q4_K"
    assert types["blk.1.ffn_down.weight"] == types["blk.0.ffn_gate.weight"] == "Q5_0"
    assert types["blk.0.ffn_norm.weight"] == usual["blk.0.ffn_norm.weight"] == "F32"
    in_memory = models.named_tensors(models.quantize(model("llama-gqa"), "Q4_K_S", types=CHOSEN))
    assert in_memory["blk.1.ffn_down.weight"].format == "Q5_0"
    assert in_memory["blk.0.attn_v.weight"].dtype == jnp.float16


def test_a_plan_is_what_would_be_written(tmp_path):
    """Phi 3's matrices are fused in files."""
    file = tmp_path / "out.gguf"
    for name in ("qwen2-odd", "phi3"):
        args = path(name), "Q5_K_M"
        with pytest.warns(UserWarning):
            plan = models.quantization_plan(*args, types={"attn_qkv|attn_v": "Q8_0"})
            models.quantize_file(args[0], file, args[1], types={"attn_qkv|attn_v": "Q8_0"})
        tensors = jq.gguf.read_header(file).tensors
        assert plan.types == types_of(file)
        assert plan.shapes == {name: info.shape for name, info in tensors.items()}
        assert plan.nbytes == sum(info.nbytes for info in tensors.values())
        weights = sum(jnp.prod(jnp.array(shape)).item() for shape in plan.shapes.values())
        assert plan.bits_per_weight == pytest.approx(8 * plan.nbytes / weights)


def test_layers_with_a_choice_do_not_count():
    """Q4_K_S makes the first four layers' attn_v Q5_K, of those without a choice."""
    kept = models.quantization_plan(path("llama-gqa"), "Q4_K_S")
    assert kept.types["blk.1.attn_v.weight"] == "Q5_K"
    shown = models.quantization_plan(path("smollm3"), "Q4_K_S", types={r"blk\.0\.attn_v": "Q6_K"})
    assert shown.types["blk.0.attn_v.weight"] == "Q6_K"
    assert {shown.types[f"blk.{layer}.attn_v.weight"] for layer in (1, 2, 3)} == {"Q5_K"}


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ({"attn_x": "Q8_0"}, "'attn_x' is found in no name"),
        ({"^output": "Q8_0"}, "the embedding is the output layer"),
        ({"norm": "Q8_0"}, "'norm' is found in no name"),
        ({"attn_v": "Q9"}, "has type 'Q9'; it must be one of"),
        ({"attn_v": 8}, "has type 8"),
        ({"(": "Q8_0"}, "is not a regular expression"),
        ({3: "Q8_0"}, "is not a regular expression"),
    ],
)
def test_bad_choices(types, message, tmp_path):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        models.quantize_file(path("qwen2-odd"), tmp_path / "x.gguf", "Q4_K_M", types=types)
    assert not list(tmp_path.iterdir())


def test_copies_keep_the_bytes(tmp_path):
    """A file's in other parts; choices change single tensors; metadata stays."""
    source = path("gpt-oss-mxfp4")
    first, *_ = models.quantize_file(source, tmp_path / "copy.gguf", "COPY", max_bytes=1 << 20)
    copied, want = jq.gguf.read(first), jq.gguf.read(source)
    assert {key: copied.metadata[key] for key in want.metadata} == want.metadata
    for name, tensor in want.tensors.items():
        got = copied.tensors[name]
        if isinstance(tensor, jq.QuantizedArray):
            assert got.to_gguf_bytes() == tensor.to_gguf_bytes()
        else:
            np.testing.assert_array_equal(got, tensor)
    plan = models.quantization_plan(source, "COPY", types={"attn_k": "F16"})
    own = types_of(source)
    other = {n: k for n, k in plan.types.items() if k != own[n]}
    assert other == {n: "F16" for n in own if "attn_k.weight" in n}
    with pytest.raises(ValueError, match="type='COPY' must be one of"):
        models.quantize(model("llama-gqa"), "COPY")


def test_copies_of_folders(tmp_path):
    """Matrices keep their floats' type, and vectors become float32."""
    folder = DATA / "checkpoints" / "qwen3"
    file = tmp_path / "copy.gguf"
    models.quantize_file(folder, file, "COPY")
    header = jq.gguf.read_header(file)
    with models.CheckpointSource(folder) as opened:
        stored = {opened._weights.stored[one.names[0]].dtype for one in opened._locations.values()}
        assert stored == {"BF16"} and opened.types == types_of(file)
    kinds = {(len(t.shape) > 1, t.type.name) for t in header.tensors.values()}
    assert kinds == {(True, "BF16"), (False, "F32")}
    tokens = np.arange(8)[None] % 64
    got, want = models.load(file).logits(tokens), models.load(folder).logits(tokens)
    np.testing.assert_array_equal(got, want)
    assert header.metadata["general.file_type"] == recipes.file_type("BF16")
