"""Model directories made to break the loader: one clear line, in little time and memory."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import shutil
import signal
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_async.checkpoint import load_pretrained, save_distributed, save_native
from megatron_async.checkpoint.reading.pickle_reader import PickleReader, PickleReadError
from megatron_async.cli.main import main
from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import CheckpointError, ConfigError, RequestError
from megatron_async.models.build import build_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.layers.rope import FIRST_ROWS, RotaryTable
from megatron_async.tokenizer.tokenizer import Tokenizer
from tests.support.patience import PATIENCE_SECONDS
from tests.unit.checkpoint.test_checkpoint_security import CONFIG

TINY = Path(__file__).parents[3] / "megatron_async/assets/tiny"
HUGGING_FACE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}
MOST_KIB = 200 * 1024


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """The process's peak grows by no more than 200 MiB in a test."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_KIB


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model(CONFIG, device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def kept(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kept")
    save_distributed(path / "distributed", model, CONFIG)
    save_native(path / "native", model, CONFIG)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        for kind in ("distributed", "native"):
            shutil.copy(TINY / name, path / kind)
    return path


@pytest.fixture
def distributed(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept / "distributed", tmp_path / "distributed"))


@pytest.fixture
def native(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept / "native", tmp_path / "native"))


@pytest.fixture
def hugging_face(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens": (32, 16),
        "lm_head": (32, 16),
        "model.norm": (16,),
        f"{layer}.input_layernorm": (16,),
        f"{layer}.post_attention_layernorm": (16,),
        f"{layer}.self_attn.q_proj": (16, 16),
        f"{layer}.self_attn.k_proj": (8, 16),
        f"{layer}.self_attn.v_proj": (8, 16),
        f"{layer}.self_attn.o_proj": (16, 16),
        f"{layer}.mlp.gate_proj": (24, 16),
        f"{layer}.mlp.up_proj": (24, 16),
        f"{layer}.mlp.down_proj": (16, 24),
    }
    tensors = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(HUGGING_FACE))
    return tmp_path


def refused(path: str | Path, match: str) -> str:
    """The one line that loading ``path`` ends with."""
    with pytest.raises(CheckpointError, match=match) as raised:
        load_pretrained(path)
    message = str(raised.value)
    assert message.isprintable() and len(message) < 2000
    return message


# .metadata

NESTED = b"\x80\x04)" + b"\x85" * 100_000
PICKLES = {
    "nested": (NESTED + b".", "holds no Metadata"),
    "nested_key": (b"\x80\x04}" + NESTED[2:] + b"Ns.", "a tuple is used as a key"),
    "nested_lists": (b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".", "holds no Metadata"),
    "memo_index": (b"\x80\x04Nr" + struct.pack("<I", 2**28) + b".", "holds no Metadata"),
    "memo_index_unset": (b"\x80\x04j" + struct.pack("<I", 2**28) + b".", "takes what it has not"),
    "long_text": (b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.", "truncated"),
    "long_number": (b"\x80\x04\x8b" + struct.pack("<i", -5) + b"x.", "truncated"),
    "digits": (b"I" + b"9" * 5000 + b"\n.", "corrupt: an integer in digits"),
    "number_key": (b"\x80\x04}\x8a\x10" + b"\x11" * 16 + b"Ns.", "more than 61 bits"),
    "frame": (b"\x80\x04\x95" + b"\xff" * 8 + b".", "takes what it has not"),
    "extension": (b"\x80\x02\x82\x01.", "opcode 0x82 is not allowed"),
    "buffer": (b"\x80\x05\x97.", "opcode 0x97 is not allowed"),
    "mark": (b"((((t.", "holds no Metadata"),
}


@pytest.mark.parametrize("name", PICKLES)
def test_pickle_of_metadata_is_refused(distributed: Path, name: str) -> None:
    data, reason = PICKLES[name]
    (distributed / ".metadata").write_bytes(data)
    refused(distributed, rf"\.metadata: refused: .*{reason}")


def test_reader_gives_what_pickle_gives() -> None:
    values: dict[str, Any] = {
        "a": [1, -(2**70), 2.5, None, True],
        "b": ("\u00e9", b"\x00", {3: []}),
    }
    values["again"] = values["a"]
    for protocol in range(5):
        known = {"_codecs.encode": lambda text, coding: text.encode(coding)}
        data = pickle.dumps(values, protocol)
        assert PickleReader(data, lambda name: False, known).load() == values
        for length in range(len(data) - 1):
            with pytest.raises(PickleReadError):
                PickleReader(data[:length], lambda name: False, known).load()


STORAGE: dict[str, tuple[dict[str, Any], str]] = {
    "length": ({"length": 2**40}, r"length=1099511627776 is too much for \["),
    "length_of_64_bits": ({"length": 2**63}, "offset, length of .* has a number that is no size"),
    "length_of_5000_digits": ({"length": 10**5000}, "has a number that is no size"),
    "negative_length": ({"length": -1}, "has a number that is no size"),
    "negative_offset": ({"offset": -1}, "has a number that is no size"),
    "huge_offset": ({"offset": 2**61}, "truncated: .* is not complete"),
    "text": ({"offset": "x" * 1_000_000}, "_StorageInfo.offset is not a int"),
    "array": ({"offset": [np.zeros(2)]}, "is not allowed|not a int"),
    "nul": ({"relative_path": "a\0b"}, r"'a\\x00b' is not a file of the directory"),
    "surrogate": ({"relative_path": "a\ud800"}, r"'a\\ud800' is not a file of the directory"),
    "long_name": ({"relative_path": "x" * 300}, "x: cannot be read: File name too long"),
    "escapes": ({"relative_path": "\x1b[31m"}, r"'\\x1b\[31m' is not a file of the directory"),
    "directory": ({"relative_path": ".."}, r"'\.\.' is not a file of the directory"),
}


@pytest.mark.parametrize("name", STORAGE)
def test_place_of_a_stored_tensor_is_checked(distributed: Path, name: str) -> None:
    changes, reason = STORAGE[name]
    metadata = pickle.loads((distributed / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        for field, value in changes.items():
            setattr(info, field, value)
    (distributed / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(distributed, reason)


@pytest.mark.parametrize(
    "size", (2**62, 10**5000, -1, 1.5), ids=("bits", "digits", "negative", "fraction")
)
def test_size_of_a_stored_tensor_is_checked(distributed: Path, size: Any) -> None:
    metadata = pickle.loads((distributed / ".metadata").read_bytes())
    for stored in metadata.state_dict_metadata.values():
        if hasattr(stored, "size"):
            stored.size = (size,)
    (distributed / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(distributed, r"\.metadata: refused: .*(no size|dimensions)")


# Files that are none, or too large


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 40 * 2**30)


def packed(path: Path) -> None:
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("archive/data.pkl", "w", force_zip64=True) as record,
    ):
        for _ in range(16):
            record.write(b"\0" * 2**22)


KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "fifo": (fifo, "is a pipe; it must be a regular file"),
    "device": (device, "is a device; it must be a regular file"),
    "sparse": (sparse, "the most is|corrupt|refused"),
    "directory": (Path.mkdir, "is a directory; it must be a regular file"),
}
FILES = {
    "distributed": ("config.json", ".metadata", "common.pt", "metadata.json", "__0_0.distcp"),
    "native": ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    "hugging_face": ("config.json", "model.safetensors", "generation_config.json"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("saved", "name"), [(saved, name) for saved, names in FILES.items() for name in names]
)
def test_what_is_no_file_of_a_fitting_size_is_not_read(
    request: pytest.FixtureRequest, saved: str, name: str, kind: str
) -> None:
    path: Path = request.getfixturevalue(saved)
    make, reason = KINDS[kind]
    (path / name).unlink(missing_ok=True)
    make(path / name)
    assert name in refused(path, reason)


def test_index_and_its_files_are_checked(hugging_face: Path) -> None:
    file, index = hugging_face / "model.safetensors", hugging_face / "model.safetensors.index.json"
    names = list(load_file(file))
    file.rename(hugging_face / "a.safetensors")
    for name, reason in (
        ("x" * 300, "File name too long"),
        ("b", "is a pipe"),
        ("c\0d", "not a name of a file"),
    ):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names, f"{name}.safetensors")}))
        if name == "b":
            os.mkfifo(hugging_face / "b.safetensors")
        refused(hugging_face, reason)
    index.unlink()
    sparse(index)
    refused(hugging_face, "index.json: has .* bytes; the most is")


def test_common_that_inflates_is_not_unpacked(distributed: Path) -> None:
    packed(distributed / "common.pt")
    assert (distributed / "common.pt").stat().st_size < 2**20
    refused(distributed, "common.pt: content refused: .* is compressed")


def test_records_that_overlap_are_refused(distributed: Path) -> None:
    """Ten entries of the central directory for the same bytes."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps("x" * 100_000))
        archive.filelist.extend(archive.filelist * 9)
    (distributed / "common.pt").write_bytes(stream.getvalue())
    refused(distributed, "common.pt: content refused: its records are larger than the file")


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.empty(3, 3, device="meta"), "a meta tensor no storage; give a tensor with all its"),
        (torch.eye(3).to_sparse(), "a sparse tensor; give a tensor with all its values"),
        (torch.ones(32, 16, dtype=torch.int64), "stored as torch.LongStorage, not a float"),
        (torch.ones(3, 3), "not a tensor of"),
        ([torch.ones(1)], "not a tensor"),
    ],
)
def test_tensor_without_its_values_is_refused(distributed: Path, tensor: Any, reason: str) -> None:
    metadata = pickle.loads((distributed / ".metadata").read_bytes())
    torch.save(tensor, distributed / "__0_0.distcp")
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, (distributed / "__0_0.distcp").stat().st_size
    (distributed / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(distributed, rf"__0_0\.distcp: \S+ refused: {reason}")


# config.json against the weights


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**6),
        ("hidden_size", 10**9),
        ("intermediate_size", 10**9),
        ("vocab_size", 10**9),
        ("head_dim", 10**8),
        ("num_attention_heads", 10**6),
    ],
)
def test_configuration_is_compared_with_the_weights_first(
    hugging_face: Path, field: str, value: int
) -> None:
    (hugging_face / "config.json").write_text(json.dumps({**HUGGING_FACE, field: value}))
    refused(hugging_face, "the configuration describes a model of at least|num_layers=1000000, and")


@pytest.mark.parametrize("changes", ({"num_layers": 10**6}, {"hidden_size": 2 * 10**9}))
def test_own_configuration_is_too(distributed: Path, changes: dict[str, int]) -> None:
    values = json.loads((distributed / "config.json").read_text())
    values["model"] |= changes
    (distributed / "config.json").write_text(json.dumps(values))
    refused(distributed, "the configuration describes a model of at least")


def test_positions_that_nobody_uses_cost_nothing(hugging_face: Path) -> None:
    changed = {**HUGGING_FACE, "max_position_embeddings": 10**8}
    (hugging_face / "config.json").write_text(json.dumps(changed))
    config = EngineConfig(device="cpu", max_sequence_length=64, max_requests=1)
    with DynamicInferenceEngine.from_pretrained(hugging_face, config) as engine:
        (request,) = engine.generate([[1, 2]])
    assert request.generated_tokens


def test_table_of_rotations_grows_to_what_is_reserved() -> None:
    table = RotaryTable(torch.tensor([1.0, 0.1]), FIRST_ROWS + 100)
    first = table.cos_sin
    assert not table.reserve(FIRST_ROWS) and table.cos_sin is first
    assert table.reserve(FIRST_ROWS + 8) and len(table.cos_sin) == FIRST_ROWS + 8
    assert torch.equal(table.cos_sin[:FIRST_ROWS], first)
    assert table.reserve(2**40) and len(table.cos_sin) == FIRST_ROWS + 100


# Tokenizers


def edit(path: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads((path / name).read_text())
    change(values)
    (path / name).write_text(json.dumps(values))


REGEX = {"Regex": "(a+)+$"}
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no_charsmap": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "panicked: Precompiled",
    ),
    "bad_charsmap": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////9BQQ=="}},
        "panicked: index out of bounds",
    ),
    "normalizer": (
        {"normalizer": {"type": "Replace", "pattern": REGEX, "content": ""}},
        "panicked: Onig: Regex search error",
    ),
    "split": (
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": REGEX,
                "behavior": "Isolated",
                "invert": False,
            }
        },
        "panicked: Onig: Regex search error",
    ),
    "length": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "panicked: chunk size"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_tokenizer_that_panics_is_refused(
    native: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    changes, reason = BROKEN[name]
    edit(native, "tokenizer.json", lambda values: values.update(changes))
    refused(native, f"tokenizer.json: not a valid tokenizer file: the tokenizers library {reason}")
    assert capfd.readouterr().err == ""


def test_bpe_without_its_unknown_token_is_refused(native: Path) -> None:
    edit(native, "tokenizer.json", lambda values: values["model"].update(unk_token="<nope>"))
    refused(native, "unk_token='<nope>' of its BPE model is not in the vocabulary")


def test_text_that_a_tokenizer_cannot_take_is_an_error_of_the_request(native: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    edit(
        native, "tokenizer.json", lambda v: v.update(model=model, decoder=None, pre_tokenizer=None)
    )
    (native / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_directory(native)
    assert tokenizer.tokenize("a") == [0]
    with pytest.raises(RequestError, match="text cannot be tokenized: WordLevel error"):
        tokenizer.tokenize("b")


@pytest.mark.parametrize("token", ("\ud800", {"content": "\udfff"}))
def test_surrogates_in_tokenizer_config_are_refused(native: Path, token: Any) -> None:
    edit(native, "tokenizer_config.json", lambda values: values.update(eos_token=token))
    refused(native, r"eos_token='\\u\w{4}' is not in the vocabulary")


# Values of a caller, and what errors say


@pytest.mark.parametrize("flag", (np.array([True, False]), np.array(True), "yes", 1))
def test_flags_are_flags(flag: Any) -> None:
    with pytest.raises(CheckpointError, match=r"allow_non_finite_weights=.* must be True or False"):
        load_pretrained("tiny", allow_non_finite_weights=flag)
    for name in ("tie_word_embeddings", "qk_norm", "normalization", "activation"):
        with pytest.raises(CheckpointError, match=f"{name}=.* must be"):
            ModelConfig(**{**CONFIG.to_dict(), name: flag})
    for name in ("debug", "inference_async_scheduling", "dtype", "speculative_method"):
        with pytest.raises(ConfigError, match=f"{name}=.* must be"):
            EngineConfig(**{name: flag})


def test_integers_of_many_digits_are_refused(native: Path) -> None:
    many = 10**5000
    with pytest.raises(CheckpointError, match="vocab_size=a number of too many digits must be"):
        ModelConfig(**{**CONFIG.to_dict(), "vocab_size": many})
    with pytest.raises(ConfigError, match="max_requests=a number of too many digits must be"):
        EngineConfig(max_requests=many)
    content = (native / "config.json").read_text().replace("32", "9" * 5000, 1)
    (native / "config.json").write_text(content)
    refused(native, "config.json: not valid JSON: an integer has too many digits")


def test_error_shows_neither_megabytes_nor_escapes(hugging_face: Path) -> None:
    text = "\x1b[2J\u202e\ud800\r\n" * 200_000
    for changes in ({"model_type": text}, {"torch_dtype": text}, {"hidden_act": text}):
        (hugging_face / "config.json").write_text(json.dumps({**HUGGING_FACE, **changes}))
        message = refused(hugging_face, "config.json: .*not (supported|one of)")
        assert r"\x1b[2J" in message
    (hugging_face / "config.json").write_text(json.dumps(HUGGING_FACE))
    save_file({"\x1b]0;x\x07" * 1000: torch.ones(1)}, hugging_face / "model.safetensors")
    refused(hugging_face, "the configuration describes")


@pytest.mark.parametrize("path", ("x" * 300, "x/" * 3000, "a\0b"))
def test_path_that_no_file_can_have_is_one_line(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", path, "--prompt", "x"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("megatron-async: error: ") and err.count("\n") == 1


def _run_interruptible(program: str) -> subprocess.CompletedProcess[str]:
    """Run it as a terminal does: the process that runs the tests may ignore Ctrl-C."""
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        check=False,
    )


@pytest.mark.parametrize("seconds", (0.0, 0.3))
def test_ctrl_c_while_modules_are_imported_is_one_line(seconds: float) -> None:
    """From the first import of the package's program on: the interpreter's own are before."""
    program = (
        "import os, signal, sys, threading\n"
        "from megatron_async.__main__ import main\n"
        f"timer = threading.Timer({seconds}, os.kill, (os.getpid(), signal.SIGINT))\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'megatron_async.cli' and not timer.is_alive(): timer.start()\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv[1:] = ['demo']\n"
        "sys.exit(main())\n"
    )
    done = _run_interruptible(program)
    assert (done.returncode, done.stderr) == (130, "\nmegatron-async: interrupted\n")


def test_ctrl_c_while_the_parser_is_built_is_one_line() -> None:
    program = (
        "import os, signal, sys\n"
        "from megatron_async.__main__ import main\n"
        "from megatron_async.cli.options import options\n"
        "def interrupted(*args, **kwargs): os.kill(os.getpid(), signal.SIGINT)\n"
        "options.OneLineErrorParser.__init__ = interrupted\n"
        "sys.exit(main())\n"
    )
    done = _run_interruptible(program)
    assert (done.returncode, done.stderr) == (130, "\nmegatron-async: interrupted\n")


def test_argument_of_a_megabyte_is_one_short_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "--max-new-tokens", "9\x1b" * 500_000])
    err = capsys.readouterr().err
    assert len(err) < 2000 and err.count("\n") == 1 and err.strip().isprintable()
