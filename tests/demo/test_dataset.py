"""The data set script: what it writes, that MaxText's own message class reads it, and what it refuses."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ridgeway.demo import dataset

pytestmark = pytest.mark.maxtext


def write_jsonl(path: Path, *values: object) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), "utf-8")
    return path


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
    values = [{"text": f"{i} " + " ".join(words[i % 5 :]) + "\n  indented é 漢\n"} for i in range(40)]
    return write_jsonl(tmp_path / "in.jsonl", *values)


def read_records(directory: Path) -> list[bytes]:
    from array_record.python.array_record_module import ArrayRecordReader

    records = []
    for path in sorted(directory.glob("*.array_record")):
        reader = ArrayRecordReader(str(path))
        records.append(reader.read_all())
        reader.close()
    # Undo the dealing out: record i is in shard i % shards.
    return [shard[i] for i in range(max(map(len, records))) for shard in records if i < len(shard)]


@pytest.mark.parametrize("text", ["", "a", "é漢\n", "x" * 127, "x" * 128, "y" * 300_000])
def test_maxtext_parses_the_example(text: str) -> None:
    from maxtext.input_pipeline.protos import example_pb2

    encoded = dataset.encode_example(text)
    example = example_pb2.Example()  # pyright: ignore[reportAttributeAccessIssue]
    example.ParseFromString(encoded)
    assert dict(example.features.feature).keys() == {"text"}
    assert list(example.features.feature["text"].bytes_list.value) == [text.encode()]
    assert example.SerializeToString(deterministic=True) == encoded


def test_build_writes_all_records_in_order(tmp_path: Path, texts: Path) -> None:
    built = dataset.build(tmp_path / "out", jsonl=texts, shards=3)
    expected = [json.loads(line)["text"] for line in texts.read_text("utf-8").splitlines()]
    assert read_records(built.directory) == [dataset.encode_example(text) for text in expected]
    assert (built.records, built.documents, built.reused) == (40, 40, False)
    names = sorted(path.name for path in built.directory.iterdir())
    assert names == [
        "manifest.json",
        "text-00000-of-00003.array_record",
        "text-00001-of-00003.array_record",
        "text-00002-of-00003.array_record",
        "tokenizer.model",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out"]


def test_tokenizer_gives_back_any_text(tmp_path: Path, texts: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    built = dataset.build(tmp_path / "out", jsonl=texts)
    tokenizer = SentencePieceProcessor(model_file=str(built.tokenizer))
    text = "def f(x):\n\treturn  x\n\n    # ☃ žluťoučký <|user|> ok\n"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.vocab_size() == built.pieces <= 512
    assert tokenizer.unk_id() not in tokens
    assert (tokenizer.pad_id(), tokenizer.bos_id(), tokenizer.eos_id()) == (0, 1, 2)
    assert len(tokenizer.encode("<|user|>")) == 1


def test_same_input_same_bytes_and_nothing_is_written_twice(tmp_path: Path, texts: Path) -> None:
    first = dataset.build(tmp_path / "a", jsonl=texts)
    second = dataset.build(tmp_path / "b", jsonl=texts)
    files = sorted(path.name for path in first.directory.iterdir())
    for name in files:
        assert (first.directory / name).read_bytes() == (second.directory / name).read_bytes(), name
    before = {path.name: path.stat().st_mtime_ns for path in first.directory.iterdir()}
    again = dataset.build(tmp_path / "a", jsonl=texts)
    assert again.reused
    assert (again.records, again.pieces) == (first.records, first.pieces)
    assert {path.name: path.stat().st_mtime_ns for path in first.directory.iterdir()} == before


def test_other_parameters_or_a_damaged_shard_replace_the_data_set(tmp_path: Path, texts: Path) -> None:
    output = tmp_path / "out"
    dataset.build(output, jsonl=texts)
    fewer = dataset.build(output, jsonl=texts, max_documents=7, shards=2)
    assert (fewer.documents, fewer.reused) == (7, False)
    assert len(list(output.glob("*.array_record"))) == 2
    next(output.glob("*.array_record")).write_bytes(b"cut")
    assert not dataset.build(output, jsonl=texts, max_documents=7, shards=2).reused
    assert len(read_records(output)) == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out"]


def test_fewer_records_than_shards(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", {"text": "one text"}, {"text": "another"})
    built = dataset.build(tmp_path / "out", jsonl=source, shards=8)
    assert len(list(built.directory.glob("*.array_record"))) == 2


def test_standard_library_is_the_default(tmp_path: Path) -> None:
    built = dataset.build(tmp_path / "out", max_documents=6)
    assert built.documents == 6
    records = b"".join(read_records(built.directory))
    import __future__

    assert Path(__future__.__file__).read_bytes()[:200] in records
    assert b"Record of phased-in incompatible language changes" in records


def test_standard_library_documents_are_sorted_and_skip_what_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_a.py").write_text("'not this'")
    (tmp_path / "b.py").write_text('"""About b."""\nclass C:\n    """About C."""\n')
    (tmp_path / "a.py").write_bytes(b"# coding: latin-1\nx = '\xe9'\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "undecodable.py").write_bytes(b"x = '\xff\xfe'\n")
    documents = list(dataset.standard_library_documents(tmp_path))
    assert documents == [
        "# coding: latin-1\nx = 'é'\n",
        '"""About b."""\nclass C:\n    """About C."""\n',
        "module\nAbout b.\n\nC\nAbout C.",
        "def (:\n",
    ]


def test_split_text_loses_nothing_and_prefers_line_ends() -> None:
    text = "one\ntwo\n" + "z" * 25 + "\nthree"
    pieces = dataset.split_text(text, limit=10)
    assert "".join(pieces) == text
    assert pieces[0] == "one\ntwo\n"
    assert max(map(len, pieces)) <= 10


def test_messages_with_function_calls() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather in Brno?"}, {"type": "image_url"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Brno"}'}}
            ],
        },
        {"role": "tool", "name": "weather", "content": "12 °C"},
        {"role": "assistant", "content": "Cold.", "function_call": {"name": "log", "arguments": {"n": 1}}},
    ]
    text = dataset.render_messages(messages, tools=[{"name": "weather"}])
    assert text == (
        '<|tools|>\n[{"name": "weather"}]<|end|>\n'
        "<|system|>\nBe brief.<|end|>\n"
        "<|user|>\nWeather in Brno?<|end|>\n"
        '<|assistant|>\n<|tool_call|>\n{"name": "weather", "arguments": {"city": "Brno"}}\n<|end|>\n'
        "<|tool|> weather\n12 °C<|end|>\n"
        '<|assistant|>\nCold.\n<|tool_call|>\n{"name": "log", "arguments": {"n": 1}}\n<|end|>\n'
    )


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{'text': 1}", "line 2: not JSON (Expecting property name enclosed in double quotes at column 2)"),
        ("[1]", "line 2: expected a JSON object, found a list"),
        ('{"prompt": "x"}', "line 2: needs a string 'text' or a list 'messages'; keys found: 'prompt'"),
        ('{"text": 5}', "line 2: needs a string 'text' or a list 'messages'; keys found: 'text'"),
        ('{"messages": []}', "line 2: 'messages' must be a list of at least one message"),
        ('{"messages": ["x"]}', "line 2, message 1: a message must be an object with a 'role'"),
        ('{"messages": [{"role": "user", "content": 3}]}', "line 2, message 1: 'content' must be"),
        ('{"messages": [{"role": "user", "tool_calls": [{}]}]}', "line 2, message 1: a function call must be"),
        ('{"messages": [{"role": "user", "tool_calls": 7}]}', "line 2, message 1: 'tool_calls' must be a list"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "fine"}\n' + line + "\n", "utf-8")
    with pytest.raises(dataset.DatasetError) as caught:
        dataset.build(tmp_path / "out", jsonl=source)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'\n{"text": "\xff"}\n')
    with pytest.raises(dataset.DatasetError, match="line 2: not UTF-8"):
        dataset.build(tmp_path / "out", jsonl=source)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--jsonl", "missing.jsonl"], "cannot read missing.jsonl: No such file or directory"),
        (["--jsonl", "."], "cannot read .: Is a directory"),
        (["--jsonl", "blank.jsonl"], "no text found in blank.jsonl"),
        (["--jsonl", "in.jsonl", "--vocabulary-size", "100"], "the vocabulary needs at least"),
        (["--jsonl", "in.jsonl", "--shards", "0"], "the number of shards must be at least 1, not 0"),
        (["--jsonl", "in.jsonl", "--max-documents", "0"], "the number of documents must be at least 1, not 0"),
        (["--jsonl", "in.jsonl", "--output", "in.jsonl"], "is not a folder; name another --output"),
        (["--jsonl", "in.jsonl", "--output", "in.jsonl/out"], "in.jsonl is not a folder"),
        (["--jsonl", "in.jsonl", "--output", "mine"], "holds files that are not a data set"),
    ],
)
def test_command_line_errors_are_one_line(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blank.jsonl").write_text('\n{"text": "  "}\n')
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    before = sorted(path for path in tmp_path.rglob("*"))
    result = CliRunner().invoke(dataset.main, ["--output", "out", *arguments])
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert result.output.count("\n") == 1
    assert complaint in result.output
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_command_line(tmp_path: Path, texts: Path) -> None:
    arguments = ["--output", str(tmp_path / "out"), "--jsonl", str(texts)]
    first = CliRunner().invoke(dataset.main, arguments)
    assert first.exit_code == 0, first.output
    assert "written in" in first.output
    assert "40 documents, 40 records" in first.output
    assert "is up to date" in CliRunner().invoke(dataset.main, arguments).output
