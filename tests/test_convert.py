"""Conversion from Hugging Face's format: the same numbers as transformers computes, and everything that can go wrong."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qwen_chat import __main__ as tools
from qwen_chat import convert, interrupt, weights
from qwen_chat.config import Config, Runtime
from qwen_chat.convert import ConvertError
from qwen_chat.offline import Scorer, tensor_types

ROOT = Path(__file__).resolve().parent.parent
MISSING = [name for name in convert.NEEDED if importlib.util.find_spec(name) is None]
needs_converter = pytest.mark.skipif(bool(MISSING), reason=f"requirements-convert.txt is not installed ({', '.join(MISSING)} missing)")
PART = json.loads((Path(__file__).parent / "qwen2_tokenizer.json").read_text(encoding="utf-8"))
USED = list(PART["vocab"].values())
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # Qwen2's
TEXT = "The tide turns twice a day, at 6:15 and 18:40. 潮水一天涨落两次。\n\n  - 'first' item\n"


# A small model in Qwen2's form


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    """A small random Qwen2 with words and embeddings in the real number, as save_pretrained writes it."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("models") / "Tiny-Qwen2-Instruct"
    qwen2_tokenizer().save_pretrained(folder)
    torch.manual_seed(1)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=151936, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.1, bos_token_id=151643, eos_token_id=151645,
    ))
    with torch.no_grad():
        unused = torch.ones(151936, dtype=bool)
        unused[USED] = False
        model.get_input_embeddings().weight[unused] = 0  # so that it answers with words there are
        for name, values in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # as they are made, all 0 or 1: a mix-up would not show
                values.add_(torch.randn_like(values) * 0.2)
    model.save_pretrained(folder)
    return folder


def qwen2_tokenizer():
    """Of Qwen2.5's tokenizer the bytes, and what it makes of the text by which the converter knows it: the ids of others
    stay unused."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(PART["vocab"], [tuple(merge.split(" ")) for merge in PART["merges"]]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in PART["vocab"] if token.startswith("<|")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def reference(model_folder):
    """The model and its tokenizer in transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture(scope="module")
def scorer(model_folder, tmp_path_factory):
    """The model as F32, in llama.cpp."""
    file = tmp_path_factory.mktemp("f32") / "tiny.gguf"
    convert.to_gguf(model_folder, file, "f32")
    scorer = Scorer(file, Runtime(n_threads=1, n_threads_batch=1))
    yield scorer
    scorer.close()


@needs_converter
def test_the_logits_are_those_of_transformers(reference, scorer):
    import torch

    model, tokenizer = reference
    tokens = tokenizer.encode(TEXT)
    ours = np.concatenate([piece[:, USED] for piece in scorer.score(tokens)])
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()[:, USED]
    assert ours.shape == theirs.shape
    assert theirs.std() > 0.5  # else all would be alike
    difference = np.abs(ours - theirs) / theirs.std()  # not 0, for llama.cpp's cache is F16
    assert difference.max() < 0.03 and difference.mean() < 0.003
    assert (ours.argmax(-1) == theirs.argmax(-1)).all()


@needs_converter
def test_the_likeliest_answer_is_the_same_token_by_token(reference, scorer):
    import torch

    model, tokenizer = reference
    prompt = tokenizer.encode("Once upon a time")
    with torch.inference_mode():
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0].tolist()[len(prompt):]
    *_, logits = scorer.score(prompt)
    ours = []
    for position in range(len(prompt), len(prompt) + len(theirs)):
        ours.append(int(logits[-1].argmax()))
        logits = scorer.read(ours[-1:], position)
    assert ours == theirs and len(set(ours)) > 3


@needs_converter
def test_text_and_control_tokens_become_the_same_tokens(reference, scorer):
    _, tokenizer = reference
    assert scorer.tokenize(TEXT) == tokenizer.encode(TEXT)
    messages = [{"role": "user", "content": "Hi 123"}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert scorer.tokenize(chat, special=True) == tokenizer.encode(chat)
    assert scorer.chat_template == TEMPLATE
    assert scorer.is_end(tokenizer.eos_token_id)


@needs_converter
def test_a_quantised_file_is_made_and_answers(model_folder, tmp_path, capsys):
    target = tmp_path / "tiny.gguf"
    assert convert.convert(str(model_folder), "Q4_K_M", target, Config(runtime=Runtime(n_threads=1, n_threads_batch=1))) == target
    types = tensor_types(target)
    assert types["blk.0.attn_norm.weight"] == "F32" and types["blk.0.attn_q.weight"] not in ("F32", "F16")
    assert "output.weight" not in types  # tied to the embeddings
    assert "你好，请介绍一下你自己" in capsys.readouterr().out
    assert os.listdir(tmp_path) == ["tiny.gguf"]
    with pytest.raises(ConvertError, match="is there already; --force"):
        convert.convert(str(model_folder), "Q4_K_M", target, Config())


@needs_converter
def test_what_the_converter_cannot_do_is_told_in_a_sentence(model_folder, tmp_path):
    def refused(words: str, change) -> None:
        folder = tmp_path / "model"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(model_folder, folder)
        change(folder)
        with pytest.raises(ConvertError, match=words) as error:
            convert.convert(str(folder), "Q4_K_M", tmp_path / "out.gguf", Config())
        assert "Traceback" not in str(error.value) and os.listdir(tmp_path) == ["model"]

    refused("Model NoneSuchForCausalLM is not supported", lambda folder: edit(folder / "config.json", architectures=["NoneSuchForCausalLM"]))

    def other_tokenizer(folder):
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text())
        content["model"]["merges"].pop()
        file.write_text(json.dumps(content))

    refused("its tokenizer is none that the converter knows", other_tokenizer)


@needs_converter
@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_conversion_leaves_nothing(number, model_folder, tmp_path):
    command = [sys.executable, "-u", "-m", "qwen_chat", "convert", model_folder, "--output", tmp_path / "out.gguf"]
    process = subprocess.Popen(list(map(str, command)), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline().startswith("Converting ")
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == interrupt.STATUS and "Traceback" not in errors
    assert os.listdir(tmp_path) == []


# Folders that hold no model that can be converted


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture
def folder(tmp_path) -> Path:
    """What a model's folder looks like from outside."""
    folder = tmp_path / "Some-Instruct"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def test_a_whole_folder_is_accepted(folder):
    convert.check(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text(TEMPLATE)  # where newer versions put it
    convert.check(folder)


@pytest.mark.parametrize(
    "remove, add, words",
    [
        (["config.json"], {}, "is no model folder: there is no config.json in it$"),
        (["config.json"], {"a.gguf": "GGUF"}, "no config.json in it; a.gguf needs no conversion"),
        ([], {"config.json": "{oops"}, "config.json cannot be read: not JSON"),
        ([], {"config.json": '{"model_type": "qwen2"}'}, "names no architecture"),
        ([], {"config.json": "[]"}, "names no architecture"),
        (["model.safetensors"], {}, "no .safetensors files in it, no weights"),
        (["model.safetensors"], {"pytorch_model.bin": ""}, "only pytorch_model.bin, which is a pickle and could run code"),
        (["config.json", "model.safetensors"], {"adapter_config.json": "{}", "adapter_model.safetensors": ""}, "is a LoRA adapter"),
        ([], {"model.safetensors.index.json": '{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}'}, "is not complete: model-2.safetensors missing"),
        ([], {"model.safetensors": "version https://git-lfs.github.com/spec/v1\n"}, "only a pointer to the file; .*git lfs pull"),
        (["tokenizer.json"], {}, "has no tokenizer"),
        (["tokenizer_config.json"], {}, "has no chat template, so it is not a chat model"),
        ([], {"tokenizer_config.json": "{}"}, "has no chat template"),
    ],
)
def test_a_folder_that_is_no_model_is_refused_with_a_reason(remove, add, words, folder):
    for name in remove:
        (folder / name).unlink()
    for name, content in add.items():
        (folder / name).write_text(content)
    with pytest.raises(ConvertError, match=words):
        convert.check(folder)


def test_other_sources_are_refused_with_a_reason(folder, small_model, tmp_path):
    def refused(source, words):
        with pytest.raises(ConvertError, match=words):
            convert.convert(str(source), "Q4_K_M", tmp_path / "out.gguf", Config())

    refused(small_model, "is a GGUF file already; `python -m qwen_chat quantize`")
    refused(folder / "model.safetensors", "is a file; give the folder it is in")
    refused(tmp_path / "none", "no such folder; give one, or a repository of the hub as owner/name")
    with pytest.raises(ConvertError, match="there is no such folder"):
        convert.convert(str(folder), "Q4_K_M", tmp_path / "none" / "out.gguf", Config())


def test_without_the_converter_the_command_that_installs_it_is_told(folder, tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(convert.importlib.util, "find_spec", lambda name: None if name in ("torch", convert.CONVERTER) else find(name))
    assert tools.main(["convert", str(folder), "--output", str(tmp_path / "out.gguf")]) == 1
    errors = capsys.readouterr().err
    assert f"{sys.executable} -m pip install -r {ROOT / convert.REQUIREMENTS}" in errors and (ROOT / convert.REQUIREMENTS).exists()


def test_a_disk_that_is_too_small_is_told_before_anything_is_done(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "check_installed", lambda: None)
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda where: shutil._ntuple_diskusage(10, 0, 10))
    with pytest.raises(ConvertError, match="the disk is full: up to 0 MB are needed .* --output names another place"):
        convert.convert(str(folder), "Q4_K_M", tmp_path / "out.gguf", Config())


def test_an_unknown_type_is_told(folder, capsys):
    assert tools.main(["convert", str(folder), "--type", "Q4_K_X"]) == 1
    assert "did you mean Q4_K" in capsys.readouterr().err


def test_a_hub_that_cannot_be_reached_is_told(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(convert, "check_installed", lambda: None)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert tools.main(["convert", "owner/none-such", "--output", str(tmp_path / "out.gguf")]) == 3
    errors = capsys.readouterr().err
    assert "owner/none-such cannot be fetched" in errors and "127.0.0.1:9 cannot be reached" in errors and "give the folder" in errors


def test_only_data_is_fetched_from_the_hub_and_the_token_stays_with_it(monkeypatch, tmp_path):
    import huggingface_hub

    asked = []

    def download(repo_id, **options):
        asked.append({"repo_id": repo_id, **options})
        return str(tmp_path)

    monkeypatch.setattr(weights, "_probe", lambda endpoints: ((endpoint, None) for endpoint in endpoints))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for endpoint, token in (("https://huggingface.co", None), ("https://ann:word@mirror.example", False)):
        assert weights.folder_from_hub("owner/name", "v1", convert.PATTERNS, [endpoint]) == tmp_path
        assert asked[-1]["token"] is token and asked[-1]["revision"] == "v1" and "word" not in asked[-1]["endpoint"]
    assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in asked[0]["allow_patterns"])


@pytest.mark.parametrize(
    "output, words",
    [
        ("INFO:hf-to-gguf:Loading\nERROR:hf-to-gguf:Model X is not supported\n", "Model X is not supported"),
        ('Traceback (most recent call last):\n  File "x", line 1\nKeyError: \'num_layers\'\n', "KeyError: 'num_layers'"),
        ("Traceback\nOSError: [Errno 28] No space left on device\n", "the disk is full"),
        ("WARNING: ...\nNotImplementedError: BPE pre-tokenizer was not recognized - update get_vocab_base_pre()\n", "its tokenizer is none that the converter knows"),
        ("", "it ended with status -9"),
    ],
)
def test_the_converters_complaint_is_one_line(output, words):
    assert words in convert.reason(output, -9) and "\n" not in convert.reason(output, -9)
