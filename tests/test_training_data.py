"""Text that cannot be trained on is refused by its field, and rows that teach nothing are not made."""

import os
import time
from itertools import islice

import pyarrow
import pyarrow.parquet
import pytest
from small_tokenizers import tokenizer_of
from torch.utils.data import DataLoader

from gated_qwen.training.data import StreamedRows, documents, rows, training_rows
from gated_qwen.training.packing import one_document_a_row, pack
from gated_qwen.training.recipe import DataSection, TextSource

# What is in the file, the source's fields, and the error.
WRONG = {
    "an empty file": (b"", {"kind": "text"}, r"data\.train: there is no text"),
    "blank lines": (b"\n\n\n", {"kind": "text", "sample_by": "line"}, r"data\.train: there is no text"),
    "a binary file": (os.urandom(3000) + b"\xff", {"kind": "text"}, "it is not UTF-8 text"),
    "another encoding": ("größe\n".encode("latin-1"), {"kind": "text", "sample_by": "line"}, "it is not UTF-8 text"),
    "no parquet": (b"PAR1 and so on", {"kind": "parquet"}, r"data\.train\[0\].*cannot be read"),
    "cut json": (b'{"text": "a"}\n{"text": \n', {"kind": "json"}, r"data\.train\[0\].*JSON parse error"),
    "another column": (
        {"body": ["a"]},
        {"kind": "parquet"},
        r"data\.train\[0\]\.column: .*no column 'text', but body",
    ),
    "null text": ({"text": ["a", None]}, {"kind": "parquet"}, r"data\.train\[0\]\.column: 'text' holds nothing"),
    "numbers": ({"text": [1, 2]}, {"kind": "parquet"}, r"data\.train\[0\]\.column: 'text' holds 1 in place"),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("case", WRONG)
def test_text_that_cannot_be_read_is_named(tmp_path, monkeypatch, case, streaming):
    content, fields, error = WRONG[case]
    file = tmp_path / "file"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        pyarrow.parquet.write_table(pyarrow.table(content), file)
    fields = {**fields, fields["kind"]: str(file), "streaming": streaming}
    del fields["kind"]
    with pytest.raises(ValueError, match=error):
        list(documents([TextSource(**fields)]))


def test_a_very_long_document_takes_time_in_proportion():
    def seconds(tokens):
        began = time.process_time()
        for rows_of in (pack, one_document_a_row):
            assert sum(len(row["input_ids"]) for row in rows_of([[5] * tokens], 64)) == tokens
        return time.process_time() - began

    assert seconds(1_600_000) < 40 * max(seconds(64_000), 0.01)  # 25 times the tokens; quadratic would be 625


@pytest.mark.parametrize("packing", ["documents", "concatenated", "none"])
def test_no_row_is_without_a_target_and_none_begins_with_one(tmp_path, packing):
    (tmp_path / "text").write_text("a\nb\n" + "c" * 17 + "\n")
    source = TextSource(text=str(tmp_path / "text"), sample_by="line")
    data = DataSection(train=[source], length=8, packing=packing, bos="none", eos=False)
    made = list(rows([source], tokenizer_of("byte-level BPE"), data))
    assert made
    for row in made:
        assert row["labels"][0] == -100
        assert any(label != -100 for label in row["labels"])


WHERE = {
    "a folder": (
        "texts",
        r"data\.train\[0\]\.text: .*texts is a folder; write which of its files, .*texts/\*",
    ),
    "a pattern of nothing": ("texts/*.md", r"data\.train\[0\]\.text: .*texts/\*\.md: no such file"),
}


@pytest.mark.parametrize("case", WHERE)
def test_files_that_are_not_there_are_said_as_the_reader_wrote_them(tmp_path, case):
    (tmp_path / "texts").mkdir()
    where, error = WHERE[case]
    with pytest.raises(ValueError, match=error):
        list(documents([TextSource(text=str(tmp_path / where))]))


@pytest.mark.parametrize("files", [1, 2, 3])
def test_workers_of_a_stream_lose_and_repeat_nothing_however_many_files_there_are(tmp_path, files):
    for number in range(files):
        lines = [f"{chr(97 + number)}{chr(97 + line)}" for line in range(12 // files)]
        (tmp_path / f"{number}.txt").write_text("\n".join(lines))
    source = TextSource(text=str(tmp_path / "*.txt"), sample_by="line", streaming=True)
    data = DataSection(train=[source], length=8, packing="none", bos="none", eos=False)
    tokenizer = tokenizer_of("byte-level BPE")
    expected = [row["input_ids"] for row in rows([source], tokenizer, data)]
    stream = training_rows(tokenizer, data, tmp_path / "unused")
    loader = DataLoader(stream, batch_size=None, num_workers=2)
    assert [row["input_ids"] for row in islice(loader, 2 * len(expected))] == 2 * expected


def test_a_stream_has_no_end_and_its_workers_share_it():
    stream = StreamedRows(lambda: iter([1, 2, 3]))
    assert [row for row, _ in zip(stream, range(7), strict=False)] == [1, 2, 3, 1, 2, 3, 1]
    with pytest.raises(ValueError, match="no text in it makes a row"):
        next(iter(StreamedRows(lambda: iter([]))))
