"""Write a small, real training set that MaxText reads with Grain: ArrayRecord shards and a tokenizer.

The text is the Python standard library of the running interpreter (sources and docstrings), which every
machine has, or a JSONL file of the user's. Each record is one serialized ``tf.train.Example`` with a single
bytes feature ``text`` (UTF-8), as MaxText's ``grain_file_type=arrayrecord`` expects.

A finished folder holds ``text-00000-of-00004.array_record`` …, ``tokenizer.model`` (SentencePiece) and
``manifest.json``. The same input gives the same bytes; a folder that already holds them is left alone.
"""

import ast
import hashlib
import importlib
import io
import json
import os
import platform
import shutil
import sysconfig
import tempfile
import time
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

MANIFEST_FORMAT = 1
MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.model"
DEFAULT_SHARDS = 4
DEFAULT_VOCABULARY_SIZE = 512

# MaxText cuts one record into at most 2048 sequences; short records also shuffle better than whole files.
RECORD_CHARACTERS = 4_000
TOKENIZER_TRAINING_CHARACTERS = 1_000_000
# SentencePiece drops longer training lines (4192 bytes) without saying so.
TOKENIZER_LINE_CHARACTERS = 1_000

ROLES = ("system", "user", "assistant", "tool", "tools", "tool_call", "end")
ROLE_MARKERS = tuple(f"<|{role}|>" for role in ROLES)
# 256 byte pieces, the four control pieces, the newline and the role markers come before any learned piece.
MINIMUM_VOCABULARY_SIZE = 256 + 4 + 1 + len(ROLE_MARKERS) + 1

_NOT_TEXT_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


class DatasetError(Exception):
    """The data set cannot be made; the message is one line that says what is wrong and where."""


@dataclass(frozen=True)
class Parameters:
    """What determines the output, byte for byte.

    Attributes:
        source: ``python-standard-library`` or ``jsonl``.
        source_version: the interpreter's version, or the SHA-256 of the JSONL file.
        shards: upper bound of the number of shards; there is never an empty one.
        vocabulary_size: upper bound of the number of SentencePiece pieces.
        max_documents: number of documents to take, in order; None for all.
    """

    source: str
    source_version: str
    shards: int
    vocabulary_size: int
    max_documents: int | None


@dataclass(frozen=True)
class Dataset:
    """A finished data set folder.

    Attributes:
        directory: the folder.
        records: number of records in all shards.
        documents: number of documents they were cut from.
        characters: length of the text, in characters.
        pieces: number of pieces the tokenizer has.
        reused: True when the folder was already there and nothing was written.
    """

    directory: Path
    records: int
    documents: int
    characters: int
    pieces: int
    reused: bool

    @property
    def train_files(self) -> str:
        """The glob pattern for MaxText's ``grain_train_files``."""
        return str(self.directory / "*.array_record")

    @property
    def tokenizer(self) -> Path:
        """The SentencePiece model for MaxText's ``tokenizer_path``."""
        return self.directory / TOKENIZER_NAME


def _field(number: int, payload: bytes) -> bytes:
    """One length-delimited protobuf field (wire type 2)."""
    length = len(payload)
    encoded = bytearray([number << 3 | 2])
    while length > 0x7F:
        encoded.append(length & 0x7F | 0x80)
        length >>= 7
    encoded.append(length)
    return bytes(encoded) + payload


def encode_example(text: str) -> bytes:
    """Serialize ``tf.train.Example{features{feature{"text": bytes_list[text]}}}``.

    The message is four nested fields, so it is written by hand instead of depending on TensorFlow's or
    MaxText's generated classes (field numbers: tensorflow/core/example/example.proto and feature.proto).
    """
    feature = _field(1, _field(1, text.encode("utf-8")))
    entry = _field(1, b"text") + _field(2, feature)
    return _field(1, _field(1, entry))


def _docstrings(source: str) -> str:
    """All docstrings of a module, in the order of the source, each headed by the name it documents."""
    found = []
    nodes: list[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]
    nodes = [("module", ast.parse(source))]
    while nodes:
        name, node = nodes.pop(0)
        documentation = ast.get_docstring(node)
        if documentation:
            found.append(f"{name}\n{documentation}")
        nodes.extend(
            (child.name, child)
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        )
    return "\n\n".join(found)


def standard_library_documents(root: Path | None = None) -> Iterator[str]:
    """Yield each standard library module's source, then its docstrings as a document of their own.

    The order is that of the sorted relative paths. Tests and installed packages are left out; a file that
    cannot be read or decoded is skipped, one that does not parse has no docstring document.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    names = (path.relative_to(root) for path in root.rglob("*.py"))
    for name in sorted((n for n in names if not _NOT_TEXT_FOLDERS.intersection(n.parts)), key=Path.as_posix):
        try:
            with tokenize.open(root / name) as file:
                source = file.read()
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        if source.strip():
            yield source
        try:
            documentation = _docstrings(source)
        except (SyntaxError, ValueError, RecursionError):
            continue
        if documentation:
            yield documentation


def _compact(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


def _content(content: Any, where: str) -> str:
    """The text of a message's content: a string, null, or a list of parts of which the text ones count."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        return "\n".join(part for part in parts if isinstance(part, str))
    raise DatasetError(f"{where}: 'content' must be a string, a list of parts or null, not {_kind(content)}")


def _calls(message: dict[str, Any], where: str) -> Iterator[str]:
    """Each function call of a message as one line of JSON, in the present and the older OpenAI layout."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise DatasetError(f"{where}: 'tool_calls' must be a list, not {_kind(calls)}")
    functions = [call.get("function", call) if isinstance(call, dict) else call for call in calls]
    if message.get("function_call"):
        functions.append(message["function_call"])
    for function in functions:
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DatasetError(f"{where}: a function call must be an object with a 'name'")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            # Most data sets hold the arguments as a string of JSON; a model should see them unquoted.
            try:
                arguments = json.loads(arguments)
            except ValueError:
                pass
        yield json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def render_messages(messages: Any, tools: Any = None, where: str = "messages") -> str:
    """Render a conversation to text: a marker line per turn, function calls as JSON, ``<|end|>`` after each.

    Args:
        messages: list of ``{role, content, tool_calls?, function_call?, name?}``.
        tools: the functions offered to the model, if the record lists them.
        where: how to name the record in an error.

    Raises:
        DatasetError: the conversation is empty or malformed.
    """
    if not isinstance(messages, list) or not messages:
        raise DatasetError(f"{where}: 'messages' must be a list of at least one message")
    parts = [f"<|tools|>\n{_compact(tools)}<|end|>\n"] if tools else []
    for number, message in enumerate(messages, start=1):
        here = f"{where}, message {number}"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DatasetError(f"{here}: a message must be an object with a 'role'")
        role = "tool" if message["role"] == "function" else message["role"]
        name = message.get("name")
        heading = f"<|{role}|>" + (f" {name}" if isinstance(name, str) else "")
        body = _content(message.get("content"), here)
        calls = "".join(f"<|tool_call|>\n{call}\n" for call in _calls(message, here))
        parts.append(f"{heading}\n{body}{calls and body and chr(10)}{calls}<|end|>\n")
    return "".join(parts)


def jsonl_documents(path: Path) -> Iterator[str]:
    """Yield one document per line of a JSONL file with ``text``, or with ``messages`` (and ``tools``).

    Blank lines are skipped, and so are texts that hold only white space.

    Raises:
        DatasetError: a line is not UTF-8, not JSON, or has neither key; the message names the line.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    document = _jsonl_document(line, f"{path} line {number}")
                    if document.strip():
                        yield document
    except OSError as error:
        raise DatasetError(f"cannot read {path}: {error.strerror or error}") from error


def _jsonl_document(line: bytes, where: str) -> str:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DatasetError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise DatasetError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(value, dict):
        raise DatasetError(f"{where}: expected a JSON object, found {_kind(value)}")
    if isinstance(value.get("text"), str):
        return value["text"]
    if "messages" in value:
        return render_messages(value["messages"], value.get("tools") or value.get("functions"), where)
    found = ", ".join(map(repr, value)) or "none"
    raise DatasetError(f"{where}: needs a string 'text' or a list 'messages'; keys found: {found}")


def split_text(text: str, limit: int = RECORD_CHARACTERS) -> list[str]:
    """Cut text into pieces of at most ``limit`` characters, at the end of a line where there is one.

    The pieces joined are the text.
    """
    pieces = []
    start = 0
    while len(text) - start > limit:
        end = text.rfind("\n", start, start + limit) + 1 or start + limit
        pieces.append(text[start:end])
        start = end
    pieces.append(text[start:])
    return [piece for piece in pieces if piece]


def _import(module: str) -> Any:
    """Import a library that only the ``maxtext`` extra installs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = module.partition(".")[0]
        raise DatasetError(f"{missing} is missing; in Ridgeway's folder: pip install -e '.[maxtext]'") from error


def _train_tokenizer(records: Sequence[str], vocabulary_size: int) -> tuple[bytes, int]:
    """Train a byte-pair SentencePiece model; returns it serialized, with its number of pieces."""
    sentencepiece = _import("sentencepiece")
    characters = sum(map(len, records))
    stride = max(1, -(-characters // TOKENIZER_TRAINING_CHARACTERS))
    lines = [
        line[start : start + TOKENIZER_LINE_CHARACTERS]
        for record in records[::stride]
        for line in record.splitlines()
        for start in range(0, len(line), TOKENIZER_LINE_CHARACTERS)
    ]
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocabulary_size,
            hard_vocab_limit=False,
            # Any text must survive the round trip: code has indentation, line ends and rare characters.
            byte_fallback=True,
            character_coverage=0.995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            add_dummy_prefix=False,
            user_defined_symbols=["\n", *ROLE_MARKERS],
            # MaxText masks the loss where the token equals the padding id, and Grain packs with zeros.
            pad_id=0,
            bos_id=1,
            eos_id=2,
            unk_id=3,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DatasetError(f"cannot train a tokenizer of {vocabulary_size} pieces: {error}") from error
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model.getvalue())
    return model.getvalue(), processor.vocab_size()


def _write_shards(directory: Path, records: Sequence[str], shards: int) -> None:
    array_record = _import("array_record.python.array_record_module")
    shards = min(shards, len(records))
    for shard in range(shards):
        path = directory / f"text-{shard:05d}-of-{shards:05d}.array_record"
        # One record per chunk: Grain reads in shuffled order.
        try:
            writer = array_record.ArrayRecordWriter(str(path), "group_size:1")
            for record in records[shard::shards]:
                writer.write(encode_example(record))
            writer.close()
        except RuntimeError as error:
            raise DatasetError(f"cannot write {path}: {error}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _finished(directory: Path, parameters: Parameters) -> Dataset | None:
    """The data set in ``directory`` if it is whole and was made with the same parameters."""
    try:
        manifest = json.loads((directory / MANIFEST_NAME).read_text("utf-8"))
        same = manifest["format"] == MANIFEST_FORMAT and manifest["parameters"] == asdict(parameters)
        whole = all((directory / name).stat().st_size == f["bytes"] for name, f in manifest["files"].items())
        counts = {key: manifest[key] for key in ("records", "documents", "characters", "pieces")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Dataset(directory, **counts, reused=True) if same and whole else None


def _check_output(output: Path) -> None:
    """Refuse a place that is taken by something that this program has not made."""
    try:
        if output.exists() and not output.is_dir():
            raise DatasetError(f"{output} is not a folder; name another --output")
        if output.exists() and any(output.iterdir()) and not (output / MANIFEST_NAME).is_file():
            raise DatasetError(f"{output} holds files that are not a data set; name another --output")
    except OSError as error:
        raise DatasetError(f"cannot read {output}: {error.strerror or error}") from error


def _put_in_place(temporary: Path, output: Path) -> None:
    """Rename the finished folder to its name; an older data set of ours makes way and is removed."""
    if not output.exists() or not any(output.iterdir()):
        temporary.rename(output)
        return
    old = temporary.with_name(temporary.name + ".old")
    output.rename(old)
    try:
        temporary.rename(output)
    except OSError:
        old.rename(output)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _take(documents: Iterator[str], maximum: int | None) -> tuple[list[str], int, int]:
    """The records of the first ``maximum`` documents, the number of documents and of characters."""
    records: list[str] = []
    count = characters = 0
    for document in documents:
        if maximum is not None and count == maximum:
            break
        count += 1
        characters += len(document)
        records.extend(split_text(document))
    return records, count, characters


def build(
    output: Path,
    *,
    jsonl: Path | None = None,
    shards: int = DEFAULT_SHARDS,
    vocabulary_size: int = DEFAULT_VOCABULARY_SIZE,
    max_documents: int | None = None,
) -> Dataset:
    """Make the data set in ``output``, or return it as it is when it was made with the same parameters.

    Everything is written to a temporary folder beside ``output`` and renamed when complete, so ``output`` is
    never half a data set. A data set made with other parameters is replaced.

    Raises:
        DatasetError: bad parameters or input, or ``output`` cannot be written or holds something else.
    """
    if shards < 1:
        raise DatasetError(f"the number of shards must be at least 1, not {shards}")
    if vocabulary_size < MINIMUM_VOCABULARY_SIZE:
        raise DatasetError(f"the vocabulary needs at least {MINIMUM_VOCABULARY_SIZE} pieces, not {vocabulary_size}")
    if max_documents is not None and max_documents < 1:
        raise DatasetError(f"the number of documents must be at least 1, not {max_documents}")
    try:
        python = f"{platform.python_implementation()} {platform.python_version()}"
        version = _sha256(jsonl) if jsonl else python
    except OSError as error:
        raise DatasetError(f"cannot read {jsonl}: {error.strerror or error}") from error
    source = "jsonl" if jsonl else "python-standard-library"
    parameters = Parameters(source, version, shards, vocabulary_size, max_documents)
    output = output.absolute()
    if (finished := _finished(output, parameters)) is not None:
        return finished
    _check_output(output)
    documents = jsonl_documents(jsonl) if jsonl else standard_library_documents()
    records, count, characters = _take(documents, max_documents)
    if not records:
        where = str(jsonl) if jsonl else f"the standard library at {sysconfig.get_paths()['stdlib']}"
        raise DatasetError(f"no text found in {where}")
    model, pieces = _train_tokenizer(records, vocabulary_size)

    temporary = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}.partial-", dir=output.parent))
        (temporary / TOKENIZER_NAME).write_bytes(model)
        _write_shards(temporary, records, shards)
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(temporary.iterdir())
        }
        manifest = {
            "format": MANIFEST_FORMAT,
            "parameters": asdict(parameters),
            "documents": count,
            "records": len(records),
            "characters": characters,
            "pieces": pieces,
            "files": files,
        }
        (temporary / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
        # mkdtemp makes private folders; the data set is as readable as any folder the user makes.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)
        _put_in_place(temporary, output)
    except FileExistsError as error:
        raise DatasetError(f"cannot write {output}: {error.filename} is not a folder") from error
    except OSError as error:
        raise DatasetError(f"cannot write {output}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return Dataset(output, len(records), count, characters, pieces, reused=False)


@click.command(help=__doc__)
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option("--jsonl", type=click.Path(path_type=Path), help="Take the text from this file instead.")
@click.option("--shards", default=DEFAULT_SHARDS, show_default=True, help="ArrayRecord files, at most.")
@click.option("--vocabulary-size", default=DEFAULT_VOCABULARY_SIZE, show_default=True, help="Tokens, at most.")
@click.option("--max-documents", type=int, help="Take only the first N documents.")
def main(output: Path, jsonl: Path | None, shards: int, vocabulary_size: int, max_documents: int | None) -> None:
    started = time.monotonic()
    try:
        dataset = build(
            output, jsonl=jsonl, shards=shards, vocabulary_size=vocabulary_size, max_documents=max_documents
        )
    except DatasetError as error:
        raise click.ClickException(str(error)) from error
    state = "is up to date" if dataset.reused else f"written in {time.monotonic() - started:.1f} s"
    click.echo(
        f"{dataset.directory} {state}: {dataset.documents} documents, {dataset.records} records, "
        f"{dataset.characters / 1e6:.1f} million characters, {dataset.pieces} tokenizer pieces"
    )


if __name__ == "__main__":
    main()
